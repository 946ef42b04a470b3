"""Every public keyword of the layer changes something that can be observed."""

import inspect
import re
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from tests.oracle import numerics
from tests.oracle.numerics import as_fp64
from tests.support.memory import saved_bytes
from tests.support.operators import Operators
from torch import nn

from expertmesh import MoELayer, Routing
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import LayerOptions
from expertmesh.errors import ConfigError
from expertmesh.moe.dispatch import Dispatched, LocalDispatcher
from expertmesh.moe.routing_noise import key_noise

T, D, F, E, K = 24, 8, 12, 4, 2
BASE = {
    "dim": D,
    "hidden_dim": F,
    "num_experts": E,
    "top_k": K,
    "seed": 0,
    "dtype": torch.float64,
    "aux_loss_weight": 0.5,
    "z_loss_weight": 0.5,
}
HASH = {"router": "hash", "aux_loss_weight": 0.0, "z_loss_weight": 0.0}
TIGHT = {"capacity_factor": 0.6, "min_capacity": 1}


def tokens(**kwargs):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, kwargs.get("dim", D), generator=generator, dtype=torch.float64)
    return x.to(kwargs.get("dtype", torch.float64))


@dataclass(frozen=True)
class ScalingRoundTrip(Dispatched):
    factor: int = 1

    def finish(self, experts):
        return self.factor * super().finish(experts)


class DoublingDispatcher(LocalDispatcher):
    def start(self, tokens, way):
        return ScalingRoundTrip(**vars(tokens), factor=2)


class DegreeDispatcher(LocalDispatcher):
    """Scales by the degree that it is told, so that it shows whether and for which call it is."""

    def start(self, tokens, way):
        asked = [value for value in vars(way).values() if value is not None]
        return ScalingRoundTrip(**vars(tokens), factor=1 + len(asked))


class EarlierTwin:
    """Another process with the same tokens, which come before ours."""

    rank = 1

    def gather_tokens(self, x_T):
        is_index = x_T.dim() == 1 and x_T.dtype == torch.int64
        return torch.cat((x_T - T if is_index else x_T, x_T))


class ConstantRouter(nn.Module):
    def forward(self, x_TD):
        return torch.arange(E, dtype=x_TD.dtype).expand(len(x_TD), E)


def observe(layer, kwargs, what, **call):
    """One observable of a layer, by name."""
    call = dict(call)
    if kwargs.get("router") == "hash":
        call.setdefault("token_ids", torch.arange(T) % 7)
    if what == "parameters":
        return {k: (tuple(v.shape), v.dtype, v.device.type) for k, v in layer.named_parameters()}
    if what == "weights":
        return np.concatenate([as_fp64(p).ravel() for p in layer.parameters()])
    if what == "router_weights":
        return as_fp64(layer.router.proj.weight)
    layer.train(not what.startswith("eval "))
    key_noise(layer, seed=5, step=1)
    x = tokens(**kwargs).requires_grad_()
    if what == "bias after update":
        _, stats = layer(x, **call)
        layer.update_expert_bias(stats.num_tokens_per_expert_E)
        return None if layer.expert_bias_E is None else as_fp64(layer.expert_bias_E).tolist()
    if what == "saved bytes":
        return saved_bytes(lambda: layer(x, **call))
    if what == "eval operators":
        with Operators() as seen:
            layer(x, **call)
        return {f.name() for f in seen.ran if f.namespace == "expertmesh"}
    y, stats = layer(x, **call)
    if what == "double backward":
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        try:
            torch.autograd.grad(grad.square().sum(), x)
        except RuntimeError as error:
            return str(error)
        return "works"
    name = what.removeprefix("eval ")
    return as_fp64(y) if name == "y" else as_fp64(getattr(stats, name))


