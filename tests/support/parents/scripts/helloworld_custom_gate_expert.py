"""A gate and experts that are classes of one's own."""

import torch
from tests.support.parents.steps import RATE, D, averaged, mark, ten_steps

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(backend="gloo")


class OwnGate(torch.nn.Module):
    def __init__(self, model_dim, num_global_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.wg = torch.nn.Linear(model_dim, num_global_experts, bias=False)

    def forward(self, x):
        return torch.tanh(self.wg(x))


class OwnExperts(torch.nn.Module):
    def __init__(self, model_dim, num_experts_per_device, sharded_count, power):
        super().__init__()
        assert sharded_count == 1
        self.w = torch.nn.Parameter(0.1 * torch.randn(num_experts_per_device, model_dim, model_dim))
        self.power = power

    def forward(self, x, ctx):
        return torch.relu(x @ self.w) ** self.power


layer = moe.moe_layer(
    gate_type={"type": "custom", "module": OwnGate, "top_k": 1},
    experts={"type": "custom", "module": OwnExperts, "num_experts_per_device": 2, "power": 2},
    model_dim=D,
    scan_expert_func=mark,
    seeds=(1, env.global_rank + 1, 1),
)
optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
losses = ten_steps(lambda x, _: layer(x), optimizer, lambda: averaged(layer, net))
