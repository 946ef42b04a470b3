"""The whole layer against the FP64 oracle, outputs and all gradients by the two-times rule, over drawn options."""

from collections import Counter
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.support.layer_case import LayerCase, check_exact

from expertmesh import MoELayer, Routing
from expertmesh.config.moe_rules import NOT_READ_BY
from expertmesh.moe import capacity, losses
from expertmesh.moe.capacity import capacity_of
from expertmesh.moe.losses import router_z_loss
from expertmesh.moe.selection import hash_experts

SIZES_T = (0, 1, 2, 5, 9, 17, 17)
SIZES_D = (1, 3, 8, 13)
SIZES_F = (1, 5, 8, 11)
# A single product decides nothing below FP64: where the reference is lucky in it, nothing can be twice as bad.
SIZES_D_ROUNDED, SIZES_F_ROUNDED = SIZES_D[1:], SIZES_F[1:]
SIZES_E = (1, 2, 3, 5, 6, 7, 8)
GATED_AND_NOT = ("swiglu", "geglu", "reglu", "gelu", "relu", "relu2", "silu", "clamped_swiglu")


# What hypothesis would draw too rarely together, by name.
VARIANTS = {
    "topk": {},
    "topk_first": {"drop_policy": "first"},
    "topk_priority": {"drop_policy": "priority"},
    "topk_weight": {"drop_policy": "weight"},
    "topk_random": {"drop_policy": "random"},
    "topk_grouped": {"num_expert_groups": (2, 3, 4)},
    "cosine": {},
    "expert_choice": {},
    "hash": {},
}


def router_of(variant):
    return variant.split("_")[0] if variant.startswith("topk") else variant