# keyword: (what else is set, the other value, what changes); the first value is BASE's or the default.
FLIPS = {
    "dim": ({}, D + 1, "parameters"),
    "hidden_dim": ({}, F + 1, "parameters"),
    "num_experts": ({}, E + 1, "parameters"),
    "top_k": ({}, K + 1, "eval y"),
    "router": ({}, ConstantRouter(), "eval y"),
    "score_function": ({"normalize_weights": "none"}, "sigmoid", "eval y"),
    "normalize_weights": ({}, "none", "eval y"),
    "weight_scale": ({}, 2.0, "eval y"),
    "router_noise": ({}, "gumbel", "y"),
    "router_noise_std": ({"router_noise": "gumbel"}, 5.0, "y"),
    "input_jitter": ({}, 0.3, "y"),
    "input_dropout": ({}, 0.3, "y"),
    "expert_output_masking": ({}, 0.5, "y"),
    "logit_temperature": ({}, 3.0, "eval y"),
    "num_expert_groups": ({}, 2, "eval y"),
    "num_limited_groups": ({"num_expert_groups": 2}, 2, "eval y"),
    "group_score": ({"num_expert_groups": 2}, "max", "eval y"),
    "bias_update_rate": ({}, 0.1, "bias after update"),
    "cosine_dim": ({"router": "cosine"}, 7, "parameters"),
    "capacity_factor": ({"min_capacity": 1}, 0.6, "y"),
    "eval_capacity_factor": ({"min_capacity": 1}, 0.6, "eval y"),
    "min_capacity": ({"capacity_factor": 0.1}, 9, "y"),
    "max_capacity_factor": ({"min_capacity": 1}, 0.6, "y"),
    "drop_policy": (TIGHT, "first", "y"),
    "routing_group_size": ({**TIGHT, "drop_policy": "first"}, 5, "y"),
    "experts": ({}, lambda e: nn.Linear(D, D, dtype=torch.float64), "parameters"),
    "activation": ({}, "geglu", "eval y"),
    "bias": ({}, True, "parameters"),
    "router_bias": ({}, True, "parameters"),
    "num_shared_experts": ({}, 1, "parameters"),
    "shared_gate": ({"num_shared_experts": 1}, True, "parameters"),
    "shared_hidden_dim": ({"num_shared_experts": 1}, 5, "parameters"),
    "residual": ({}, True, "parameters"),
    "residual_hidden_dim": ({"residual": True}, 5, "parameters"),
    "recompute_h": ({}, True, "saved bytes"),
    "balance_loss": ({}, "importance_load", "aux_loss"),
    "balance_loss_scope": ({"routing_group_size": 5}, "global", "aux_loss"),
    "aux_loss_weight": ({}, 0.7, "aux_loss"),
    "z_loss_weight": ({}, 0.7, "z_loss"),
    "dispatcher": ({}, DoublingDispatcher(), "eval y"),
    "backend": ({}, "reference", "double backward"),
    "batch_invariant": ({}, True, "eval operators"),
    "seed": ({}, 1, "weights"),
    "layer_index": ({}, 1, "weights"),
    "device": ({}, "meta", "parameters"),
    "dtype": ({}, torch.float32, "parameters"),
}
MORE_FLIPS = [
    ("normalize_weights", {**TIGHT, "drop_policy": "first"}, "kept", "y"),
    ("layer_index", HASH, 1, "topk_expert_ids_TK"),
    ("seed", HASH, 1, "topk_expert_ids_TK"),
    ("drop_policy", TIGHT, "priority", "y"),
    ("drop_policy", TIGHT, "first", "num_dropped"),
    ("residual", {}, True, "eval y"),
    ("num_shared_experts", {}, 1, "eval y"),
    ("bias_update_rate", {"router": "cosine"}, 0.1, "bias after update"),
    ("max_capacity_factor", {"router": "expert_choice"}, 0.6, "y"),
    ("capacity_factor", {"router": "expert_choice"}, 0.6, "y"),
    ("routing_group_size", {"router": "expert_choice"}, 5, "y"),
    ("routing_group_size", {}, 5, "aux_loss"),
    ("router_noise", {"balance_loss": "importance_load"}, "gaussian", "aux_loss"),
]
SAME = {("drop_policy", "num_dropped")}
"""Flips whose observable must stay the same: who is dropped changes, how many does not."""


def changed(kwargs, name, value, what):
    """The observable before and after, with the same parameters wherever both layers have them."""
    before = MoELayer(**kwargs)
    after = MoELayer(**{**kwargs, name: value})
    if name not in ("seed", "layer_index") and what not in ("parameters", "weights"):
        mine = dict(before.named_parameters())
        with torch.no_grad():
            for key, parameter in after.named_parameters():
                if key in mine and mine[key].shape == parameter.shape:
                    parameter.copy_(mine[key])
    return observe(before, kwargs, what), observe(after, {**kwargs, name: value}, what)


