"""Every row of the tables of docs/migrate.md is run: the parent's words, and ours beside them, on equal weights.

`test_migrate_table.py` has the numbers in them.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.integrations import test_parents, test_transformers_trainer_ranks
from tests.oracle.numerics import assert_close_fp64
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from expertmesh import MoELayer, Routing, functional
from expertmesh.errors import ConfigError
from expertmesh.integrations import deepspeed, fairseq, tutel

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
D, H, E, T = 6, 10, 4, 16


def tables():
    """Left and right sides of the rows, by the head of the table."""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        head, _, *rows = block.splitlines()
        found[head.split("|")[1].strip()] = [
            [cell.strip() for cell in re.split(r" \| ", row.strip("| "))] for row in rows
        ]
    return found


def rows_of(begin):
    (found,) = (rows for head, rows in tables().items() if head.startswith(begin))
    return found


def tokens():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(theirs, inner, options, *, apart=(), **call):
    """A layer with our words has the door's options, but for those `apart`, and computes what the door computes."""
    ours = MoELayer(**{"dim": D, "hidden_dim": H, "num_experts": E, "top_k": 2} | options).double()
    names = {"router": "router_kind"} | dict.fromkeys(("seed", "residual", "experts"))
    for name in options:
        name = names.get(name, name)
        if name and name not in apart and hasattr(ours.options, name):
            assert getattr(ours.options, name) == getattr(inner.options, name), name
    state = dict(inner.state_dict())
    if "router.cosine_projector.weight" in state:
        state["router.proj.weight"] = state.pop("router.cosine_projector.weight")
        state["router.expert_embeddings"] = state.pop("router.sim_matrix").T
        state["router.log_scale"] = state.pop("router.temperature")
        assert not state.pop("router.cosine_projector.bias").any()
    if "router.wg.weight" in state:
        state["router.proj.weight"] = state.pop("router.wg.weight")
    ours.load_state_dict(state | {n: v for n, v in ours.state_dict().items() if n not in state})
    y, stats = ours.eval()(tokens(), **call)
    (expected, aux) = theirs
    assert_close_fp64(y.detach(), expected.detach(), what="y")
    assert_close_fp64(stats.aux_loss.detach(), aux.detach(), what="loss")


def of_tutel(gate=None, experts=None, ours=None, call=None, **options):
    gate = {"type": "top", "k": 2, "capacity_factor": 0} | (gate or {})
    given = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H} | (experts or {})
    layer = tutel.moe_layer(gate, D, given, **options).double().eval()
    if gate["type"] == "cosine_top":
        nn.init.zeros_(layer._layer.router.cosine_projector.bias)
    y = layer(tokens(), **(call or {}))
    base = {
        "activation": "relu",
        "bias": True,
        "normalize_weights": "topk",
        "balance_loss": "gshard",
    }
    own = base | {"aux_loss_weight": 1.0} | (ours or {})
    # the door has a gate's module, and gives every call its capacity
    apart = {"router_kind", "cosine_dim"}
    apart |= {"capacity_factor", "eval_capacity_factor", "max_capacity_factor"}
    same((y, y.l_aux), layer._layer, own, apart=apart)


def limited(factor):
    return {"capacity_factor": factor, "eval_capacity_factor": factor, "min_capacity": 1}


class Normal(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.5 * x)