@st.composite
def choices(draw, *, variant):
    """Options on who goes where, and with which weight."""
    grouped, router = "num_expert_groups" in VARIANTS[variant], router_of(variant)
    E = draw(st.sampled_from((6, 8) if grouped else SIZES_E))
    K = draw(st.integers(1, E // 2 if grouped else E))
    options = {"num_experts": E, "top_k": K}
    options["router"] = router
    scores = ["softmax", "sigmoid"] + (["softmax_after_topk"] if router != "expert_choice" else [])
    options["score_function"] = draw(st.sampled_from(scores))
    kept = ["kept"] * (3 if "drop_policy" in VARIANTS[variant] else 1)
    options["normalize_weights"] = draw(st.sampled_from([*kept, "auto", "none", "topk"]))
    options["weight_scale"] = draw(st.sampled_from([1.0, 2.5]))
    if router != "hash":
        options["router_noise"] = draw(st.sampled_from(["none", "none", "gumbel", "gaussian", "gumbel_after_first"]))
        options["logit_temperature"] = draw(st.sampled_from([1.0, 0.7]))
        options["input_jitter"] = draw(st.sampled_from([0.0, 0.0, 0.1]))
    if router in ("topk", "cosine"):
        options["bias_update_rate"] = draw(st.sampled_from([0.0, 0.001]))
    sets_first_apart = router in ("topk", "cosine") and K > 1 and not options["bias_update_rate"]
    if options.get("router_noise") == "gumbel_after_first" and (grouped or not sets_first_apart):
        options["router_noise"] = "gumbel"
    if grouped:
        groups = draw(st.sampled_from([g for g in VARIANTS[variant]["num_expert_groups"] if E % g == 0]))
        options["num_expert_groups"] = groups
        options["num_limited_groups"] = draw(st.integers(-(-K * groups // E), groups - 1))
        options["group_score"] = draw(st.sampled_from(["top2_sum", "max"]))
    return options


@st.composite
def cases(draw, *, variant, dtype):
    """One call of one layer: constructor arguments, call arguments, number of tokens, seed of the values."""
    router, policy = router_of(variant), VARIANTS[variant].get("drop_policy")
    options = draw(choices(variant=variant))
    T = draw(st.sampled_from([T for T in SIZES_T if T >= 5 or not policy]))
    options |= {
        "dim": draw(st.sampled_from(SIZES_D if dtype == torch.float64 else SIZES_D_ROUNDED)),
        "hidden_dim": draw(st.sampled_from(SIZES_F if dtype == torch.float64 else SIZES_F_ROUNDED)),
        "capacity_factor": draw(st.sampled_from([0.5, 0.7] if policy else [None, 0.5, 1.1])),
        "eval_capacity_factor": draw(st.sampled_from([0.75] if policy else [None, 0.75])),
        "max_capacity_factor": draw(st.sampled_from([None, None, 0.9, 1.5])),
        "min_capacity": draw(st.sampled_from([1, 0] if policy else [1, 0, 4])),
        "drop_policy": policy or draw(st.sampled_from(["first", "priority", "weight", "random"])),
        "routing_group_size": draw(st.sampled_from([None, 4])),
        "activation": draw(st.sampled_from(GATED_AND_NOT)),
        "bias": draw(st.booleans()),
        "num_shared_experts": draw(st.sampled_from([0, 0, 2])),
        "residual": draw(st.booleans()),
        "balance_loss": draw(
            st.sampled_from(["switch", "importance_load", "none"] + ["gshard"] * (router != "expert_choice"))
        ),
        "balance_loss_scope": draw(st.sampled_from(["group", "global"])),
        "aux_loss_weight": 0.5,
        "z_loss_weight": draw(st.sampled_from([0.0, 0.1])),
        "layer_index": draw(st.sampled_from([0, 5])),
        "dtype": dtype,
    }
    options["expert_output_masking"] = draw(st.sampled_from([0.0, 0.0, 0.4]))
    if router == "cosine":
        options["cosine_dim"] = 5
    if router != "hash" and options["dim"] >= 8:
        # With fewer dimensions dropout often leaves nothing of a token: all scores equal, no choice to compare.
        options["input_dropout"] = draw(st.sampled_from([0.0, 0.0, 0.25]))
    options = {name: v for name, v in options.items() if name not in NOT_READ_BY[router]}
    values = draw(st.integers(0, 2**31 - 1))
    call = {}
    if draw(st.booleans()):
        keep = draw(st.lists(st.booleans(), min_size=T, max_size=T))
        call["token_mask"] = torch.tensor(keep, dtype=torch.bool)
    if draw(st.integers(0, 3)) == 0:
        call["capacity_factor"] = draw(st.sampled_from([0.6] if policy else [0.6, float("inf")]))
    if draw(st.integers(0, 3)) == 0 and "num_expert_groups" not in options:
        call["top_k"] = draw(st.integers(1, options["num_experts"]))
    if draw(st.integers(0, 3)) == 0:
        call["token_index"] = torch.arange(T) * 7 + 2**33
    if router != "expert_choice" and draw(st.integers(0, 3)) == 0:
        call["routing"] = drawn_routing(T, options["num_experts"], options["top_k"], values)
        call.pop("top_k", None)
    return LayerCase(options, training=draw(st.booleans()), call=call), T, values


def drawn_routing(T, E, K, values):
    """A choice to replay: K different experts per token (or the same ones for all), some "none" (E); weights or not."""
    generator = torch.Generator().manual_seed(values + 2)
    ids_TK = torch.rand(T, E, generator=generator).argsort(-1)[:, :K]
    if values % 3 == 0:  # hot experts, and all others empty
        ids_TK = ids_TK[:1].expand(T, K)
    ids_TK = ids_TK.masked_fill(torch.rand(T, K, generator=generator) < 0.2, E)
    weights_TK = torch.rand(T, K, generator=generator, dtype=torch.float64) + 0.1
    return Routing(ids_TK, weights_TK.float().double() if values % 2 else None)


def make_layer(case, values):
    """The layer with all parameters random, so that no gradient is trivial."""
    layer = MoELayer(**case.kwargs, seed=values % 1000)
    generator = torch.Generator().manual_seed(values)
    with torch.no_grad():
        for parameter in layer.parameters():
            fan_in = max(parameter.shape[-1], 2) if parameter.dim() > 1 else 4
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * (2.0 / fan_in**0.5))
        if layer.expert_bias_E is not None:
            layer.expert_bias_E.copy_(0.2 * torch.randn(case.num_experts, generator=generator))
    return layer


def draw_tensors(case, T, values):
    generator = torch.Generator().manual_seed(values + 1)
    shape = (2, T, case.kwargs["dim"])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.kwargs["dtype"]).unbind(0)


def with_hash_table(case, layer, T, values):
    """Token ids for the hash router; the oracle is given what they hash to."""
    ids_T = torch.randint(0, 50, (T,), generator=torch.Generator().manual_seed(values))
    table_TK = hash_experts(ids_T, layer.router.hash_key, case.top_k, case.num_experts)
    call = {**case.call, "token_ids": ids_T}
    return replace(case, call=call, table_TK=table_TK)


def check(case, T, values, **more):
    """Compare one drawn case."""
    case = replace(case, **more)
    layer = make_layer(case, values)
    if case.kwargs["router"] == "hash":
        case = with_hash_table(case, layer, T, values)
    x, dy = draw_tensors(case, T, values)
    if "token_mask" in case.call and x.dtype == torch.float64:  # no other way is as careful
        x = x.masked_fill(~case.call["token_mask"][:, None], float("nan"))
    return check_exact(layer, case, x, dy)


def count(seen, drawn, oracle):
    """Note what a comparison covered."""
    if oracle is None:
        seen["too near to decide"] += 1
        return
    options = drawn[0].oracle_options()
    seen["compared"] += 1
    seen["masked"] += "token_mask" in drawn[0].call
    seen["masked outputs"] += drawn[0].training and bool(drawn[0].option("expert_output_masking"))
    seen["replayed"] += "routing" in drawn[0].call
    seen["limited groups"] += options.num_limited_groups < options.num_expert_groups
    if oracle.num_dropped:
        seen[f"dropped by {options.drop_policy}"] += 1
        seen["dropped and renormalised"] += options.normalize_weights == "kept"


COVERED = {
    "topk": ("replayed", "masked"),
    "topk_first": ("dropped by first", "dropped and renormalised"),
    "topk_priority": ("dropped by priority", "dropped and renormalised"),
    "topk_weight": ("dropped by weight",),
    "topk_random": ("dropped by random", "dropped by first"),
    "topk_grouped": ("limited groups",),
    "cosine": ("masked",),
    "expert_choice": ("masked", "masked outputs"),
    "hash": ("replayed", "masked"),
}
"""What the comparisons in FP64 must have met at least five times."""
EXAMPLES = {torch.float64: 50, torch.float32: 12, torch.bfloat16: 12, torch.float16: 9}


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", EXAMPLES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_equals_the_oracle(variant, dtype, times):
    seen = Counter()

    @hypothesis.settings(max_examples=times * EXAMPLES[dtype])
    @hypothesis.given(cases(variant=variant, dtype=dtype))
    def sweep(drawn):
        count(seen, drawn, check(*drawn))

    sweep()
    assert seen["compared"] > 5 * seen["too near to decide"], seen
    if dtype == torch.float64:
        assert all(seen[what] >= 5 for what in COVERED[variant]), seen


@pytest.mark.parametrize("variant", ["topk", "cosine", "expert_choice", "hash"])
def test_autocast_is_as_exact_as_plain_pytorch_under_autocast(variant):
    """FP32 parameters, BF16 experts, FP32 routing."""
    seen = Counter()

    @hypothesis.settings(max_examples=30)
    @hypothesis.given(cases(variant=variant, dtype=torch.float32))
    def sweep(drawn):
        seen["compared"] += bool(check(*drawn, autocast=torch.bfloat16))

    sweep()
    assert seen["compared"] > 20, seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gate_of_shared_experts(dtype):
    options = {"dim": 8, "hidden_dim": 8, "num_experts": 4, "top_k": 2, "router": "topk"}
    case = LayerCase({**options, "num_shared_experts": 1, "shared_gate": True, "dtype": dtype})
    assert check(case, 17, 5)


HASHED = {"dim": 1, "hidden_dim": 1, "num_experts": 2, "top_k": 2, "router": "hash"}
DROPPED = {"normalize_weights": "kept", "drop_policy": "priority", "min_capacity": 1}
NO_CHOICE = Routing(torch.tensor([[1]]), torch.tensor([[0.4]], dtype=torch.float64))
FOUND = {
    # W x has one number per token, and the gradient of its unit vector cancels to rounding.
    "a cosine in one dimension": (
        {"dim": 1, "hidden_dim": 1, "num_experts": 1, "top_k": 1, "router": "cosine"}
        | {"cosine_dim": 5, "z_loss_weight": 0.1},
        {"routing": NO_CHOICE},
        1,
        1,
    ),
    # A token with one choice of two has a weight of 1, the others have 0.5: they are served after it.
    "a replayed choice of the hash router": (
        HASHED | DROPPED,
        {"capacity_factor": 0.6, "routing": drawn_routing(17, 2, 2, 0)},
        17,
        0,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_longer_search_found(name):
    options, call, T, values = FOUND[name]
    case = LayerCase({**options, "dtype": torch.float64}, training=False, call=call)
    oracle = check(case, T, values)
    assert oracle and (oracle.num_dropped > 0) == ("capacity_factor" in call)


FAULTY = LayerCase(
    {
        "num_experts": 4,
        "top_k": 2,
        "dim": 8,
        "hidden_dim": 8,
        "router": "topk",
        "drop_policy": "first",
        "min_capacity": 1,
        "z_loss_weight": 0.1,
        "aux_loss_weight": 0.5,
        "dtype": torch.float32,
    },
    call={"token_mask": torch.arange(17) > 2, "capacity_factor": 0.9},
)


def scaled_gradient(layer, patch):
    layer.experts.w_in.register_hook(lambda grad: 1.005 * grad)


def one_more_row_of_capacity(layer, patch):
    def larger(*args, **kwargs):
        return 1 + capacity_of(*args, **kwargs)

    patch.setattr(capacity, "capacity_of", larger)


def loss_over_padding(layer, patch):
    def unmasked(logits_TE, *, token_mask_T):
        return router_z_loss(logits_TE)

    patch.setattr(losses, "router_z_loss", unmasked)


@pytest.mark.parametrize("fault", [scaled_gradient, one_more_row_of_capacity, loss_over_padding])
def test_the_comparison_notices_faults_in_the_layer(fault, monkeypatch):
    """Half a percent of a gradient, an off-by-one, a loss of tokens that are not there: none passes."""
    layer = make_layer(FAULTY, 7)
    x, dy = draw_tensors(FAULTY, 17, 7)
    assert check_exact(layer, FAULTY, x, dy).num_dropped > 0
    fault(layer, monkeypatch)
    with pytest.raises(AssertionError):
        check_exact(layer, FAULTY, x, dy)


def test_the_bias_is_added_before_the_pre_activation_is_rounded():
    """A second rounding would move pre-activations across the kink of ReLU, and whole gradients with them."""
    x, bias = torch.randn(64, 16).bfloat16(), torch.randn(64).bfloat16()
    options = {"dim": 16, "hidden_dim": 64, "num_experts": 1, "top_k": 1, "activation": "relu"}
    layer = MoELayer(**options, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.experts.b_in[0, 0] = bias
        layer.experts.w_out.fill_(1.0 / 16)
    y, _ = layer(x)
    y.backward(torch.ones_like(y))
    # With these weights the gradient of a bias is the number of rows above zero.
    h = x.double() @ layer.experts.w_in[0, 0].double().T + bias.double()
    above = (h > 0).sum(0).to(torch.bfloat16)
    assert torch.equal(layer.experts.b_in.grad[0, 0], above)
