"""Mistakes in a MoELayer's options and arguments: each gives the value, the rule and the fix, in one line."""

import ast
import math
import re

import numpy as np
import pytest
import torch
from tests.cli.test_bad_options import kinds, wrong_values
from tests.config.test_config_rules import BROKEN
from torch import nn

from expertmesh import ConfigError, MoELayer, Routing
from expertmesh.config.moe_rules import LayerOptions
from expertmesh.moe.keywords import KEYWORDS

D, F, E = 7, 5, 6


def make(**kwargs):
    options = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": 2, "dtype": torch.float64}
    return MoELayer(**options | kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"top_k": E + 1},
            "top_k=7: must be at most the fewest experts of a layer, 6; lower top_k",
        ),
        ({"top_k": 1.5}, "top_k=1.5: must be a whole number"),
        ({"top_k": True}, "top_k=True: must be a whole number"),
        ({"num_experts": 0}, "num_experts=0: must be greater than 0"),
        ({"dim": -4}, "dim=-4: must be greater than 0"),
        ({"hidden_dim": 2.0}, "hidden_dim=2.0: must be a whole number"),
        ({"max_capacity_factor": "2"}, "max_capacity_factor='2': must be a finite number"),
        ({"activation": "swigul"}, "activation=swigul: .* did you mean swiglu?"),
        ({"normalize_weights": None}, "normalize_weights=None: must be one of"),
        ({"bias": "yes"}, "bias=yes: must be true or false"),
        ({"seed": "a"}, "seed=a: must be a whole number"),
        (
            {"seed": 2**63},
            r"seed=9223372036854775808: must be at most 2\^63 - 1; lower it or leave it out",
        ),
        (
            {"balance_loss": "gshard", "router": "expert_choice"},
            "balance_loss=gshard: counts the first choices",
        ),
        (
            {"router_noise": "gumbel_after_first", "top_k": 1},
            "router_noise=gumbel_after_first: .* which top_k=1 rules out",
        ),
        (
            {"router_noise": "gumbel_after_first", "bias_update_rate": 0.1},
            "router_noise=gumbel_after_first: .* which bias_update_rate rules out",
        ),
        ({"residual_hidden_dim": 4}, "residual_hidden_dim=4: has no effect with residual=False"),
        ({"dtype": torch.int32}, "dtype=torch.int32: must be one of torch.float64, torch.float32"),
        (
            {"dtype": "bfloat16"},
            "dtype=bfloat16: must be one of torch.float64, .* did you mean torch.bfloat16",
        ),
        ({"router": None}, "router is a NoneType; it must be a name or an nn.Module"),
        ({"experts": nn.ModuleList([nn.Linear(D, D)])}, "experts has 1 modules and num_experts=6"),
        ({"experts": nn.Linear(D, D)}, "experts is a Linear; it must be an nn.ModuleList"),
        ({"experts": lambda e: None}, r"experts\[0\] is a NoneType; it must be an nn.Module"),
        ({"experts": lambda e: [nn.Identity(), 3][e > 1]}, r"experts\[2\] is an int; it must be"),
        ({"experts": lambda e: torch.relu}, r"experts\[0\] is a builtin_function_or_method"),
        (
            {"experts": nn.ModuleList([nn.Linear(D, D)] * E)},
            r"experts\[1\] is the same module as experts\[0\]",
        ),
        (
            {"experts": lambda e: nn.Linear(D, D), "recompute_h": True},
            "recompute_h=True: has no effect on experts of your own",
        ),
        (
            {"experts": lambda e: nn.Linear(D, D), "batch_invariant": True},
            "experts=a module of your own: orders its sums itself",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(**options)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_the_rules_of_a_configuration_are_those_of_a_layer():
    """Every mistake in one option of a run's configuration has the same words in a layer."""
    checked = 0
    for changes, _, rule in BROKEN:
        options = {name.removeprefix("model.moe."): value for name, value in changes.items()}
        known = set(options) <= set(LayerOptions.model_fields) - {"num_experts"}
        if known and not {"min_capacity", "drop_policy", "max_capacity_factor"} & set(options):
            with pytest.raises(ConfigError, match=re.escape(rule)):
                make(**{"num_experts": 8} | options)
            checked += 1
    assert checked > 5


def test_bounds_and_choices_of_a_layers_options_are_those_of_a_configuration():
    """What a command line cannot say of an option, a layer refuses with the same rule."""
    checked, wrong = 0, []
    for name, field in KEYWORDS.items():
        for text, rule in wrong_values(name, field):
            value = text
            if kinds(field.annotation) & {int, float}:
                if text in (
                    "fast",
                    "5%",
                    "inf",
                ):  # words are no numbers here; a factor may be infinite
                    continue
                value = float(text) if kinds(field.annotation) == {float} else ast.literal_eval(text)
            checked += 1
            try:
                make(**{name: value})
            except ConfigError as error:
                if rule not in str(error):
                    wrong.append((name, value, rule, str(error)))
            else:
                wrong.append((name, value, rule, "accepted"))
    assert wrong == [] and checked > 30


def test_numbers_of_numpy_and_infinite_factors():
    layer = make(top_k=np.int64(1), z_loss_weight=np.float32(0.5), capacity_factor=math.inf)
    assert (layer.top_k, layer.options.z_loss_weight) == (1, 0.5)
    assert layer.options.capacity_factor is None
    _, stats = layer(X, top_k=np.int64(2), capacity_factor=np.float32(0.5))
    assert stats.topk_expert_ids_TK.shape == (6, 2) and stats.num_dropped > 0


X = torch.zeros(2, 3, D, dtype=torch.float64)
IDS = torch.zeros(6, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (X[..., :-1], {}, r"x has shape \(2, 3, 6\); it must be \(..., 7\); .*with dim"),
        (torch.tensor(1.0, dtype=torch.float64), {}, r"x has shape \(\)"),
        ([1.0], {}, "x is a list"),
        (X.long(), {}, "x has dtype torch.int64; it must be floating-point"),
        (X.float(), {}, "x has dtype torch.float32 and the experts torch.float64"),
        (X.to("meta"), {}, "x is on meta and the layer on cpu"),
        (X, {"token_mask": torch.ones(2, 4, dtype=torch.bool)}, r"token_mask has shape \(2, 4\)"),
        (
            X,
            {"token_mask": torch.ones(2, 3)},
            "token_mask has dtype torch.float32; it must be bool",
        ),
        (
            X,
            {"token_ids": torch.ones(2, 3)},
            "token_ids has dtype torch.float32; it must be an int",
        ),
        (X, {"token_ids": torch.ones(5, dtype=torch.int64)}, r"token_ids has shape \(5,\)"),
        (
            X,
            {"token_index": torch.ones(3, 2, dtype=torch.int64)},
            r"token_index has shape \(3, 2\)",
        ),
        (
            X,
            {"token_mask": torch.ones(2, 3, dtype=torch.bool, device="meta")},
            "token_mask is on meta",
        ),
        (X, {"token_mask": [[True] * 3] * 2}, "token_mask is a list; it must be a tensor"),
        (X, {"token_ids": np.ones((2, 3), int)}, "token_ids is a ndarray; it must be a tensor"),
        (X, {"token_index": 3}, "token_index is an int; it must be a tensor"),
        (X.to_sparse(), {}, "x is a sparse_coo tensor; it must be a dense one"),
        (
            torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged),
            {},
            "x is a nested tensor; it must be a dense one",
        ),
        (X, {"routing": IDS}, "routing is a Tensor; it must be a Routing"),
        (X, {"routing": Routing([[0, 1]] * 6)}, "routing.expert_ids_TK is a list"),
        (X, {"routing": Routing(IDS, [[1.0, 1.0]] * 6)}, "routing.weights_TK is a list"),
        (X, {"top_k": 9}, "top_k=9: must be a whole number from 1 to num_experts=6"),
        (X, {"capacity_factor": -0.5}, "capacity_factor=-0.5: must be a number above 0"),
        (X, {"routing": Routing(IDS[:5])}, r"routing.expert_ids_TK has shape \(5, 2\)"),
        (X, {"routing": Routing(IDS.float())}, "routing.expert_ids_TK has dtype torch.float32"),
        (X, {"routing": Routing(IDS + 0j)}, "routing.expert_ids_TK has dtype torch.complex64"),
        (X, {"routing": Routing(IDS.to(torch.uint16))}, "routing.expert_ids_TK has dtype"),
        (X, {"routing": Routing(IDS.to_sparse())}, "routing.expert_ids_TK is a sparse_coo tensor"),
        (X, {"routing": Routing(IDS[:, :0])}, r"\(6, 0\); it must be \(6, K\), K at least 1"),
        (X, {"routing": Routing(IDS, IDS)}, "routing.weights_TK has dtype torch.int64; it must be"),
        (X, {"routing": Routing(IDS, IDS + 0j)}, "routing.weights_TK has dtype torch.complex64"),
        (X, {"token_mask": torch.ones(6).bool().to_sparse()}, "token_mask is a sparse_coo tensor"),
        (X, {"token_ids": torch.ones(6, dtype=torch.int64).to_sparse()}, "token_ids is a sparse"),
        (X, {"token_index": torch.ones(6, dtype=torch.uint64)}, "token_index has dtype"),
        (X, {"routing": Routing(IDS), "top_k": 1}, "top_k=1 and the replayed routing has K=2"),
        (X, {"routing": Routing(IDS, torch.ones(6, 1))}, r"routing.weights_TK has shape \(6, 1\)"),
        (X, {"routing": Routing(IDS - 1)}, "routing.expert_ids_TK holds -1"),
        (X, {"routing": Routing(IDS + 7)}, "routing.expert_ids_TK holds 7"),
        (
            X,
            {"routing": Routing(IDS.to("meta"))},
            "routing.expert_ids_TK is on meta and the other inputs on cpu",
        ),
        (
            X,
            {"routing": Routing(IDS, torch.ones(6, 2, device="meta"))},
            "routing.weights_TK is on meta and the other inputs on cpu; move one",
        ),
    ],
)
def test_wrong_arguments(x, kwargs, message):
    layer = make()
    with pytest.raises(ConfigError, match=message) as caught:
        layer(x, **kwargs)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    with torch.no_grad(), pytest.raises(ConfigError, match=message):
        layer.eval()(x, **kwargs)