TUTEL = {
    "`model_dim`": [{"experts": {"hidden_size_per_expert": 7}, "ours": {"hidden_dim": 7}}],
    "`num_experts_per_device`": [{"experts": {"num_experts_per_device": 3}, "ours": {"num_experts": 3}}],
    "`gate_type=": [
        {"gate": {"k": 3}, "ours": {"top_k": 3}},
        {"gate": {"type": "cosine_top", "proj_dim": 5}, "ours": {"router": "cosine", "cosine_dim": 5}},
    ],
    "`gate_noise`": [
        {"gate": {"gate_noise": 1.5}, "ours": {"router_noise": "gaussian", "router_noise_std": 1.5 / E}}
    ],
    "`capacity_factor` c": [
        {"gate": {"capacity_factor": 0.5}, "ours": limited(0.5)},
        {"gate": {"capacity_factor": 0}},
        {"gate": {"capacity_factor": -0.5}, "ours": {"max_capacity_factor": 0.5, "min_capacity": 1}},
    ],
    "`batch_prioritized_routing`": [
        {"gate": {"capacity_factor": 0.5}, "batch_prioritized_routing": True, "ours": limited(0.5) | {"drop_policy": "priority"}},  # noqa: E501
        {"gate": {"capacity_factor": 0.5}, "ours": limited(0.5) | {"drop_policy": "first"}},
    ],
    "`normalize_gate`": [
        {"normalize_gate": False, "ours": {"normalize_weights": "none"}},
        {"gate": {"k": 1}, "ours": {"top_k": 1, "normalize_weights": "none"}},
    ],
    "`w * l_aux`, `is_gshard_loss=True`": [{}],
    "`w * l_aux`, `is_gshard_loss=False`": [
        {
            "gate": {"gate_noise": 1.0},
            "is_gshard_loss": False,
            "ours": {"balance_loss": "importance_load", "aux_loss_weight": E / (E - 1)},
        }
    ],
    "`activation_fn`": [
        {"experts": {"activation_fn": torch.nn.functional.silu}, "ours": {"activation": "silu"}},
        {"experts": {"has_fc1_bias": False, "has_fc2_bias": False}, "ours": {"bias": False}},
    ],
    "`adaptive_r`": [{"call": {"adaptive_r": 1}}],
    "`seeds`": [{"seeds": (3, 4, 5), "ours": {"seed": 3}}],
}  # fmt: skip


def of_deepspeed(ours=None, used=None, experts=None, **options):
    torch.manual_seed(0)
    expert = experts or nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))
    k = options.setdefault("k", 2)
    layer = deepspeed.MoE(D, expert, num_experts=E, **options).double().eval()
    y, aux, _ = layer(tokens(), used)
    if options.get("use_residual"):
        ours = (ours or {}) | {"residual": False}
        y = layer.deepspeed_moe(tokens())[0]
    base = {"activation": "relu", "bias": True, "aux_loss_weight": 1.0, "top_k": k}
    base |= {"normalize_weights": "none" if k == 1 else "kept", "capacity_factor": 1.0}
    base |= {
        "eval_capacity_factor": 1.0,
        "min_capacity": 4,
        "balance_loss": "gshard" if k == 2 else "switch",
    }
    base |= {"drop_policy": {1: "random", 2: "first"}.get(k, "weight")}
    mask = {} if used is None else {"token_mask": used != 0}
    same((y, aux), layer.deepspeed_moe, base | (ours or {}), **mask)


