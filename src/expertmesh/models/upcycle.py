"""Sparse upcycling: the feed-forward blocks of a trained dense model become mixture-of-experts layers with their
weights.

Komatsuzaki et al., arXiv 2212.05055 (copies of the block as experts), He et al., arXiv 2410.07524 (fine-grained experts
that are slices of it, chosen in virtual groups), and Nakamura et al., arXiv 2502.19261 (partly redrawn copies).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import ConfigError
from expertmesh.models.expert_copies import ExpertCopies
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.upcycle import upcycle_gpt
from expertmesh.moe.check_arguments import check_module
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.match_mlp import MatchedMLP, match_mlp
from expertmesh.moe.types import RoutingStats

_OWN = (
    "dim",
    "hidden_dim",
    "activation",
    "bias",
    "experts",
    "normalize_weights",
    "weight_scale",
    "layer_index",
    "device",
    "dtype",
)
_log = logging.getLogger("expertmesh.models")
_collected: ContextVar["CollectedStats | None"] = ContextVar("collected", default=None)


@dataclass
class CollectedStats:
    """The routing statistics of the forward passes inside one `collect_stats`."""

    # one entry per call of a mixture-of-experts block, in order
    layers: list[RoutingStats] = field(default_factory=list)

    def loss(self) -> Tensor:
        """Sum of the weighted balance and z-losses of all calls; add it to the training loss."""
        if not self.layers:
            raise ConfigError("no mixture-of-experts block ran inside collect_stats; call the upcycled model in it")
        return torch.stack([s.aux_loss + s.z_loss for s in self.layers]).sum()


@contextmanager
def collect_stats() -> Iterator[CollectedStats]:
    """Collect the routing statistics of an upcycled model's mixture-of-experts blocks.

    Recomputation by activation checkpointing runs outside this context and is not counted twice.

    Example:
        >>> with collect_stats() as stats:
        ...     loss = model(**batch).loss
        >>> (loss + stats.loss()).backward()
    """
    stats = CollectedStats()
    token = _collected.set(stats)
    try:
        yield stats
    finally:
        _collected.reset(token)


class MoEBlock(nn.Module):
    """A mixture-of-experts layer in the place of a feed-forward block: tensor in, tensor out.

    Its routing statistics are added to an open `collect_stats`, if there is one.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer, (..., D), in the dtype of x."""
        y, stats = self.layer(x)
        collected = _collected.get()
        if collected is not None:
            collected.layers.append(stats)
        result: Tensor = y
        return result


def upcycle(
    model: nn.Module,
    *,
    every: int = 2,
    num_experts: int = 8,
    top_k: int = 2,
    granularity: int = 1,
    noise_std: float = 0.0,
    redraw: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> list[str]:
    """Turn every n-th feed-forward block of a dense model into a mixture-of-experts layer, in place.

    Blocks are found by structure and numbers (`match_mlp`), not by class names: transformers' Llama, Qwen, Mistral,
    GPT-NeoX and the like, or a model of your own. Experts are copies of the block and the routing weights of a token
    sum to one, so that the model computes the same function as before, to rounding. With `granularity` g every copy is
    cut into g experts along its hidden size. The router starts with equal rows for the g slices of a copy (a virtual
    group), so that tokens choose whole copies at first.

    A GPT of expertmesh stays a GPT: its configuration gets the experts, and it is saved and trained like any other. A
    model of transformers keeps its class, and files that it saves do not describe the experts.
    `integrations.transformers.as_moe_model` turns it into a Mixtral or Qwen3-MoE; or upcycle again the same way and
    `load_state_dict`.

    Args:
        model: the dense model; its blocks are on any device, but not on the meta device.
        every: blocks number every - 1, 2 every - 1, ... are replaced; 1: all.
        num_experts: copies of the block (E / granularity).
        top_k: copies that a token uses (K / granularity).
        granularity: experts that a copy is cut into (g); it must divide the hidden size, and more than 1 needs the
            linear router.
        noise_std: standard deviation of Gaussian noise on each copied weight tensor, relative to the tensor's own; 0:
            none.
        redraw: fraction of the hidden units of each expert that are redrawn, so that experts differ from the start (0.5
            in Drop-Upcycling); the model then no longer computes the dense model's function. 0: none.
        seed: the seed of routers, noise and redrawn units.
        options: further keywords of `MoELayer`, such as capacity_factor, aux_loss_weight or num_shared_experts.

    Returns:
        The names of the replaced modules.

    Raises:
        ConfigError: the model has no such block, or an option breaks a rule.

    Example:
        >>> from torch import nn
        >>> def block():
        ...     return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> model = nn.Sequential(block(), block())
        >>> em.upcycle(model, every=2, num_experts=4)
        ['1']
    """
    check_module(model)
    Number(1, fix="use 2 for every other block", types=WHOLE).check("every", every)
    if isinstance(model, GPT):
        _check_options(options)
        copies = ExpertCopies(num_experts, top_k, granularity, noise_std, redraw, seed)
        return upcycle_gpt(model, copies, every=every, options=options)
    blocks = [name for name, _ in _find_blocks(model)]
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} has no feed-forward block that is recognised: none of two nn.Linear, or of three "
            "with a gate, with silu, gelu (exact), relu or relu squared and without dropout; put "
            "MoELayer(experts=...) in the place of its blocks"
        )
    if every > len(blocks):
        raise ConfigError(
            f"every={every}: {type(model).__name__} has {len(blocks)} feed-forward blocks; lower it to that at most"
        )
    return moeify(
        model,
        names=blocks[every - 1 :: every],
        num_experts=num_experts,
        top_k=top_k,
        granularity=granularity,
        noise_std=noise_std,
        redraw=redraw,
        seed=seed,
        **options,
    )


def moeify(
    model: nn.Module,
    *,
    names: list[str],
    num_experts: int = 8,
    top_k: int = 2,
    granularity: int = 1,
    noise_std: float = 0.0,
    redraw: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> list[str]:
    """Turn the named feed-forward blocks of a model into mixture-of-experts layers, in place; see `upcycle`.

    Args:
        model: the model.
        names: names of the blocks, as in `model.named_modules()`.
        num_experts: see `upcycle`.
        top_k: see `upcycle`.
        granularity: see `upcycle`.
        noise_std: see `upcycle`.
        redraw: see `upcycle`.
        seed: see `upcycle`.
        options: see `upcycle`.

    Returns:
        The names.

    Raises:
        ConfigError: a module is missing or is no feed-forward block, or an option breaks a rule; the model is left
            unchanged.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> model = nn.ModuleDict({"mlp": model, "head": nn.Linear(8, 2)})
        >>> em.moeify(model, names=["mlp"], num_experts=4)
        ['mlp']
    """
    check_module(model)
    _check_options(options)
    copies = ExpertCopies(num_experts, top_k, granularity, noise_std, redraw, seed)
    found = [(name, _named(model, name)) for name in names]
    for index, name in enumerate(names):
        for other in names[:index] + names[index + 1 :]:
            if f"{name}.".startswith(f"{other}."):
                raise ConfigError(f"names: {name!r} is {other!r} or inside it; name each block once, the whole of it")
    made = [
        _upcycled(module, mlp, copies, layer_index=index, options=options)
        for index, (_, (module, mlp)) in enumerate(found)
    ]
    for (name, (module, _)), block in zip(found, made, strict=True):
        block.train(module.training)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, block)
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = _Saving(model)  # type: ignore[assignment]
    return names


class _Saving:
    """`save_pretrained` of an upcycled model of transformers, with a warning that its config does not describe the
    experts."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        del model.save_pretrained  # warn only once
        _log.warning(
            "%s: config.json describes the dense model, so that from_pretrained draws the replaced blocks anew: save "
            "expertmesh.integrations.transformers.as_moe_model(model) instead, or read these weights by "
            "load_state_dict into a "
            "model that em.upcycle made the same way",
            type(model).__name__,
        )
        return model.save_pretrained(*args, **kwargs)


