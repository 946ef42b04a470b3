"""Run one layer spread over ranks and whole on each of them, and compare; the code of the ranks of a test."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from expertmesh import lora
from expertmesh.comm.collectives import start_all_reduce
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.experts.dispatcher import spread_experts
from tests.oracle.numerics import FP64_RELATIVE, assert_two_times, magnitude, max_error
from tests.support.ranks import world_of
from tests.support.replicas import fill_biases, whole

D, F, E = 8, 12, 8
LOSS_FACTOR = 3.0


@dataclass(frozen=True)
class SpreadCase:
    """One call of one layer.

    Attributes:
        layer: keyword arguments of MoELayer beside the sizes.
        spread: of spread_experts.
        call: of forward.
        tokens: of each rank; None: [7, 4, 0, 9] as far as there are ranks, times group.
        group: routing group size; the tokens of each rank are so many times `tokens`.
        subset: ranks 0 and 2 are one world, 1 and 3 another.
        dtype: of the layer.
        training: mode.
        adapters: of expertmesh.lora.add; none: there are none.
    """

    layer: Mapping[str, Any] = field(default_factory=dict)
    spread: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (7, 4, 0, 9)
    group: int = 1
    subset: bool = False
    dtype: torch.dtype = torch.float64
    training: bool = True
    adapters: Mapping[str, Any] = field(default_factory=dict)


def build(case: SpreadCase, dtype: torch.dtype) -> MoELayer:
    """The layer, with the same weights in every process, and biases that are not zero."""
    group = case.group if case.group > 1 else None
    options = {"num_experts": E, "top_k": 2, "seed": 1, "routing_group_size": group, **case.layer}
    layer = MoELayer(dim=D, hidden_dim=F, dtype=torch.float64, **options)
    fill_biases(layer)
    key_noise(layer, seed=5, step=6)
    if case.adapters:
        lora.add(layer, seed=4, dtype=torch.float64, freeze=False, **case.adapters)
        for one in lora.adapters(layer).values():
            torch.nn.init.constant_(one.b, 0.1)
    layer.train(case.training)
    return layer.to(dtype)


@dataclass
class Tried:
    """Results of one process, all gradients summed over ranks and whole."""

    y_TD: Tensor
    x_grad_TD: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    counts_E: Tensor
    num_dropped: Tensor
    gradients: dict[str, Tensor]
    transfers: list[Any]


def _inputs(total: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(total, D, dtype=torch.float64, generator=generator) for _ in "xc")  # type: ignore[return-value]


def run_whole(case: SpreadCase, num_ranks: int, dtype: torch.dtype) -> Tried:
    """All tokens of all ranks through the layer in one process."""
    layer = build(case, dtype)
    x, cotangent = (t.to(dtype) for t in _inputs(sum(case.tokens[:num_ranks]) * case.group))
    return _run(layer, x, cotangent, case, torch.arange(len(x)), share=1.0)


def run_spread(case: SpreadCase) -> tuple[Tried, slice]:
    """This rank's tokens through the spread layer; and which they are of all tokens."""
    world = world_of(case.subset)
    sizes = [n * case.group for n in case.tokens[: world.size]]
    first = sum(sizes[: world.position])
    mine = slice(first, first + sizes[world.position])
    layer = build(case, case.dtype)
    spread_experts(layer, world, **case.spread)
    x, cotangent = (t[mine].to(case.dtype) for t in _inputs(sum(sizes)))
    index = torch.arange(mine.start, mine.stop)
    with world.traffic.logged() as log:
        tried = _run(layer, x, cotangent, case, index, share=len(x) / max(sum(sizes), 1))
    for name, grad in tried.gradients.items():
        if not name.startswith("experts."):
            pending = start_all_reduce(grad, world.all_ranks(), where="test")
            if pending is not None:
                pending.wait()
    return replace(tried, transfers=log.transfers), mine


def _run(layer: MoELayer, x: Tensor, cotangent: Tensor, case: SpreadCase, index: Tensor, *, share: float) -> Tried:
    x = x.clone().requires_grad_()
    y, stats = layer(x, token_index=index, **case.call)
    loss = (y * cotangent).sum() + share * LOSS_FACTOR * (stats.aux_loss + stats.z_loss)
    loss.backward()
    assert x.grad is not None
    return Tried(
        y.detach(),
        x.grad,
        stats.aux_loss.detach(),
        stats.z_loss.detach(),
        stats.num_tokens_per_expert_E,
        stats.num_dropped,
        {name: whole(p.grad) for name, p in layer.named_parameters() if p.grad is not None},
        [],
    )


def compare(case: SpreadCase) -> list[Any]:
    """Assert on each rank that the spread layer equals the whole one; returns the rank's transfers.

    FP64: 1e-10 relative. Other dtypes: the two-times rule against the whole layer in that dtype.
    """
    world = world_of(case.subset)
    spread, mine = run_spread(case)
    oracle = run_whole(case, world.size, torch.float64)
    assert torch.equal(spread.counts_E, oracle.counts_E), (spread.counts_E, oracle.counts_E)
    assert int(spread.num_dropped) == int(oracle.num_dropped)
    pairs = {
        "y": (spread.y_TD, oracle.y_TD[mine], oracle.y_TD),
        "dx": (spread.x_grad_TD, oracle.x_grad_TD[mine], oracle.x_grad_TD),
    }
    assert spread.gradients.keys() == oracle.gradients.keys()
    pairs |= {n: (g, oracle.gradients[n], oracle.gradients[n]) for n, g in spread.gradients.items()}
    if case.group == 1:
        pairs["aux"] = (spread.aux_loss, oracle.aux_loss, oracle.aux_loss)
    if case.dtype == torch.float64:
        for name, (ours, theirs, scale) in pairs.items():
            error = max_error(ours, theirs) / max(magnitude(scale), 1.0)
            assert error <= FP64_RELATIVE, f"{name}: {error:.2e}"
    else:
        same = run_whole(case, world.size, case.dtype)
        near = {"y": same.y_TD[mine], "dx": same.x_grad_TD[mine], "aux": same.aux_loss}
        for name, (ours, theirs, _) in pairs.items():
            plain = near.get(name, same.gradients.get(name))
            assert plain is not None
            assert_two_times(ours, plain, theirs, what=name)
    return spread.transfers


def compare_all(cases: Iterable[SpreadCase]) -> None:
    """The same for several; an error names the case."""
    for case in cases:
        try:
            compare(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