FREE = {"capacity_factor": None, "eval_capacity_factor": None}
DEEPSPEED = {
    "`hidden_size`, `expert`": [{}],
    "`k`": [{"k": 1}, {"k": 2}, {"k": 3}],
    "`capacity_factor`, `eval_capacity_factor`, `min_capacity`": [
        {"capacity_factor": 0.7, "eval_capacity_factor": 0.5, "min_capacity": 2,
         "ours": {"capacity_factor": 0.7, "eval_capacity_factor": 0.5, "min_capacity": 2}},
        {},
    ],
    "`drop_tokens=False`": [{"drop_tokens": False, "ours": FREE | {"normalize_weights": "topk"}}],
    "`use_rts` (k = 1)": [
        {"k": 1, "use_rts": True, "ours": {"drop_policy": "random"}},
        {"k": 1, "use_rts": False, "ours": {"drop_policy": "first"}},
        {"k": 2, "ours": {"drop_policy": "first"}},
        {"k": 3, "ours": {"drop_policy": "weight"}},
    ],
    "`w * l_aux`": [{"k": 2}, {"k": 3}],
    '`noisy_gate_policy="Jitter"`': [
        {"noisy_gate_policy": "Jitter", "ours": {"input_jitter": 0.01}},
        {"k": 1, "noisy_gate_policy": "RSample", "ours": {"router_noise": "gumbel"}},
    ],
    "`top2_2nd_expert_sampling`": [{"ours": {"router_noise": "gumbel_after_first"}}],
    "`use_residual`": [{"use_residual": True}],
    "`used_token`": [{"used": torch.tensor([1.0, 0.0] * (T // 2))}],
    "`ep_size`": [{"ep_size": 2}],
}  # fmt: skip


def of_fairseq(kind, gate, ours, mask=None):
    torch.manual_seed(0)
    k = 1 if kind == "Top1Gate" else 2
    gate = getattr(fairseq, kind)(D, E, **gate)
    experts = [nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)) for _ in range(E)]
    layer = fairseq.MOELayer(gate, nn.ModuleList(experts), args=None).double().eval()
    y, aux = layer(tokens()[:, None], input_padding_mask=mask)
    inner = layer._hidden[0]
    base = {"top_k": k, "aux_loss_weight": 1.0, "min_capacity": 1, "capacity_factor": 1.0}
    base |= {"eval_capacity_factor": 0.25 * E / k, "drop_policy": "first"}
    base |= {"normalize_weights": "none" if k == 1 else "kept", "experts": lambda e: experts[e]}
    base |= {"balance_loss": "switch" if k == 1 else "gshard"}
    call = {} if mask is None else {"token_mask": ~mask[:, 0]}
    options = base | ours
    layer = MoELayer(dim=D, hidden_dim=D, num_experts=E, router=Copied(gate.wg), **options).double().eval()
    for name in options.keys() - {"experts"}:
        assert getattr(layer.options, name) == getattr(inner.options, name), name
    found, stats = layer(tokens(), **call)
    assert_close_fp64(found.detach(), y.detach()[:, 0], what="y")
    assert_close_fp64(stats.aux_loss.detach(), aux.detach(), what="loss")


class Copied(nn.Module):
    def __init__(self, wg):
        super().__init__()
        self.wg = wg

    def forward(self, x):
        return x @ self.wg.weight.T


FAIRSEQ = {
    "`Top1Gate`, `Top2Gate`": [("Top1Gate", {}, {}), ("Top2Gate", {}, {})],
    "`capacity_factor` of `Top1Gate`": [
        ("Top1Gate", {"capacity_factor": 0.5}, {"capacity_factor": 0.5}),
        ("Top2Gate", {"batch_prioritized_routing": True}, {"drop_policy": "priority"}),
    ],
    "`moe_eval_capacity_token_fraction`": [
        ("Top2Gate", {"moe_eval_capacity_token_fraction": 0.5}, {"eval_capacity_factor": 0.5 * E / 2}),
        ("Top1Gate", {"moe_eval_capacity_token_fraction": 0.0}, {"eval_capacity_factor": 1.0}),
    ],
    "`second_expert_policy=": [("Top2Gate", {"second_expert_policy": "sampling"}, {"router_noise": "gumbel_after_first"})],  # noqa: E501
    "`normalize_gate_prob_before_dropping`": [
        ("Top2Gate", {"normalize_gate_prob_before_dropping": True}, {"normalize_weights": "topk"}),
        ("Top2Gate", {}, {"normalize_weights": "kept"}),
    ],
    "`moe_gate_loss_wt`": [("Top2Gate", {}, {})],
    "`input_padding_mask`": [("Top2Gate", {}, {}, torch.arange(T)[:, None] > 8)],
}  # fmt: skip
RUNS = {
    "Tutel `moe_layer`": (TUTEL, lambda case: of_tutel(**case)),
    "DeepSpeed `MoE`": (DEEPSPEED, lambda case: of_deepspeed(**case)),
    "fairseq": (FAIRSEQ, lambda case: of_fairseq(*case)),
}
CASES = [(t, row, n) for t, (rows, _) in RUNS.items() for row in rows for n in range(len(rows[row]))]


@pytest.mark.parametrize(("table", "row", "number"), CASES)
def test_a_row_of_a_parent(table, row, number):
    rows, run = RUNS[table]
    run(rows[row][number])


def of_formula(options, *, activation, glu=False, normalize=False, shared=0):
    """MegaBlocks' layer in plain PyTorch, on the weights of a layer with our words; no expert has a bias there."""
    layer = (
        MoELayer(**{"dim": D, "hidden_dim": H, "num_experts": E, "top_k": 2, "bias": False} | options).double().eval()
    )
    own, x = {n: p.detach() for n, p in layer.named_parameters()}, tokens()
    weights, ids = torch.softmax(x @ own.pop("router.proj.weight").T, -1).topk(layer.options.top_k)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)

    def mlp(x, w_in, w_out):
        up = x @ w_in[-1].T
        return (activation(x @ w_in[0].T) * up if glu else activation(up)) @ w_out.T

    w_in, w_out = own.pop("experts.w_in"), own.pop("experts.w_out")
    assert not own or shared, own
    each = [
        sum(w * mlp(row, w_in[e], w_out[e]) for w, e in zip(ws, es, strict=True))
        for row, ws, es in zip(x, weights, ids, strict=True)
    ]
    expected = torch.stack(each)
    if shared:
        w_in, w_out = own.values()
        assert w_in.shape[-2] == shared
        expected = expected + mlp(x, w_in, w_out)
    y, _ = layer(x)
    assert_close_fp64(y.detach(), expected, what="y")


def of_scattermoe(given):
    """Its MLP takes the choices and their probabilities; experts have no bias."""
    layer = MoELayer(dim=D, hidden_dim=H, num_experts=E, top_k=2, activation="gelu").double().eval()
    x, own = tokens(), dict(layer.named_parameters())
    weights, ids = torch.softmax(torch.randn(T, E, dtype=torch.float64), -1).topk(2)
    w_in, w_out = own["experts.w_in"], own["experts.w_out"]
    hidden = nn.functional.gelu(torch.einsum("td,tkfd->tkf", x, w_in[ids][:, :, 0]))
    expected = torch.einsum("tkf,tkdf,tk->td", hidden, w_out[ids], weights)
    if given == "layer":
        y = layer(x, routing=Routing(ids, weights))[0]
    else:
        y = functional.moe_mlp(x, w_in, w_out, weights, functional.route_metadata(ids, E), activation="gelu")
    assert_close_fp64(y.detach(), expected.detach(), what="y")


def of_mixtral(k=2, family="mixtral", **told):
    """A block of transformers itself, its weights handed over as the page says."""
    config = {"hidden_size": D, "num_experts_per_tok": k, "hidden_act": "silu", **told}
    if family == "mixtral":
        block = MixtralSparseMoeBlock(MixtralConfig(intermediate_size=H, num_local_experts=E, **config))
    else:
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(moe_intermediate_size=H, num_experts=E, **config))
    block = drawn(block)
    normalize = "topk" if told.get("norm_topk_prob", True) else "none"
    layer = MoELayer(
        dim=D,
        hidden_dim=H,
        num_experts=E,
        top_k=k,
        activation="swiglu",
        normalize_weights=normalize,
    )
    theirs = block.experts.gate_up_proj
    state = {"experts.w_in": theirs.view(E, 2, H, D), "experts.w_out": block.experts.down_proj}
    assert state["experts.w_in"].data_ptr() == theirs.data_ptr()
    beside(block(tokens()[None])[0], layer, state | {"router.proj.weight": block.gate.weight})


