"""With a GPU: experts and dense layers in host memory train a model that the device could not hold."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.apply import follow_optimizer, parallelize
from expertmesh.parallel.clip import clip_grad_norm_

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CAP = 512 * MIB
DIM, HIDDEN, EXPERTS, LAYERS = 512, 1024, 8, 8
BYTES_PER_PARAMETER = 16  # FP32: itself, its gradient and two moments


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(
            MoELayer(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, top_k=2, device=device) for _ in range(LAYERS)
        )
        self.out = nn.Linear(DIM, 4 * DIM, device=device)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.out(x)


@pytest.fixture
def alone():
    """A world of one rank with groups for both kinds of memory, and a cap on the device's."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World(device_type="cuda")
    dist.destroy_process_group()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def losses_of(world, *, offload):
    model = Model("cpu" if offload else "cuda")
    states = BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    assert states >= 3 * CAP
    config = ParallelConfig(offload=offload)
    parallelize(model, config, world=world, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    follow_optimizer(model, optimizer)
    x = torch.randn(64, DIM, device="cuda")
    losses = []
    for _ in range(3):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_states_of_three_times_the_memory_train(alone):
    losses = losses_of(alone, offload=True)
    assert losses[-1] < losses[0]
    assert torch.cuda.max_memory_reserved() <= CAP


def test_they_do_not_fit_without(alone):
    with pytest.raises(torch.OutOfMemoryError):
        losses_of(alone, offload=False)
