"""A small network for images with an expert layer of another output size, dropout in its activation, and gate noise."""

import torch
from tests.support.parents.steps import mark
from torch import nn
from torch.nn import functional as F

from expertmesh.integrations.tutel import moe, net, system


def learned(images):
    """Losses of ten steps on a set of `torchvision`'s form; every expert count of evaluation is tried, too."""
    env = system.init_data_model_parallel(backend="gloo")
    torch.manual_seed(1)
    drop = nn.Dropout(0.5)
    size = images[0][0].numel()
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": 1, "capacity_factor": 0, "gate_noise": 1.0},
        experts={
            "type": "ffn",
            "num_experts_per_device": 1,
            "hidden_size_per_expert": 32,
            "output_dim": 10,
            "activation_fn": lambda x: drop(F.relu(x)),
        },
        model_dim=size,
        seeds=(1, env.global_rank + 1),
        scan_expert_func=mark,
    )
    x = torch.stack([image.flatten() for image, _ in images])[:32]
    target = torch.tensor([label for _, label in images])[:32]
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.05), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(x), target)
        loss.backward()
        for p in layer.parameters():
            if not hasattr(p, "skip_allreduce") and p.grad is not None:
                p.grad = net.simple_all_reduce(p.grad)
        optimizer.step()
        losses.append(float(loss.detach()))
    layer.eval()
    drop.eval()
    with torch.no_grad():
        outputs = [layer(x, top_k=k) for k in (1, 2, 8)]
    assert all(y.shape == (32, 10) and y.isfinite().all() for y in outputs)
    return losses