def _check_options(options: dict[str, Any]) -> None:
    if taken := [name for name in _OWN if name in options]:
        raise ConfigError(
            f"{taken[0]}={options[taken[0]]!r}: upcycling sets it from the block that it copies; leave it out"
        )


def _find_blocks(model: nn.Module) -> Iterator[tuple[str, MatchedMLP]]:
    """Recognised feed-forward blocks with equal input and output width, outermost only, in the order of the model's
    modules."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in inside):
            continue
        mlp = match_mlp(module)
        if mlp is not None:
            inside.append(name)
            yield name, mlp


def _named(model: nn.Module, name: str) -> tuple[nn.Module, MatchedMLP]:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ConfigError(f"names: {type(model).__name__} has no module {name!r}; see model.named_modules()") from None
    mlp = match_mlp(module)
    if mlp is None or not name:
        raise ConfigError(
            f"names: {name or 'the model itself'!r} ({type(module).__name__}) is not recognised as a feed-forward "
            "block of two nn.Linear, or of three with a gate, without dropout; name another, or build a "
            "MoELayer(experts=...) of it"
        )
    return module, mlp


def _upcycled(
    module: nn.Module,
    mlp: MatchedMLP,
    copies: ExpertCopies,
    *,
    layer_index: int,
    options: dict[str, Any],
) -> MoEBlock:
    hidden_dim = copies.hidden_dim(mlp.hidden_dim)
    weights = mlp.weights(module)
    g = copies.granularity
    layer = MoELayer(
        dim=mlp.dim,
        hidden_dim=hidden_dim,
        num_experts=copies.num_copies * g,
        top_k=copies.top_k * g,
        activation=mlp.activation,
        bias=mlp.bias,
        normalize_weights="topk",
        weight_scale=float(g),
        seed=copies.seed,
        layer_index=layer_index,
        device=weights[1].device,
        dtype=weights[1].dtype,
        **options,
    )
    copies.fill(layer, *weights, layer_index=layer_index)
    return MoEBlock(layer)
