"""The layer with a hand-written average of what ranks share."""

import torch
from tests.support.parents.steps import GATE, RATE, D, H, averaged, mark, ten_steps
from torch.nn import functional as F

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(group_count=1, backend="gloo")
layer = moe.moe_layer(
    gate_type=dict(GATE),
    experts={
        "type": "ffn",
        "num_experts_per_device": 2,
        "hidden_size_per_expert": H,
        "activation_fn": lambda x: F.relu(x),
    },
    model_dim=D,
    scan_expert_func=mark,
    seeds=(1, env.global_rank + 1, 1),
    a2a_ffn_overlap_degree=1,
    parallel_type="adaptive:1",
    use_2dh=False,
).to(env.local_device)
begin = system.record_time()
optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
losses = ten_steps(lambda x, _: layer(x), optimizer, lambda: averaged(layer, net), l_aux_wt=0.1)
group = system.get_local_session().model_group
assert moe.moe_layer.global_expert_count(2, group=group) == 2 * env.global_size
assert system.record_time() > begin and layer.l_aux.isfinite()
