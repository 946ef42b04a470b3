"""A rank that has no row of a batch computes none, and its gradients are zeros."""

import pytest
import torch

from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

IDS = torch.ones(0, 5, dtype=torch.int64)
SMALL = {"vocab_size": 20, "dim": 16, "num_heads": 2}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gpt(batch_invariant):
    model = GPT(ModelConfig(**SMALL, num_layers=2, batch_invariant=batch_invariant), seed=0)
    for mode in (True, False):
        logits = model.train(mode)(IDS).logits_BSV
        assert logits.shape == (0, 5, 20)
        logits.sum().backward()
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
