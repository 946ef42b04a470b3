"""Run one call of a `MoELayer` three ways: the layer, the FP64 oracle, and plain PyTorch in the same precision."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.moe.layer import MoELayer
from expertmesh.moe.routing_noise import (
    STREAM_INPUT_DROPOUT,
    STREAM_INPUT_JITTER,
    STREAM_OUTPUT_MASK,
    STREAM_RANDOM_DROP,
    STREAM_ROUTER_NOISE,
    key_noise,
)
from expertmesh.moe.types import Routing, RoutingStats
from tests.oracle import numerics, oracle_random
from tests.oracle.loop_layer import LoopInputs, loop_forward, shuffled
from tests.oracle.numerics import as_fp64
from tests.oracle.oracle import oracle_backward, oracle_forward
from tests.oracle.oracle_rounding import loss_scales, rounding_of_results
from tests.oracle.oracle_router import has_load
from tests.oracle.oracle_types import OracleInputs, OracleOptions, OracleOutput
from tests.support.poison import poisoned_empty

DEFAULTS: dict[str, Any] = {
    "router_noise": "none",
    "router_noise_std": 1.0,
    "input_jitter": 0.0,
    "input_dropout": 0.0,
    "expert_output_masking": 0.0,
    "drop_policy": "random",
    "layer_index": 0,
}


@dataclass(frozen=True)
class LayerCase:
    """One call of one layer.

    Attributes:
        kwargs: of the constructor of `MoELayer`, dtype included.
        training: mode of the call.
        seed, step: of the noise.
        call: of forward, beside x.
        autocast: dtype of the autocast around the layer and the plain loop, or None.
        table_TK: the choice of the hash router, which the oracle does not compute.
    """

    kwargs: Mapping[str, Any]
    training: bool = True
    seed: int = 11
    step: int = 3
    call: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    table_TK: Tensor | None = None

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast context of the call."""
        return torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None)

    def option(self, name: str) -> Any:
        """Value of a constructor argument, or its default."""
        return self.kwargs.get(name, DEFAULTS.get(name))

    @property
    def num_experts(self) -> int:
        """E."""
        return self.kwargs["num_experts"]

    @property
    def top_k(self) -> int:
        """K in force."""
        routing = self.call.get("routing")
        if isinstance(routing, RoutingStats):
            return routing.topk_expert_ids_TK.shape[1]
        if routing is not None:
            return routing.expert_ids_TK.shape[1]
        return self.call.get("top_k") or self.kwargs["top_k"]

    def oracle_options(self) -> OracleOptions:
        """The options in force in this call."""
        names = {f.name for f in fields(OracleOptions)}
        options = OracleOptions(**{k: v for k, v in self.kwargs.items() if k in names})
        own = self.kwargs.get("capacity_factor" if self.training else "eval_capacity_factor")
        factor = self.call.get("capacity_factor") or own
        policy = self.option("drop_policy")
        return replace(
            options,
            top_k=self.top_k,
            capacity_factor=None if factor is None or math.isinf(factor) else factor,
            drop_policy="first" if policy == "random" and not self.training else policy,
        )

    def _words(self, num_tokens: int, num_columns: int, stream: int) -> np.ndarray:
        index = self.call.get("token_index")
        return oracle_random.token_words(
            seed=self.seed,
            step=self.step,
            layer_index=self.option("layer_index"),
            stream=stream,
            token_index_T=np.arange(num_tokens) if index is None else index.reshape(-1).numpy(),
            num_columns=num_columns,
        )

    def _noise(self, num_tokens: int) -> np.ndarray | None:
        kind, std, E = (
            self.option("router_noise"),
            self.option("router_noise_std"),
            self.num_experts,
        )
        if kind == "none" or not self.training or std == 0:
            return None
        if kind.startswith("gumbel"):
            return std * oracle_random.gumbel(self._words(num_tokens, E, STREAM_ROUTER_NOISE))
        words = self._words(num_tokens, 2 * E, STREAM_ROUTER_NOISE)
        return std * oracle_random.gaussian(words[:, :E], words[:, E:])

    def _input_factor(self, num_tokens: int, dim: int) -> np.ndarray | None:
        jitter, dropout = self.option("input_jitter"), self.option("input_dropout")
        if not self.training or not (jitter or dropout):
            return None
        factor = np.ones((num_tokens, dim))
        if jitter:
            u = oracle_random.uniform(self._words(num_tokens, dim, STREAM_INPUT_JITTER))
            factor *= 1.0 + jitter * (2.0 * u - 1.0)
        if dropout:
            u = oracle_random.uniform(self._words(num_tokens, dim, STREAM_INPUT_DROPOUT))
            factor *= (u >= dropout) / (1.0 - dropout)
        return factor

    def _output_factor(self, num_tokens: int) -> np.ndarray | float:
        p = self.option("expert_output_masking")
        if not self.training or p == 0:
            return 1.0
        # a token may have an output of each expert where these choose
        chosen_by_experts = self.option("router") == "expert_choice"
        num_slots = self.num_experts if chosen_by_experts else self.top_k
        u = oracle_random.uniform(self._words(num_tokens, num_slots, STREAM_OUTPUT_MASK))
        return (u >= p) / (1.0 - p)

    def oracle_inputs(self, layer: MoELayer, x_TD: Tensor) -> OracleInputs:
        """The call as the oracle sees it; hash routing takes the layer's table of ids."""
        T, D = x_TD.shape
        routing, mask = self.call.get("routing"), self.call.get("token_mask")
        ids, weights = self.table_TK, None
        if isinstance(routing, Routing):
            ids, weights = routing.expert_ids_TK, routing.weights_TK
        elif routing is not None:
            ids = routing.topk_expert_ids_TK
        bias = layer.expert_bias_E
        return OracleInputs(
            x_TD=as_fp64(x_TD),
            params={k: as_fp64(v) for k, v in layer.named_parameters()},
            token_mask_T=None if mask is None else mask.reshape(-1).numpy(),
            expert_ids_TK=None if ids is None else ids.numpy(),
            weights_TK=None if weights is None else as_fp64(weights),
            expert_bias_E=None if bias is None else as_fp64(bias),
            noise_TE=self._noise(T),
            input_factor_TD=self._input_factor(T, D),
            output_factor_TK=self._output_factor(T),
            keys_TK=self._words(T, self.top_k, STREAM_RANDOM_DROP).astype(np.float64),
        )


