"""The oracle itself: its hand-written gradients against finite differences, and that it notices injected faults."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.oracle import numerics
from tests.oracle.loop_layer import LoopInputs, loop_forward, shuffled
from tests.oracle.oracle import oracle_backward, oracle_forward
from tests.oracle.oracle_rounding import rounding_of_results
from tests.oracle.oracle_types import OracleInputs, OracleOptions
from tests.support.poison import poisoned_empty

T, D, F, E, K = 9, 5, 6, 4, 2
COSINE_DIM = 3


def make_params(rng, options):
    """Random FP64 parameters under the layer's names."""
    groups = 2 if options.activation in ("swiglu", "geglu", "reglu", "clamped_swiglu") else 1
    n = options.num_experts
    params = {
        "experts.w_in": rng.normal(size=(n, groups, F, D)),
        "experts.w_out": rng.normal(size=(n, D, F)),
    }
    if options.router == "cosine":
        params["router.proj.weight"] = rng.normal(size=(COSINE_DIM, D))
        params["router.expert_embeddings"] = rng.normal(size=(n, COSINE_DIM))
        params["router.log_scale"] = np.array([0.7])
    elif options.router != "hash":
        params["router.proj.weight"] = rng.normal(size=(n, D))
    params["experts.b_in"] = rng.normal(size=(n, groups, F))
    params["experts.b_out"] = rng.normal(size=(n, D))
    for prefix in ("shared_experts.", "residual_mlp."):
        params[prefix + "w_in"] = rng.normal(size=(groups, F, D))
        params[prefix + "w_out"] = rng.normal(size=(D, F))
        params[prefix + "b_in"] = rng.normal(size=(groups, F))
        params[prefix + "b_out"] = rng.normal(size=D)
    params["shared_gate.weight"] = rng.normal(size=(1, D))
    params["residual_coefficient.weight"] = rng.normal(size=(2, D))
    params["residual_coefficient.bias"] = rng.normal(size=2)
    return params


BASE = OracleOptions(num_experts=E, top_k=K, aux_loss_weight=0.7, z_loss_weight=0.3)
TIGHT = {"capacity_factor": 0.75, "min_capacity": 1}
CASES = {
    "plain": {},
    "sigmoid": {"score_function": "sigmoid", "weight_scale": 2.5},
    "after_topk": {"score_function": "softmax_after_topk", "logit_temperature": 0.6},
    "unnormalised": {"normalize_weights": "none"},
    "top1": {"top_k": 1},
    "all": {"top_k": E, "activation": "relu2"},
    "kept_first": {"normalize_weights": "kept", **TIGHT},
    "priority_groups": {"drop_policy": "priority", "routing_group_size": 4, **TIGHT},
    "random": {"drop_policy": "random", "activation": "geglu", **TIGHT},
    "dropped_sigmoid_kept": {"score_function": "sigmoid", "normalize_weights": "kept", **TIGHT},
    "importance": {
        "balance_loss": "importance_load",
        "routing_group_size": 5,
        "activation": "reglu",
    },
    "load": {"balance_loss": "importance_load", "router_noise": "gaussian", "activation": "gelu"},
    "cosine": {"router": "cosine", "activation": "silu"},
    "expert_choice": {"router": "expert_choice", "routing_group_size": 5},
    "expert_choice_kept": {"router": "expert_choice", "normalize_weights": "kept"},
    "hash": {"router": "hash"},
    "expert_groups": {"num_expert_groups": 2, "num_limited_groups": 1, "activation": "relu"},
    "global_loss": {"balance_loss_scope": "global", "routing_group_size": 4},
    "gshard": {"balance_loss": "gshard"},
    "bound": {"max_capacity_factor": 0.5, "min_capacity": 1},
}


def make_case(name, *, mask=True):
    """Inputs and options of a named case."""
    rng = np.random.default_rng(0)
    options = dataclasses.replace(BASE, **CASES[name])
    inputs = OracleInputs(
        x_TD=rng.normal(size=(T, D)),
        params=make_params(rng, options),
        token_mask_T=rng.random(T) < 0.8 if mask else None,
        noise_TE=rng.normal(size=(T, E)) if options.router_noise == "gaussian" else None,
        keys_TK=rng.random((T, options.top_k)) if options.drop_policy == "random" else None,
        input_factor_TD=rng.uniform(0.9, 1.1, size=(T, D)),
        expert_ids_TK=rng.permuted(np.tile(np.arange(E), (T, 1)), axis=1)[:, : options.top_k]
        if options.router == "hash"
        else None,
    )
    return inputs, options


def objective(inputs, options, dy_TD):
    out = oracle_forward(inputs, options)
    return float((out.y_TD * dy_TD).sum()) + out.aux_loss + out.z_loss


@pytest.mark.parametrize("name", CASES)
def test_hand_written_gradients_equal_finite_differences(name):
    inputs, options = make_case(name)
    rng = np.random.default_rng(1)
    dy_TD = rng.normal(size=(T, D))
    grads = oracle_backward(inputs, options, oracle_forward(inputs, options), dy_TD)
    step = 1e-5
    assert set(grads) == {"x", *inputs.params}
    for key, grad in grads.items():
        direction = rng.normal(size=grad.shape)
        value = inputs.x_TD if key == "x" else inputs.params[key]

        def moved(sign, key=key, value=value, direction=direction):
            new = value + sign * step * direction
            if key == "x":
                return dataclasses.replace(inputs, x_TD=new)
            return dataclasses.replace(inputs, params={**inputs.params, key: new})

        difference = (objective(moved(1), options, dy_TD) - objective(moved(-1), options, dy_TD)) / (2 * step)
        numerics.assert_close_to_difference(
            float((grad * direction).sum()),
            difference,
            what=key,
            scale=1.0 + float(np.abs(grad).sum()),
        )