def of_gpt_oss():
    config = GptOssConfig(hidden_size=D, intermediate_size=H, num_local_experts=E, num_experts_per_tok=2)
    block = drawn(GptOssMLP(config))
    layer = MoELayer(
        dim=D, hidden_dim=H, num_experts=E, top_k=2, router_bias=True, bias=True, activation="clamped_swiglu",
        normalize_weights="topk",
    )  # fmt: skip
    experts = block.experts
    state = {
        "experts.w_in": experts.gate_up_proj.mT.unflatten(1, (H, 2)).transpose(1, 2),
        "experts.b_in": experts.gate_up_proj_bias.unflatten(1, (H, 2)).transpose(1, 2),
        "experts.w_out": experts.down_proj.mT,
        "experts.b_out": experts.down_proj_bias,
        "router.proj.weight": block.router.weight,
        "router.proj.bias": block.router.bias,
    }
    beside(block(tokens()[None])[0][0], layer, state)


def drawn(block):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            nn.init.normal_(parameter)
    return block.double().eval()


def beside(theirs, layer, state):
    layer = layer.double().eval()
    layer.load_state_dict({name: value.detach() for name, value in state.items()})
    # transformers rounds probabilities to FP32
    torch.testing.assert_close(layer(tokens())[0], theirs, rtol=1e-5, atol=1e-5)


def has_none(word):
    with pytest.raises((ConfigError, TypeError)):
        MoELayer(dim=D, hidden_dim=H, num_experts=E, top_k=2, **{word: 0.1})


def is_read(**options):
    layer = MoELayer(dim=D, hidden_dim=H, num_experts=E, top_k=2, **options)
    assert all(getattr(layer.options, name) == value for name, value in options.items())


