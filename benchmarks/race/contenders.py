"""Who races: our layer and its peers, all on the same tensors, so that large weights exist once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.layer_peers import EinsumMoE, GroupedMM, MixtralMoE
from benchmarks.peer_parts import Case, OwnWeights, absent, choose
from benchmarks.race.adapters import PACKAGES, why_missing
from benchmarks.race.shapes import RaceShape
from benchmarks.race.verdicts import EINSUM, OURS, TRANSFORMERS
from torch import Tensor, nn

from expertmesh import MoELayer
from expertmesh.functional import moe_mlp, route_metadata
from expertmesh.moe.routing_noise import key_noise

GROUPED_MM = "torch grouped_mm"
NUM_BATCHES = 5


@dataclass(frozen=True)
class WeightSet:
    """Router (E, D) FP32, w_in (E, G, F, D) and w_out (E, D, F) BF16: random, of the size that a fresh layer has."""

    router_ED: Tensor
    w_in_EGFD: Tensor
    w_out_EDF: Tensor

    @staticmethod
    def draw(shape: RaceShape, device: str, generator: torch.Generator) -> "WeightSet":
        E, G, F, D = shape.num_experts, shape.num_branches, shape.hidden_dim, shape.dim

        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            empty = torch.empty(*size, device=device, dtype=dtype)
            return empty.normal_(std=size[-1] ** -0.5, generator=generator)

        router = normal(E, D, dtype=torch.float32)
        return WeightSet(router, normal(E, G, F, D), normal(E, D, F))


@dataclass(frozen=True)
class Racer:
    """One contender.

    Attributes:
        name: in tables.
        module: (T, D) -> (T, D); our layer gives a pair.
        take: makes the module use a set of weights, without a copy where its layout allows, and forget gradients.
        router: the router's weight that it uses, (E, D).
        expert_ids: (T, K) for a batch.
        gradients: of w_in (E, G, F, D) and w_out (E, D, F), after a backward.
        experts: (x_TD, weights_TK, ids_TK) -> (T, D), what is done once the choice is made; None: not offered alone.
    """

    name: str
    module: nn.Module
    take: Callable[[WeightSet], None]
    router: Callable[[], Tensor]
    expert_ids: Callable[[Tensor], Tensor]
    gradients: Callable[[], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor], Tensor] | None

    def __call__(self, x_TD: Tensor) -> Tensor:
        y = self.module(x_TD)
        return y[0] if isinstance(y, tuple) else y


def case_of(shape: RaceShape, *, device: str, training: bool = True) -> Case:
    """A shape in the words of `benchmarks.layer_peers`."""
    return Case(
        shape.num_tokens,
        shape.dim,
        shape.hidden_dim,
        shape.num_experts,
        shape.top_k,
        shape.activation,
        torch.bfloat16,
        training,
        device,
    )


def ours(shape: RaceShape, *, device: str, **options: Any) -> Racer:
    """Our layer, router included, without a balance loss."""
    layer = MoELayer(
        dim=shape.dim,
        hidden_dim=shape.hidden_dim,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        activation=shape.activation,
        balance_loss="none",
        seed=0,
        device="meta",
        dtype=torch.bfloat16,
        **options,
    )
    layer.noise_key = torch.zeros(2, dtype=torch.int64, device=device)
    key_noise(layer, seed=0, step=0)

    def take(weights: WeightSet) -> None:
        layer.router.proj.weight = nn.Parameter(weights.router_ED)
        layer.experts.w_in = nn.Parameter(weights.w_in_EGFD)
        layer.experts.w_out = nn.Parameter(weights.w_out_EDF)

    def experts(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        maps = route_metadata(ids_TK, shape.num_experts)
        own = layer.experts
        return moe_mlp(x_TD, own.w_in, own.w_out, weights_TK, maps, activation=shape.activation)

    return Racer(
        OURS,
        layer,
        take,
        lambda: layer.router.proj.weight,
        lambda x_TD: choose(x_TD, layer.router.proj.weight, shape.top_k)[1],
        lambda: (layer.experts.w_in.grad, layer.experts.w_out.grad),
        experts,
    )


def _of_module(name: str, module: OwnWeights, shape: RaceShape) -> Racer:
    size = (shape.num_experts, shape.num_branches, shape.hidden_dim, shape.dim)

    def take(weights: WeightSet) -> None:
        module.take(weights.router_ED, weights.w_in_EGFD.flatten(1, 2), weights.w_out_EDF)

    def gradients() -> tuple[Tensor, Tensor]:
        w_in, w_out = module.weight_grads()
        return w_in.view(size), w_out

    return Racer(
        name,
        module,
        take,
        lambda: module.router,
        lambda x_TD: module.routing(x_TD)[1],
        gradients,
        module.experts,
    )


def field_of(
    shape: RaceShape,
    *,
    device: str,
    training: bool = True,
    only: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    trying: Callable[[str], object] = id,
) -> tuple[list[Racer], list[str]]:
    """All who can run a shape here, ours first, and a line for each who cannot.

    Args:
        shape: what is run.
        device: cpu or cuda.
        training: with gradients.
        only: names to which peers are limited; none: all.
        without: names of peers that are neither imported nor built.
        trying: told each peer's name before it is.
    """
    case = case_of(shape, device=device, training=training)
    racers, missing = [ours(shape, device=device)], []

    def add(name: str, make: Callable[[], Racer], missing_here: Callable[[], str | None] = lambda: None) -> None:
        if (only and name not in only) or name in without:
            return
        trying(name)
        why = missing_here()
        if why is None:
            try:
                racers.append(make())
                return
            except Exception as error:  # a foreign layer that cannot be built: the others still race
                why = f"cannot be built: {type(error).__name__}: {error}"
        missing.append(f"{name}: {why}")

    with torch.device("meta"):  # adapters copy the layer's weights; here there are none to copy
        layer = racers[0].module
        if shape.activation == "swiglu":
            here = replace(case, device="meta")
            add(
                TRANSFORMERS,
                lambda: _of_module(TRANSFORMERS, MixtralMoE(layer, here, implementation="grouped_mm"), shape),
                lambda: absent("transformers"),
            )
        add(GROUPED_MM, lambda: _of_module(GROUPED_MM, GroupedMM(layer, case), shape))
        for name, (package, make) in PACKAGES[shape.activation].items():
            add(
                name,
                lambda name=name, make=make: _of_module(name, make(layer, case), shape),
                lambda package=package: why_missing(package, case),
            )
        if shape.against_einsum and training:
            add(EINSUM, lambda: _of_module(EINSUM, EinsumMoE(layer, case), shape))
    for racer in racers:
        racer.module.train(training)
    return racers, missing


@dataclass(frozen=True)
class Inputs:
    """Tokens and gradients of several rounds."""

    batches: tuple[Tensor, ...]
    grad_TD: Tensor

    @staticmethod
    def draw(shape: RaceShape, device: str, generator: torch.Generator, num_batches: int = NUM_BATCHES) -> "Inputs":
        def normal() -> Tensor:
            empty = torch.empty(shape.num_tokens, shape.dim, device=device, dtype=torch.bfloat16)
            return empty.normal_(generator=generator)

        return Inputs(tuple(normal() for _ in range(num_batches)), normal())