def loop_case(inputs, options, dtype, *, requires_grad=True):
    """The same call for the plain PyTorch loop, with the oracle's choice."""
    out = oracle_forward(inputs, options)

    def tensor(a):
        return None if a is None else torch.tensor(a, dtype=dtype)

    params = {k: tensor(v).requires_grad_(requires_grad) for k, v in inputs.params.items()}
    mask = np.ones(T, dtype=bool) if inputs.token_mask_T is None else inputs.token_mask_T
    loop = LoopInputs(
        x_TD=tensor(inputs.x_TD).requires_grad_(requires_grad),
        params=params,
        expert_ids_TK=torch.tensor(out.topk_expert_ids_TK),
        kept_TK=torch.tensor(out.kept_TK),
        mask_T=torch.tensor(mask),
        input_factor_TD=tensor(inputs.input_factor_TD),
        noise_TE=tensor(inputs.noise_TE),
    )
    return out, loop


@pytest.mark.parametrize("name", CASES)
def test_loop_and_autograd_equal_the_oracle_in_fp64(name):
    inputs, options = make_case(name, mask=name != "load")
    out, loop = loop_case(inputs, options, torch.float64)
    dy_TD = np.random.default_rng(1).normal(size=(T, D))
    y, aux, z = loop_forward(loop, options)
    numerics.assert_close_fp64(y, out.y_TD, what="y")
    numerics.assert_close_fp64(aux, out.aux_loss, what="aux_loss")
    numerics.assert_close_fp64(z, out.z_loss, what="z_loss")
    ((y * torch.tensor(dy_TD)).sum() + aux + z).backward()
    grads = oracle_backward(inputs, options, out, dy_TD)
    for key, tensor in {"x": loop.x_TD, **loop.params}.items():
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        numerics.assert_close_fp64(grad, grads[key], what=f"gradient of {key}")


def in_fp32(value):
    return None if value is None else value.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", CASES)
def test_running_errors_bound_plain_pytorch_in_fp32(name):
    """The analysis computes the oracle's values, and FP32 in several orders of summation stays below its errors."""
    inputs, options = make_case(name, mask=name != "load")
    inputs = dataclasses.replace(
        inputs,
        x_TD=in_fp32(inputs.x_TD),
        params={k: in_fp32(v) for k, v in inputs.params.items()},
        noise_TE=in_fp32(inputs.noise_TE),
        input_factor_TD=in_fp32(inputs.input_factor_TD),
    )
    dy_TD = in_fp32(np.random.default_rng(1).normal(size=(T, D)))
    out, _ = loop_case(inputs, options, torch.float32)
    unit = torch.finfo(torch.float32).eps / 2
    rounded = rounding_of_results(inputs, options, out, dy_TD, low=unit, wide=unit)
    exact = {"y": out.y_TD, **oracle_backward(inputs, options, out, dy_TD)}
    assert set(rounded) == {k for k in exact if not (name == "hash" and k.startswith("router"))}
    for key, found in rounded.items():
        numerics.assert_close_fp64(found.value, exact[key], what=key)
        assert found.error.shape == exact[key].shape and (found.error >= 0).all(), key
    for order in range(4):
        _, plain = loop_case(inputs, options, torch.float32)
        moved, back_D = shuffled(plain, seed=order)
        y, aux, z = loop_forward(moved, options)
        y = y[:, back_D]
        ((y * torch.tensor(dy_TD, dtype=y.dtype)).sum() + aux + z).backward()
        found = {"y": y, "x": plain.x_TD.grad} | {k: p.grad for k, p in plain.params.items()}
        for key, bound in rounded.items():
            value = torch.zeros(bound.value.shape) if found[key] is None else found[key]
            assert (numerics.errors(value, exact[key]) <= bound.error).all(), key


def test_the_cases_are_not_trivial():
    """The cases drop rows, mask tokens and have non-zero losses where they claim to."""
    for name in ("kept_first", "priority_groups", "random", "bound"):
        inputs, options = make_case(name)
        assert oracle_forward(inputs, options).num_dropped > 0, name
    for name in set(CASES) - {"hash"}:
        inputs, options = make_case(name)
        out = oracle_forward(inputs, options)
        assert out.aux_loss > 0 and out.z_loss > 0, name


def test_the_two_times_rule_notices_nan_shape_and_dtype():
    good = torch.ones(3)
    numerics.assert_two_times(good, good, np.ones(3), what="good")
    for bad in (
        torch.tensor([1.0, float("nan"), 1.0]),
        torch.ones(4),
        torch.ones(3, dtype=torch.float64),
    ):
        with pytest.raises(AssertionError):
            numerics.assert_two_times(bad, good, np.ones(3), what="bad")


def test_uniform_routing_has_a_balance_loss_of_one():
    """Zero logits make every probability 1/E; any choice gives 1.0 times the weight."""
    inputs, options = make_case("plain", mask=False)
    inputs = dataclasses.replace(inputs, params={**inputs.params, "router.proj.weight": np.zeros((E, D))})
    out = oracle_forward(inputs, options)
    numerics.assert_close_fp64(out.aux_loss, options.aux_loss_weight, what="uniform")


def test_poisoned_memory_shows_and_ends():
    like, original = torch.ones(2), torch.empty
    with poisoned_empty():
        fresh = [
            torch.empty(3),
            torch.empty_like(like),
            like.new_empty(4),
            torch.empty_strided((2,), (1,)),
        ]
        assert all(tensor.isnan().all() for tensor in fresh)
        assert (like.new_empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.empty is original and "new_empty" not in vars(torch.Tensor)
