"""Models with paged experts: slots in place of the experts, filled from the files when tokens choose them."""

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.source import TensorSource, local_parts
from expertmesh.errors import ConfigError
from expertmesh.moe.expert_paging import ExpertPaging
from expertmesh.moe.layer import MoELayer, grouped_layers
from expertmesh.parallel.serving import ADDED_ONCE, as_plain


def put_slots(
    model: nn.Module,
    source: TensorSource,
    *,
    num_slots: int,
    fetch_ahead: bool | None,
    device: torch.device,
) -> None:
    """Put the routed experts of a model on the meta device into slots, of each layer `num_slots` on a rank.

    Experts of the next layer are fetched while a layer computes with `fetch_ahead`; None: unless the device is a CPU.
    """
    layers = list(grouped_layers(model))
    if not layers:
        raise ConfigError("expert_slots", num_slots, "the model has no routed experts", "leave it out")
    fewest = min(experts.num_experts for _, _, experts in layers)
    if num_slots > fewest:
        is_cut = any(experts.num_experts < layer.num_experts for _, layer, experts in layers)
        raise ConfigError(
            "expert_slots",
            num_slots,
            f"a layer has {fewest} experts{' on a rank' if is_cut else ''}",
            f"use at most {fewest}, or leave it out",
        )
    made: list[tuple[MoELayer, ExpertPaging]] = []
    for name, layer, experts in layers:
        read = _Reader(source, f"{name}.experts.", experts)
        as_plain(experts)
        first = read.boxes["w_in"][0].start
        paging = experts.put_into_slots(num_slots, read=read, device=device, first_expert=first)
        made.append((layer, paging))
    if not (device.type != "cpu" if fetch_ahead is None else fetch_ahead):
        return
    for (_, paging), (layer, later) in zip(made, made[1:], strict=False):
        paging.ahead = layer.router, layer.top_k, later


class _Reader:
    """Reader of single experts of a layer, perhaps cut over ranks, from a source with `prefix` before their names."""

    def __init__(self, source: TensorSource, prefix: str, experts: nn.Module) -> None:
        self.source, self.prefix = source, prefix
        self.boxes = {name: local_parts(t)[0][1] for name, t in experts.state_dict().items()}
        self._lacks = ADDED_ONCE if getattr(experts, "only_first_adds", False) else ()

    def __call__(self, name: str, expert: int, into: Tensor) -> None:
        if name in self._lacks:
            into.zero_()
            return
        experts, *rest = self.boxes[name]
        number = experts.start + expert
        self.source.read(self.prefix + name, (slice(number, number + 1), *rest), into[None])


def paging_of(model: nn.Module) -> list[ExpertPaging]:
    """The slots of a model's experts, layer by layer."""
    return [e.paging for _, _, e in grouped_layers(model) if e.paging is not None]