def test_a_call_takes_no_more_choices_than_its_groups_hold():
    limited = {"num_expert_groups": 3, "num_limited_groups": 1}
    layer = make(**limited)
    with pytest.raises(ConfigError, match="top_k=3: must be at most .* num_limited_groups=1 groups, 2"):
        layer(X, top_k=3)
    layer(X, routing=Routing(torch.tensor([[0, 2, 4]] * 6)))  # another router's choices


class Returns(nn.Module):
    """An expert that answers with something."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(x)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda x: (x, None), "tuple"),
        (lambda x: {"y": x}, "dict"),
        (lambda x: None, "NoneType"),
        (lambda x: x[:, :-1], r"torch.float64 of shape \(\d+, 6\)"),
        (lambda x: torch.cat([x, x], -1), r"torch.float64 of shape \(\d+, 14\)"),
        (lambda x: x.sum(0), r"torch.float64 of shape \(7,\)"),
        (lambda x: x[:1].repeat(9, 1), r"torch.float64 of shape \(9, 7\)"),
        (lambda x: x.long(), "torch.int64 of shape"),
    ],
)
def test_wrong_answers_of_experts(answer, found):
    layer = make(experts=lambda e: Returns(answer))
    with pytest.raises(ConfigError, match=rf"experts\[0\] returned {found}") as caught:
        layer(X, routing=Routing(IDS))
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_route_degree_needs_a_spread_layer():
    layer, x = make(), torch.zeros(3, D, dtype=torch.float64)
    layer(x, route_degree=1)
    with pytest.raises(ConfigError, match="route_degree=2: this layer is on one process; leave it out"):
        layer(x, route_degree=2)