def assert_changed(before, after, what):
    if isinstance(before, np.ndarray):
        numerics.assert_differs(after, before, what=what)
    else:
        assert before != after, f"{what}: nothing changed"


def keywords(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "x")]


def test_every_keyword_of_the_constructor_is_flipped():
    assert set(FLIPS) == set(keywords(MoELayer.__init__))


@pytest.mark.parametrize("name", keywords(MoELayer.__init__))
def test_flipping_a_keyword_changes_something(name):
    extra, value, what = FLIPS[name]
    before, after = changed({**BASE, **extra}, name, value, what)
    assert_changed(before, after, f"{name}={value}: {what}")


@pytest.mark.parametrize("flip", MORE_FLIPS, ids=lambda flip: f"{flip[0]}-{flip[3]}".replace(" ", "_"))
def test_more_flips(flip):
    name, extra, value, what = flip
    before, after = changed({**BASE, **extra}, name, value, what)
    if (name, what) in SAME:
        assert int(before) == int(after) > 0
    else:
        assert_changed(before, after, f"{name}={value}: {what}")


def test_every_keyword_is_documented():
    text = inspect.getdoc(MoELayer)
    for name in keywords(MoELayer.__init__):
        assert re.search(rf"^\s+(\*\*)?{name}: ", text, re.MULTILINE), f"{name} has no entry in the docstring"
    text = inspect.getdoc(MoELayer.forward)
    for name in keywords(MoELayer.forward):
        assert re.search(rf"^\s+(\*\*)?{name}: ", text, re.MULTILINE), f"{name} has no entry in the docstring"


CHOICE_EXTRAS = {
    "router": {"aux_loss_weight": 0.0, "z_loss_weight": 0.0},
    "score_function": {"normalize_weights": "none"},
    "normalize_weights": {**TIGHT, "drop_policy": "first"},
    "drop_policy": TIGHT,
    "balance_loss_scope": {"routing_group_size": 5},
    "group_score": {"num_expert_groups": 2},
}
CHOICE_OBSERVABLE = {"balance_loss": "aux_loss", "balance_loss_scope": "aux_loss"}
NOT_DISTINCT = {"normalize_weights": {"auto"}}
"""auto is one of the others."""


CHOICES = {
    name: get_args(field.annotation)
    for name, field in LayerOptions.model_fields.items()
    if get_origin(field.annotation) is Literal
}


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "backend"])
def test_all_values_of_a_choice_differ_from_one_another(name):
    """No two values of an enumerated option do the same (backends should)."""
    what = CHOICE_OBSERVABLE.get(name, "y")
    kwargs = {**BASE, **CHOICE_EXTRAS.get(name, {})}
    values = [v for v in CHOICES[name] if v not in NOT_DISTINCT.get(name, ())]
    seen = [(v, changed(kwargs, name, v, what)[1]) for v in values]
    for i, (a, first) in enumerate(seen):
        for b, second in seen[i + 1 :]:
            assert_changed(first, second, f"{name}: {a} and {b}")


CONFIG_ONLY_VALUES = {"router": "cosine", "num_experts": None}


@pytest.mark.parametrize("name", sorted(MoEConfig.model_fields))
def test_every_field_of_the_configuration_reaches_the_layer(name):
    """from_config with a changed field is the layer with the changed keyword."""
    extra, value, what = FLIPS[name]
    value = CONFIG_ONLY_VALUES.get(name, value)
    if value is None:
        return  # num_experts has one entry per layer; from_config takes the layer's own
    extra = {k: v for k, v in {**BASE, **extra}.items() if k in MoEConfig.model_fields and k != "num_experts"}
    moe = MoEConfig(**{**extra, name: value})
    layer = MoELayer.from_config(moe, dim=D, num_experts=E, activation="swiglu", seed=0, dtype=torch.float64)
    direct = MoELayer(**{**BASE, **extra, name: value})
    mine, theirs = observe(layer, {}, what), observe(direct, {}, what)
    if isinstance(mine, np.ndarray):
        assert np.array_equal(mine, theirs)
    else:
        assert mine == theirs


