"""A layer of one's own from the parts."""

import torch
from tests.support.parents.steps import BATCH, RATE, TOKENS, D, averaged, ten_steps
from torch.nn import functional as F

from expertmesh.integrations.tutel import moe, net, system

env = system.init_data_model_parallel(backend="gloo")
count = 2 * env.global_size
torch.manual_seed(env.global_rank + 1)
w = torch.nn.Parameter(0.1 * torch.randn(2, D, D))
w.skip_allreduce = True
torch.manual_seed(1)
gate = torch.nn.Linear(D, count, bias=False)
gate.register_parameter("experts", w)


def call(x, step):
    x = x.reshape(-1, D)
    routed, l_aux = moe.top_k_routing(F.softmax(gate(x), dim=-1), top_k=2, capacity_factor=0)
    ids, counts = moe.get_topk_selection(routed)
    tokens = moe.get_reversed_sample_ids(routed, return_id_type="sample_id")
    choices = moe.get_reversed_sample_ids(routed, return_id_type="top_id")
    assert ids.shape == (len(x), 2) and int(counts.sum()) == 2 * len(x)
    expert, row = (tokens >= 0).nonzero().T
    token, choice = tokens[expert, row].long(), choices[expert, row].long()
    assert len(token) == 2 * len(x) and torch.equal(ids[token, choice], expert)
    rows = net.all_to_all(moe.fast_encode(x, routed), 1, 0)
    rows = net.all_to_all(torch.relu(rows @ w), 0, 1)
    y = moe.fast_decode(rows, routed).view(BATCH, TOKENS, D)
    y.l_aux = l_aux
    return y


optimizer = torch.optim.SGD(gate.parameters(), lr=RATE)
losses = ten_steps(call, optimizer, lambda: averaged(gate, net))
