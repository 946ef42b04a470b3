"""State dicts under Tutel's names: this rank's part of the layer, as in Tutel's file of the rank."""

from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.integrations.tutel import net
from expertmesh.integrations.tutel.builtin import neighbours
from expertmesh.integrations.tutel.custom_layer import CustomLayer
from expertmesh.moe.foreign_names import ForeignName, from_foreign, to_foreign


def state_names(layer: Any) -> list[ForeignName]:
    """Tutel's names of all tensors of a layer with grouped experts."""
    found = [
        ForeignName(f"gates.0.{'wg.weight' if name == 'proj.weight' else name}", f"router.{name}")
        for name in layer._layer.router.state_dict()
    ]
    every: slice = slice(None)
    if str(layer._layer.experts.activation).endswith("glu"):
        return [
            *found,
            ForeignName("experts.W_fc1", "experts.w_in", (every, 0), transposed=True),
            ForeignName("experts.W_fc2", "experts.w_in", (every, 1), transposed=True),
            ForeignName("experts.W_fc3", "experts.w_out", transposed=True),
        ]
    found.append(ForeignName("experts.batched_fc1_w", "experts.w_in", (every, 0)))
    found.append(ForeignName("experts.batched_fc2_w", "experts.w_out", transposed=True))
    if layer._biased[0]:
        found.append(ForeignName("experts.batched_fc1_bias", "experts.b_in", (every, 0)))
    if layer._biased[1]:
        found.append(ForeignName("experts.batched_fc2_bias", "experts.b_out"))
    return found


def to_theirs(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook of `state_dict` of a `MOELayer`. Where ranks share gated experts, every rank must call."""
    inner: Any = layer._layer
    if isinstance(inner, CustomLayer):
        for name in [n for n in state if n.startswith(f"{prefix}_layer.")]:
            state[prefix + name.removeprefix(f"{prefix}_layer.")] = state.pop(name)
    else:
        to_foreign(state, state_names(layer), prefix=prefix, own_prefix="_layer.")
        for name in _flat_names(state, prefix):
            state[name] = _flattened(state[name], layer, axis=_sliced_axis(name))
    state[f"{prefix}_num_global_experts"] = torch.tensor(layer.num_global_experts)


def to_ours(layer: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Hook of `load_state_dict` of a `MOELayer`. Where ranks share gated experts, every rank must call."""
    inner: Any = layer._layer
    count = int(state.pop(f"{prefix}_num_global_experts", layer.num_global_experts))
    if count != layer.num_global_experts:
        others[-1].append(
            f"{prefix}_num_global_experts: {count} experts do not fit the layer's {layer.num_global_experts}; "
            "part the files anew with checkpoint.gather and checkpoint.scatter"
        )
    if isinstance(inner, CustomLayer):
        for name in [n for n in state if n.startswith((f"{prefix}gates.", f"{prefix}experts."))]:
            state[f"{prefix}_layer.{name.removeprefix(prefix)}"] = state.pop(name)
        return
    own, names = inner.state_dict(), state_names(layer)
    for entry in names:
        value = state.get(prefix + entry.theirs)
        if value is None or not entry.theirs.startswith("experts."):
            continue
        part = own[entry.ours][entry.part]
        part = part.mT if entry.transposed else part
        if ".W_fc" in entry.theirs:
            value = _sliced(value, layer, part.shape, axis=_sliced_axis(entry.theirs))
        state[prefix + entry.theirs] = value.view(part.shape) if value.numel() == part.numel() else value
    others[-1].extend(from_foreign(state, names, inner, prefix=prefix, own_prefix="_layer."))


def _flat_names(state: dict[str, Any], prefix: str) -> list[str]:
    """Names of gated experts' tensors, which Tutel has flat."""
    return [f"{prefix}experts.W_fc{n}" for n in (1, 2, 3) if f"{prefix}experts.W_fc{n}" in state]


def _sliced_axis(name: str) -> int:
    """Axis of the hidden size, of which ranks have slices, in a gated expert's tensor (n, D, F) or (n, F, D)."""
    return 1 if name.endswith("3") else 2


def _flattened(slices: Tensor, layer: Any, *, axis: int) -> Tensor:
    """Tutel's flat part of a tensor for this rank, from our slice of it."""
    ranks = layer.sharded_count
    if ranks > 1:
        group = neighbours(ranks, layer._group)
        slices = torch.cat(net.simple_all_gather(slices.detach(), group).chunk(ranks), axis)
        return net.zero_scatter(slices, net.simple_split, group)[0].clone()
    return slices.reshape(-1)


def _sliced(flat: Tensor, layer: Any, shape: torch.Size, *, axis: int) -> Tensor:
    """Our slice of a tensor for this rank, from Tutel's flat part of it; any other tensor as it is."""
    ranks = layer.sharded_count
    if ranks == 1 or flat.dim() != 1:
        return flat
    group, whole = neighbours(ranks, layer._group), list(shape)
    whole[axis] *= ranks
    return net.zero_gather(flat, whole, group).chunk(ranks, axis)[net.get_world_rank(group)]
