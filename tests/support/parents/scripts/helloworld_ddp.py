"""The layer in DistributedDataParallel, which is told to leave the experts alone."""

import torch
from tests.support.parents.steps import GATE, RATE, D, H, mark, ten_steps

from expertmesh.integrations.tutel import moe, system

env = system.init_data_model_parallel(backend="gloo")
experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": H}
model = torch.nn.Sequential(
    moe.moe_layer(
        gate_type=dict(GATE),
        experts=experts,
        model_dim=D,
        scan_expert_func=mark,
        seeds=(1, env.global_rank + 1, 1),
    )
)
model._ddp_params_and_buffers_to_ignore = [name for name, p in model.named_parameters() if hasattr(p, "skip_allreduce")]
if torch.distributed.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
losses = ten_steps(lambda x, _: model(x), optimizer)
