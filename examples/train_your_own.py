"""Trains a module, data and loss of one's own: python examples/train_your_own.py, or torchrun --nproc-per-node 2 ...

Progress, clipping, precision, metrics and checkpoints come with it; started again, it goes on where it stopped.
"""

import torch
import torch.nn.functional as F
from torch import nn

import expertmesh as em


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = em.MoELayer(dim=16, hidden_dim=32, num_experts=4, top_k=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        y, stats = self.moe(x)
        return self.head(x + y), stats


def loss(model, x, y):
    logits, stats = model(x)
    return F.cross_entropy(logits, y), stats


def measure(model, x, y):
    return {"accuracy": (model(x)[0].argmax(1) == y).double().mean()}


if __name__ == "__main__":
    x = torch.randn(2400, 16, generator=torch.Generator().manual_seed(0))
    y = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)  # the quarter of the plane of two coordinates
    config = em.RunConfig(
        optim={"lr": 1e-2},
        train={"steps": 200, "batch_size": 64, "run_dir": "runs/quadrants", "resume": "auto"},
    )
    result = em.train(Classifier, config, data=(x, y), loss=loss, measure=measure)
    if result.is_leader:
        print(f"{result.evaluation['accuracy']:.1%} right after {result.step} steps")
