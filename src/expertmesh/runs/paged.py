"""Models with paged experts: slots in place of the experts, filled from the files when tokens choose them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.box import whole_box
from expertmesh.checkpoints.source import TensorSource
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.paged_experts import PagedExperts
from expertmesh.moe.quantized_experts import QuantizedExperts


def put_slots(
    model: nn.Module,
    source: TensorSource,
    *,
    num_slots: int,
    fetch_ahead: bool | None,
    device: torch.device,
) -> None:
    """Replace a model's routed experts by slots, the only memory that they take on a device.

    Args:
        model: the model, on the meta device.
        source: source of its weights.
        num_slots: slots of each layer.
        fetch_ahead: whether experts of the next layer are fetched while a layer computes; None: unless the device is a CPU.
        device: device of the slots.

    Raises:
        ConfigError: a layer has fewer experts than slots, or the model has no experts.
    """
    layers = list(_layers(model))
    if not layers:
        raise ConfigError(
            "expert_slots", num_slots, "the model has no routed experts", "leave it out"
        )
    fewest = min(layer.num_experts for _, layer, _ in layers)
    if num_slots > fewest:
        raise ConfigError(
            "expert_slots",
            num_slots,
            f"a layer has {fewest} experts",
            f"use at most {fewest}, or leave it out",
        )
    made: list[tuple[MoELayer, PagedExperts]] = []
    for name, layer, experts in layers:
        paged = PagedExperts(
            experts, num_slots=num_slots, read=_Reader(source, f"{name}.experts."), device=device
        )
        setattr(layer, "experts", paged)  # noqa: B010 - a module of another class
        made.append((layer, paged))
    if not (device.type != "cpu" if fetch_ahead is None else fetch_ahead):
        return
    for (_, paged), (layer, later) in zip(made, made[1:], strict=False):
        paged.ahead = layer.router, layer.top_k, later


def _layers(model: nn.Module) -> Iterator[tuple[str, MoELayer, GroupedExperts | QuantizedExperts]]:
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and isinstance(
            module.experts, GroupedExperts | QuantizedExperts
        ):
            yield name, module, module.experts


class _Reader:
    """Reader of single experts of a layer from a source."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self.source, self.prefix = source, prefix

    def __call__(self, name: str, expert: int, into: Tensor) -> None:
        full = self.prefix + name
        box = (slice(expert, expert + 1), *whole_box(into.shape))
        self.source.read(full, box, into[None])


def paged_layers(model: nn.Module) -> list[PagedExperts]:
    """The paged experts of a model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, PagedExperts)]