CALLS = {
    "token_mask": ({}, {"token_mask": torch.arange(T) < T - 3}, "y"),
    "token_ids": (HASH, {"token_ids": torch.arange(T) % 5}, "y"),
    "token_index": ({"router_noise": "gumbel"}, {"token_index": torch.arange(T) + 100}, "y"),
    "routing": ({}, {"routing": Routing(torch.arange(T * K).view(T, K) % E)}, "y"),
    "top_k": ({}, {"top_k": 3}, "y"),
    "capacity_factor": ({"min_capacity": 1}, {"capacity_factor": 0.5}, "y"),
    "dispatch": (
        {"dispatcher": DegreeDispatcher()},
        {"dispatch": DispatchOptions(overlap_degree=2)},
        "y",
    ),
    "route_degree": ({"dispatcher": DegreeDispatcher()}, {"route_degree": 2}, "y"),
    "overlap_degree": ({"dispatcher": DegreeDispatcher()}, {"overlap_degree": 2}, "y"),
    "all_to_all": ({"dispatcher": DegreeDispatcher()}, {"all_to_all": "flat"}, "y"),
    "replicated_experts": ({"dispatcher": DegreeDispatcher()}, {"replicated_experts": 2}, "y"),
    "shared_tokens": (
        {"capacity_factor": 0.5, "min_capacity": 1, "drop_policy": "first"},
        {"shared_tokens": EarlierTwin(), "token_index": torch.arange(T) + T},
        "y",
    ),
}


def test_every_keyword_of_forward_is_tried():
    """`losses` has a test of its own; the fields of `dispatch` may be given one by one."""
    one_by_one = {field.name for field in fields(DispatchOptions)}
    tried = set(CALLS) - one_by_one | {"losses", "dispatch_choices"}
    assert one_by_one < set(CALLS) and tried == set(keywords(MoELayer.forward))


def test_mistaken_keywords():
    layer = MoELayer(**BASE)
    for call, error, words in (
        (lambda: MoELayer(**BASE, top_n=3), TypeError, "'top_n'; did you mean top_k"),
        (lambda: MoELayer(dim=D), TypeError, "needs the keyword arguments hidden_dim"),
        (lambda: layer(tokens(), degree=2), TypeError, "unexpected keyword argument 'degree'"),
        (
            lambda: layer(tokens(), dispatch=DispatchOptions(), route_degree=1),
            ConfigError,
            "dispatch= and route_degree=: both set the dispatch of tokens; give dispatch= alone",
        ),
    ):
        with pytest.raises(error, match=words) as raised:
            call()
        assert "\n" not in str(raised.value)


class Sums(LocalDispatcher):
    """Counts what is summed over processes."""

    def __init__(self):
        self.count = 0

    def sum_over_processes(self, value):
        self.count += 1
        return value


@pytest.mark.parametrize("extra", [{}, TIGHT, {"router": "expert_choice"}, HASH])
def test_losses_are_computed_for_those_who_want_them(extra):
    """Without them the output and its gradients are the same to the bit, and nothing is counted, summed or sent."""
    dispatcher, found = Sums(), []
    layer = MoELayer(**{**BASE, **extra}, dispatcher=dispatcher)
    ids = torch.arange(T) % 7
    for losses in (True, False):
        key_noise(layer, seed=5, step=1)
        x, dispatcher.count = tokens().requires_grad_(), 0
        with Operators() as seen:
            y, stats = layer(x, token_ids=ids, losses=losses)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        found.append((y, grad, stats, len(seen.ran), dispatcher.count))
    (y, grad, stats, many, sums), (other, same, empty, fewer, none) = found
    assert torch.equal(y, other) and torch.equal(grad, same)
    assert fewer < many and none == 0 < sums
    assert stats.num_tokens_per_expert_E.sum() > 0
    for name in ("aux_loss", "z_loss", "num_tokens_per_expert_E"):
        assert getattr(empty, name).numel() == 0
    for name in ("topk_expert_ids_TK", "topk_weights_TK", "kept_expert_ids_TK", "num_dropped"):
        assert torch.equal(getattr(stats, name), getattr(empty, name))


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_forward_changes_the_output_of_this_call_only(name):
    extra, call, what = CALLS[name]
    kwargs = {**BASE, **extra}
    layer = MoELayer(**kwargs)
    before = observe(layer, kwargs, what)
    during = observe(layer, kwargs, what, **call)
    after = observe(layer, kwargs, what)
    numerics.assert_differs(during, before, what=name)
    assert np.array_equal(before, after), f"{name} was sticky"