gelu = nn.functional.gelu
NO_DOOR = {
    "MegaBlocks": {
        "`hidden_size`": [lambda: of_formula({"activation": "gelu", "hidden_dim": 7, "top_k": 3, "normalize_weights": "none"}, activation=gelu)],  # noqa: E501
        "`mlp_type=": [lambda: of_formula({"activation": "geglu", "normalize_weights": "none"}, activation=gelu, glu=True)],  # noqa: E501
        "`bias`": [lambda: of_formula({"activation": "relu", "normalize_weights": "none"}, activation=torch.relu)],
        "`moe_capacity_factor`": [lambda: is_read(capacity_factor=0.5, eval_capacity_factor=0.5, min_capacity=0)],
        "`moe_normalize_expert_weights=1`": [
            lambda: of_formula({"activation": "gelu", "normalize_weights": "topk"}, activation=gelu, normalize=True),
            lambda: of_formula({"activation": "gelu", "normalize_weights": "none"}, activation=gelu),
        ],
        "`moe_jitter_eps`": [lambda: is_read(input_jitter=0.1)],
        "`moe_loss_weight`": [lambda: is_read(aux_loss_weight=0.1 / 3)],
        "`moe_zloss_weight`": [lambda: is_read(z_loss_weight=0.1 / 3)],
        "`shared_expert`": [
            lambda: of_formula({"activation": "gelu", "normalize_weights": "none", "num_shared_experts": 1, "shared_hidden_dim": 7}, activation=gelu, shared=7)  # noqa: E501
        ],
    },
    "ScatterMoE": {
        "`input_size`": [lambda: of_scattermoe("layer")],
        "`forward(": [lambda: of_scattermoe("layer"), lambda: of_scattermoe("operator")],
    },
    "transformers": {
        "`experts.gate_up_proj` (E, 2F, D)": [of_mixtral],
        "`gate.weight`": [of_mixtral],
        "`norm_topk_prob`": [
            lambda: of_mixtral(k=1),
            lambda: of_mixtral(family="qwen3", norm_topk_prob=True),
            lambda: of_mixtral(family="qwen3", norm_topk_prob=False),
        ],
        "`router_aux_loss_coef`": [lambda: is_read(aux_loss_weight=0.1 * 2 / 3)],
        "`router_jitter_noise`": [lambda: has_none("router_jitter_noise")],
        "`attention_dropout`": [lambda: has_none("attention_dropout")],
        "gpt-oss: `experts.gate_up_proj`": [of_gpt_oss],
        "gpt-oss: `router.bias`": [of_gpt_oss],
    },
}  # fmt: skip
"""Systems without a door by the beginnings of their rows; test_migrate_table.py has the numbers of losses and
capacities."""
NO_DOOR_CASES = [(t, row, n) for t, rows in NO_DOOR.items() for row in rows for n in range(len(rows[row]))]


@pytest.mark.parametrize(("table", "row", "number"), NO_DOOR_CASES)
def test_a_row_of_a_system_without_a_door(table, row, number):
    NO_DOOR[table][row][number]()


def test_imports_of_the_page():
    for _, right in rows_of("there"):
        line = right.strip("`").replace("...", "has_moe_layers")
        if line.startswith("from"):
            exec(line, {})
        else:
            assert importlib.util.find_spec(line.removeprefix("python -m "))


NAMED = re.compile("`([A-Za-z_0-9]+(?:[.][a-z_]+)?)`")


def is_served(name):
    module, _, last = name.rpartition(".")
    doors = [getattr(tutel, module)] if module else [tutel, tutel.moe, tutel.net, tutel.system]
    spec = f"{doors[0].__name__}.{last}"
    return any(last in vars(door) for door in doors) or importlib.util.find_spec(spec) is not None


def is_refused(name):
    module, _, last = name.rpartition(".")
    with pytest.raises(ConfigError, match="has no counterpart"):
        getattr(getattr(tutel, module) if module else tutel, last)
    return True


def all_served(left, right):
    assert all(is_served(name) for name in NAMED.findall(left))
    _, _, without = right.partition("without")
    assert all(is_refused(f"system.{name}") for name in NAMED.findall(without))


def all_refused(left, right):
    launcher = "launcher.run"  # a module, which refuses when it is run: see test_tutel_names.py
    assert all(is_served(name) if name == launcher else is_refused(name) for name in NAMED.findall(left))


def all_in(table):
    def check(left, right):
        assert NAMED.findall(left) and all(name in table for name in NAMED.findall(left))

    return check


def kind_of(gate=None, experts=None, **options):
    gate = gate or {"type": "top", "k": 2}
    experts = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H} | (experts or {})
    return type(tutel.moe_layer(gate, D, experts, **options)._layer).__name__