@dataclass(frozen=True)
class Results:
    """Everything that one run gives: output, losses and the gradients of sum(dy * y) + losses."""

    y: Tensor | np.ndarray
    aux_loss: Tensor | float
    z_loss: Tensor | float
    grads: Mapping[str, Tensor | np.ndarray]


def run_layer(layer: MoELayer, case: LayerCase, x: Tensor, dy: Tensor) -> tuple[Results, RoutingStats]:
    """The layer itself, with poisoned memory in the forward."""
    layer.train(case.training)
    key_noise(layer, seed=case.seed, step=case.step)
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    with poisoned_empty():
        with case.precision():
            y, stats = layer(x, **case.call)
        grads = _gradients([y, stats.aux_loss, stats.z_loss], leaves, dy)
    return Results(y.detach(), stats.aux_loss.detach(), stats.z_loss.detach(), grads), stats


def run_loops(
    layer: MoELayer,
    case: LayerCase,
    oracle: OracleOutput,
    x_TD: Tensor,
    dy_TD: Tensor,
) -> list[Results]:
    """Plain PyTorch with the oracle's choice, with the dimensions summed in several orders."""
    inputs, options = case.oracle_inputs(layer, x_TD), case.oracle_options()
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32

    def tensor(value: np.ndarray | None) -> Tensor | None:
        return None if value is None else torch.tensor(value, dtype=wide)

    mask = inputs.token_mask_T
    results = []
    for order in range(3):
        x = x_TD.detach().clone().requires_grad_()
        params = {k: v.detach().clone().requires_grad_() for k, v in layer.named_parameters()}
        loop = LoopInputs(
            x_TD=x,
            params=params,
            expert_ids_TK=torch.tensor(oracle.topk_expert_ids_TK),
            kept_TK=torch.tensor(oracle.kept_TK),
            mask_T=torch.tensor(np.ones(len(x), dtype=bool) if mask is None else mask),
            weights_TK=tensor(inputs.weights_TK),
            input_factor_TD=tensor(inputs.input_factor_TD),
            noise_TE=tensor(inputs.noise_TE) if has_load(inputs, options) else None,
            output_factor_TK=tensor(np.asarray(inputs.output_factor_TK)),
        )
        loop, back_D = shuffled(loop, seed=order) if order else (loop, slice(None))
        with case.precision():
            y, aux_loss, z_loss = loop_forward(loop, options)
        y = y[:, back_D]
        grads = _gradients([y, aux_loss, z_loss], {"x": x, **params}, dy_TD)
        results.append(Results(y.detach(), aux_loss.detach(), z_loss.detach(), grads))
    return results


