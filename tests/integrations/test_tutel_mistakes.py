"""What Tutel's users may write by mistake is told in one line; what they may read of a layer is there."""

import pytest
import torch
from torch import nn

from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import moe, net

D = 8
X = torch.zeros(3, D)


def layer(gate=(), experts=(), model_dim=D, **options):
    gate = dict(gate) if dict(gate).get("type") == "custom" else {"type": "top", "k": 2} | dict(gate)
    experts = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 6} | dict(experts)
    return moe.moe_layer(gate, model_dim, experts, **options)


def padded(**options):
    return layer(is_postscore=False, **options)


class Wide(nn.Module):
    """A gate with a logit too many."""

    def __init__(self, model_dim, num_global_experts):
        super().__init__()
        self.top_k, self.wg = 1, nn.Linear(model_dim, num_global_experts + 1)

    def forward(self, x):
        return self.wg(x)


def no_top_k(model_dim, num_global_experts):
    return nn.Linear(model_dim, num_global_experts)


ROUTED, _ = moe.top_k_routing(torch.full((4, 3), 1 / 3), 1)
WRONG = {
    "k='2'": lambda: layer({"k": "2"}),
    "k=0": lambda: layer({"k": 0}),
    "top_k=-1": lambda: layer()(X, top_k=-1),
    "model_dim='8'": lambda: layer(model_dim="8"),
    "hidden_size_per_expert=0": lambda: layer(experts={"hidden_size_per_expert": 0}),
    "hidden_size_per_expert=-3": lambda: padded(experts={"hidden_size_per_expert": -3}),
    "hidden_size_per_expert='6'": lambda: padded(experts={"hidden_size_per_expert": "6"}),
    "output_dim='x'": lambda: layer(experts={"output_dim": "x"}),
    "activation_fn='relu'": lambda: layer(experts={"activation_fn": "relu"}),
    "num_experts_per_device=1.5": lambda: layer(experts={"num_experts_per_device": 1.5}),
    "num_experts_per_device='2'": lambda: layer(experts={"num_experts_per_device": "2"}),
    "gate_noise=-1.0": lambda: layer({"gate_noise": -1.0}),
    "capacity_factor='x'": lambda: layer({"capacity_factor": "x"}),
    "capacity_factor=nan": lambda: layer()(X, capacity_factor=float("nan")),
    "proj_dim=0": lambda: layer({"type": "cosine_top", "proj_dim": 0}),
    "init_t=0": lambda: layer({"type": "cosine_top", "init_t": 0}),
    "a2a_ffn_overlap_degree=0": lambda: layer(a2a_ffn_overlap_degree=0),
    "a2a_ffn_overlap_degree=-2": lambda: layer()(X, a2a_ffn_overlap_degree=-2),
    "a2a_ffn_overlap_degree=1.5": lambda: layer(a2a_ffn_overlap_degree=1.5),
    "megablocks_size=-1": lambda: layer()(X, megablocks_size=-1),
    "seeds is an int": lambda: layer(seeds=3),
    "input of shape (8,)": lambda: layer()(torch.zeros(D)),
    "input of shape (3, 7)": lambda: padded()(torch.zeros(3, 7)),
    "input of torch.int64": lambda: padded()(X.long()),
    "input is a list": lambda: layer()([[0.0] * D]),
    "logits of shape (3, 5)": lambda: layer({"type": "custom", "module": Wide})(X),
    "Linear has no top_k": lambda: layer({"type": "custom", "module": no_top_k}),
    "scores of shape": lambda: moe.top_k_routing(torch.zeros(4, 3, 2), 1),
    "data of 5 tokens": lambda: moe.fast_encode(torch.zeros(5, D), ROUTED),
    "data of 5 rows": lambda: moe.fast_decode(torch.zeros(5, D), ROUTED),
    "call warp_local": lambda: net.TutelDistributedOptimizer(layer().parameters()).step(),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_in_one_line(words):
    with pytest.raises(ConfigError) as error:
        WRONG[words]()
    told = str(error.value)
    assert words.replace("'", "") in told.replace("'", "") and "\n" not in told


def test_files_of_another_number_of_experts_are_refused():
    ours = layer()
    state = ours.state_dict() | {"_num_global_experts": torch.tensor(77)}
    with pytest.raises(RuntimeError, match="77 experts do not fit the layer's 4; [^\n]*gather"):
        ours.load_state_dict(state)


@pytest.mark.parametrize("make", [layer, padded])
def test_a_layer_tells_what_tutels_tells(make):
    found = make(gate={"gate_noise": 1.0}, result_func=lambda y: (y, y.l_aux))
    (gate,) = found.gates
    assert (gate.top_k, gate.gate_noise, gate.capacity_factor) == (2, 1.0, 1.0)
    assert gate.wg.weight.shape == (4, D) and found.group is None
    counts = (
        found.num_local_experts,
        found.num_global_experts,
        found.world_size,
        found.sharded_count,
    )
    assert counts == (4, 4, 1, 1) and found.model_dim == D and found.normalize_gate
    assert not found.batch_prioritized_routing and found.is_gshard_loss
    assert found.is_postscore == (make is layer)
    own = dict(found.get_parameter_iterator("local_experts"))
    assert {id(p) for p in found.experts.parameters()} == {id(p) for p in own.values()}
    y, loss = found(X)
    assert y.shape == X.shape and loss is found.l_aux
