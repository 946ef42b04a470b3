"""The layer under autocast in BF16."""

import torch
from tests.support.parents.steps import GATE, RATE, D, H, averaged, mark, ten_steps

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(backend="gloo")
experts = {"type": "ffn", "count_per_node": 2, "hidden_size_per_expert": H}
layer = moe.moe_layer(dict(GATE), D, experts, mark, seeds=(1, env.global_rank + 1, 1))


def call(x, _):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32
    return y


optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
losses = ten_steps(call, optimizer, lambda: averaged(layer, net))