def _gradients(outputs: list[Tensor], leaves: Mapping[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Gradients of sum(dy * y) + the losses; zeros for leaves without."""
    live = [(o, g) for o, g in zip(outputs, (dy, None, None), strict=True) if o.requires_grad]
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if live:
        found = torch.autograd.grad(
            [o for o, _ in live], list(leaves.values()), [g for _, g in live], allow_unused=True
        )
    pairs = zip(leaves.items(), found, strict=True)
    return {k: torch.zeros_like(v) if g is None else g.detach() for (k, v), g in pairs}


def check_exact(layer: MoELayer, case: LayerCase, x: Tensor, dy: Tensor) -> OracleOutput | None:
    """Compare everything: choices and drops exactly, output, losses and all gradients by the two-times rule.

    FP64 is held to 1e-10 instead. Returns None, without a comparison, where two scores are so near that the precision
    could decide the choice (the caller should draw other values).

    Raises:
        AssertionError: something is off.
    """
    x_TD, dy_TD = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    inputs, options = case.oracle_inputs(layer, x_TD), case.oracle_options()
    oracle = oracle_forward(inputs, options)
    if oracle.margin < numerics.CHOICE_MARGIN:
        return None
    ours, stats = run_layer(layer, case, x, dy)
    assert ours.y.shape == x.shape and ours.y.dtype == x.dtype
    _check_choice(stats, oracle)
    exact_grads = oracle_backward(inputs, options, oracle, as_fp64(dy_TD))
    exact = Results(oracle.y_TD.reshape(x.shape), oracle.aux_loss, oracle.z_loss, exact_grads)
    is_fp64 = x.dtype == torch.float64
    loops = [] if is_fp64 else run_loops(layer, case, oracle, x_TD, dy_TD)
    low, wide = case.autocast or x.dtype, x.dtype if is_fp64 else torch.float32
    units = {"low": torch.finfo(low).eps / 2, "wide": torch.finfo(wide).eps / 2}
    units["cast"] = units["low"] if case.autocast else 0.0
    rounded = rounding_of_results(inputs, options, oracle, as_fp64(dy_TD), **units)
    scales = loss_scales(inputs, options, oracle)
    for what, mine, theirs, right in _pairs(ours, loops, exact):
        rounding = rounded[what].error.reshape(mine.shape) if what in rounded else None
        if is_fp64:
            size = scales.get(what, 0.0)
            if rounding is not None:  # which is allowed where things cancel, and no more
                size = rounding.max(initial=0.0) / numerics.FP64_RELATIVE
            scale = max(numerics.magnitude(right), size)
            numerics.assert_close_fp64(mine, right, what=what, scale=scale)
        else:
            numerics.assert_two_times(
                mine,
                theirs,
                right,
                what=what,
                dtype=low if what in rounded else None,
                scale=scales.get(what, 0.0),
                rounding=rounding,
            )
    return oracle


def _check_choice(stats: RoutingStats, oracle: OracleOutput) -> None:
    assert np.array_equal(stats.topk_expert_ids_TK.numpy(), oracle.topk_expert_ids_TK), "choices differ"
    assert np.array_equal(stats.num_tokens_per_expert_E.numpy(), oracle.num_tokens_per_expert_E), "counts differ"
    assert int(stats.num_dropped) == oracle.num_dropped, (
        f"dropped {int(stats.num_dropped)}, the oracle {oracle.num_dropped}"
    )
    weights = stats.topk_weights_TK
    precision = torch.float64 if weights.dtype == torch.float64 else torch.float32
    assert weights.dtype == precision, "routing weights are not in full precision"
    numerics.assert_weights(weights, oracle.topk_weights_TK, what="routing weights")


def _pairs(ours: Results, loops: list[Results], exact: Results) -> list[tuple[str, Any, list[Any], Any]]:
    pairs = [
        (
            name,
            getattr(ours, name),
            [getattr(loop, name).reshape(getattr(ours, name).shape) for loop in loops],
            getattr(exact, name),
        )
        for name in ("y", "aux_loss", "z_loss")
    ]
    for name, grad in ours.grads.items():
        right = exact.grads[name].reshape(grad.shape)
        pairs.append((name, grad, [loop.grads[name].reshape(grad.shape) for loop in loops], right))
    return pairs
