"""Experts of one's own, of which ranks may have slices that they gather."""

import torch
from tests.support.parents.steps import GATE, RATE, D, averaged, mark, ten_steps

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(backend="gloo")


class Sliced(torch.nn.Module):
    def __init__(self, model_dim, local_experts, sharded_count, my_config):
        super().__init__()
        self.sharded_count, self.shape = sharded_count, (local_experts, model_dim, model_dim)
        size = local_experts * model_dim * model_dim
        self.w = torch.nn.Parameter(0.1 * torch.randn(-(-size // sharded_count)))
        assert my_config is None

    def forward(self, x, ctx):
        group = net.create_groups_from_world(-self.sharded_count, parent_group=ctx.group)
        return x @ net.zero_gather(self.w, self.shape, group=group.model_group)


experts = {
    "type": "custom",
    "module": Sliced,
    "num_experts_per_device": -env.global_size,
    "my_config": None,
}
layer = moe.moe_layer(GATE | {"k": 1}, D, experts, mark, seeds=(1, env.global_rank + 1, 1))
optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
losses = ten_steps(lambda x, _: layer(x), optimizer, lambda: averaged(layer, net))
