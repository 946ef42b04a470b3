"""The layer with the sharded optimizer."""

import torch
from tests.support.parents.steps import GATE, RATE, D, H, ten_steps

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(backend="gloo")
experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": H}
layer = moe.moe_layer(dict(GATE), D, experts, seeds=(1, env.global_rank + 1, 1), parallel_type="auto")
optimizer = net.TutelDistributedOptimizer(layer.parameters(), average_shared=True)
optimizer = optimizer.warp_local(torch.optim.SGD, lr=RATE)
losses = ten_steps(lambda x, _: layer(x), optimizer)
