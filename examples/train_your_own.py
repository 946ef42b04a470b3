"""Trains a model, data and loss of one's own: python examples/train_your_own.py, or torchrun --nproc-per-node 2 ...

Progress, clipping, precision, metrics and checkpoints come with it; started again, it goes on where it stopped.
"""

import torch
import torch.nn.functional as F
from torch import nn

from expertmesh import MoELayer
from expertmesh.config.family import Family, Metric
from expertmesh.config.run import OptimConfig, RunConfig, TrainConfig
from expertmesh.data.tensors import TensorData
from expertmesh.models.family import Loss, Task
from expertmesh.training.loop import train


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoELayer(dim=16, hidden_dim=32, num_experts=4, top_k=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        y, stats = self.moe(x)
        return self.head(x + y), stats


class Quadrants(Task):
    """In which quarter of the plane of its first two coordinates is a point?"""

    def prepare(self):
        x = torch.randn(2400, 16, generator=torch.Generator().manual_seed(0))
        y = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
        return TensorData((x[:2000], y[:2000]), (x[2000:], y[2000:]), seed=self.config.train.seed)

    def build(self, *, device, dtype):
        return Classifier().to(device, dtype)

    def loss(self, model, batch, part):
        logits, stats = model(batch[0])
        return Loss(F.cross_entropy(logits, batch[1], reduction="sum"), [stats])

    def measure(self, model, batch, part):
        logits, _ = model(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="sum")
        right = (logits.argmax(1) == batch[1]).sum()
        return {"loss": losses, "accuracy": right, "items": len(logits)}


QUADRANTS = Family(
    "quadrants",
    task=Quadrants,
    items="points",
    metric=Metric("accuracy", "accuracy", "accuracy", higher_is_better=True),
)

if __name__ == "__main__":
    config = RunConfig(
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(steps=200, batch_size=64, run_dir="runs/quadrants", resume="auto"),
    )
    result = train(config, family=QUADRANTS)
    if result.is_leader:
        print(f"{result.evaluation['accuracy']:.1%} right after {result.step} steps")
