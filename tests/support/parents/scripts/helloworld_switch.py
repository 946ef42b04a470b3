"""Degrees of pipelining and of parallelism that change from call to call."""

import torch
from tests.support.parents.steps import GATE, RATE, D, H, averaged, mark, ten_steps

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(backend="gloo")
experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": H}
layer = moe.moe_layer(
    gate_type=GATE | {"capacity_factor": 1.0},
    experts=experts,
    model_dim=D,
    scan_expert_func=mark,
    seeds=(1, env.global_rank + 1, 1),
    a2a_ffn_overlap_degree=2,
)
assert layer.a2a_ffn_overlap_degree == 2 and layer.valid_rs == [0, 1]


def call(x, step):
    r = layer.valid_rs[step // 2 % 2]
    degree = (1, 2)[step % 2]
    return layer(x, capacity_factor=4.0, a2a_ffn_overlap_degree=degree, adaptive_r=r, top_k=2)


optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
losses = ten_steps(call, optimizer, lambda: averaged(layer, net))