class Gate(nn.Module):
    def __init__(self, model_dim, num_global_experts, **options):
        super().__init__()
        self.wg = nn.Linear(model_dim, num_global_experts)
        self.top_k, self.capacity_factor, self.gate_noise = 2, 1.0, 0.0

    def forward(self, x):
        return self.wg(x)


class Expert(nn.Module):
    def __init__(self, model_dim, num_experts_per_device, sharded_count, **options):
        super().__init__()
        self.w = nn.Parameter(torch.ones(num_experts_per_device, 1, model_dim))

    def forward(self, x, ctx):
        return x * self.w


def grouped(left, right):
    for name in (None, nn.functional.gelu, nn.functional.silu):
        assert kind_of(experts={"activation_fn": name}) == "MoELayer"


def padded(left, right):
    top = {"type": "top", "k": 2}
    kinds = {
        "custom": [
            kind_of({"type": "custom", "module": Gate}),
            kind_of(experts={"type": "custom", "module": Expert}),
        ],
        "several gates": [kind_of([top, top])],
        "output_dim": [kind_of(experts={"output_dim": 3})],
        "other activations": [kind_of(experts={"activation_fn": torch.sin})],
        "is_postscore=False": [kind_of(is_postscore=False)],
    }
    for word, found in kinds.items():
        assert word in left and set(found) == {"CustomLayer"}, word


OF_TUTEL = {
    "`moe_layer` with known activations": grouped,
    "gates or experts of type `custom`": padded,
    "`top_k_routing`": all_served,
    "`get_topk_selection`": all_served,
    "`net`'s collectives": all_served,
    "`system`; ": all_served,
    "`CAP_FACTOR`": all_in(tutel.refused.HONOURED),
    "`SKIP_MOE`": all_in(tutel.refused.ENVIRONMENT),
    "`FAST_CUMSUM`": all_in(tutel.refused.SPEED),
    "`jit.create_cuda_kernel`": all_refused,
}
AUTOEP = {
    "gradients and weights of one process": "test_weights_are_those_of_one_process",
    "folders across `ep_size`": "test_experts_that_the_ranks_do_not_divide",
    "ZeRO 2, ZeRO 3": "test_weights_are_those_of_one_process",
    "optimizer states across topologies": None,
}
"""Our test of the row in test_transformers_trainer_ranks.py; None: not served."""


def is_autoep(left, right):
    (test,) = (test for row, test in AUTOEP.items() if left.startswith(row))
    assert right.startswith("not served") if test is None else callable(getattr(test_transformers_trainer_ranks, test))


OTHERS = {"name of Tutel": OF_TUTEL, "Cases of DeepSpeed's AutoEP": dict.fromkeys(AUTOEP, is_autoep)}
"""Checks of a row, called with its left and right side, by the head of the table and the beginning of the row."""


@pytest.mark.parametrize(("table", "row"), [(table, row) for table, rows in OTHERS.items() for row in rows])
def test_a_row_of_names(table, row):
    ((left, right),) = (cells for cells in rows_of(table) if cells[0].startswith(row))
    OTHERS[table][row](left, right)


EVERY = {table: rows for table, (rows, _) in RUNS.items()} | NO_DOOR | OTHERS


@pytest.mark.parametrize("table", EVERY)
def test_every_row_of_the_page_is_run(table):
    lefts = [cells[0] for cells in rows_of(table)]
    for left in lefts:
        assert sum(left.startswith(row) for row in EVERY[table]) == 1, left
    for row in EVERY[table]:
        assert sum(left.startswith(row) for left in lefts) == 1, row


def test_every_table_of_the_page_is_run():
    own = ("there", "script", "Tests of MoE in DeepSpeed")
    for head in tables():
        assert sum(head.startswith(known) for known in (*EVERY, *own)) == 1, head


def test_scripts_of_the_page_are_those_that_are_run():
    told = {name for left, *_ in rows_of("script") for name in NAMED.findall(left)}
    assert {name.split()[0] for name in test_parents.CASES} == told


def test_tests_of_deepspeed_of_the_page_are_those_that_are_run():
    assert [left for left, _ in rows_of("Tests of MoE in DeepSpeed")] == list(test_parents.TESTS)


def test_blocks_of_python_of_the_page_run():
    """In a process of their own, which has none of the three packages."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
