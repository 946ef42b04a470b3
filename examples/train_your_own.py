"""Trains a module of one's own; started again, or by torchrun, it goes on: python examples/train_your_own.py"""

import torch
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
    right = (logits.argmax(1) == y).float().mean()
    return nn.functional.cross_entropy(logits, y), stats, {"accuracy": right}


if __name__ == "__main__":
    x = torch.randn(2400, 16, generator=torch.Generator().manual_seed(0))
    y = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)  # the quarter of the plane of two coordinates
    run = {"train.run_dir": "runs/quadrants", "train.resume": "auto", "train.steps": 200}
    result = em.train(Classifier, {**run, "optim.lr": 1e-2}, data=(x, y), loss=loss)
    if result.is_leader:  # of several ranks, one says it
        print(f"{result.evaluation['accuracy']:.1%} right after {result.step} steps")
