"""Loading of optimizer moments from a checkpoint, with conversion between storage types."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.source import Stored, TensorSource, read_whole
from expertmesh.config.run import StateDtype
from expertmesh.errors import ConfigError
from expertmesh.parallel.shard_place import maxima_over_ranks, place_of
from expertmesh.spec.moments import FORMATS
from expertmesh.training.low_bit_adamw import ADAMW_KEYS, MUON_KEYS, new_state, state_dtype_of
from expertmesh.training.moment_types import (
    CODES,
    Code,
    Float16Scaled,
    Moment,
    State,
    code_of,
    is_signed,
    rows,
    write_moment,
)
from expertmesh.training.torchao_adamw import plain_tensors, torchao_state
from expertmesh.training.workspace import Workspace

_SAVED_AS: Mapping[torch.dtype | None, StateDtype] = {
    dtype: name for name, code in CODES.items() for dtype in code.dtypes if dtype is not None
}


class _Conversion(NamedTuple):
    """Moment that is saved in another type: its name in the checkpoint, and the state to be filled."""

    name: str
    parameter: nn.Parameter
    state: State
    key: str
    code: Code


class MomentsReader:
    """Fills the state of an optimizer from a checkpoint."""

    def __init__(
        self,
        source: TensorSource,  # the checkpoint
        optimizer: torch.optim.Optimizer,  # AdamW or Muon
        parameters: Iterable[tuple[str, nn.Parameter]],  # trainable parameters by name
        *,
        step: int,  # number of steps done, for a type that needs it where the saved state lacks it
    ) -> None:
        self.source = source
        self.targets: dict[str, Tensor] = {}
        """Tensors that are read without conversion."""
        self.message = ""
        """Conversions in one line; empty: no conversion."""
        self._conversions: list[_Conversion] = []
        wanted, saved = state_dtype_of(optimizer), source.tensors
        found: dict[tuple[StateDtype, StateDtype], int] = {}
        for name, parameter in parameters:
            lead = f"optimizer.{name}."
            keys = next((k for k in (ADAMW_KEYS, MUON_KEYS) if lead + k[-1] in saved), ())
            if not keys:
                continue
            code, want = code_of(parameter, wanted[parameter]), wanted[parameter]
            was, now = _saved_as(saved, lead + keys[0]), code.name if want in CODES else want
            if was != now and not {was, now} <= CODES.keys():
                rule = f"the checkpoint has moments of {was}, and torchao's are not converted"
                raise ConfigError("optim.state_dtype", now, rule, f"use {was}")
            state = new_state(parameter, code, *keys) if now in CODES else torchao_state(parameter, now)
            if lead + "step" not in saved and "step" in state:
                state["step"].fill_(step)
            optimizer.state[parameter] = state
            for key, value in state.items():
                if (was == now and key != "step") or (key == "step" and lead + key in saved):
                    self.targets |= {lead + k: t for k, t in plain_tensors(key, value).items()}
            if was != now:
                found[was, now] = found.get((was, now), 0) + 1
                self._conversions += [_Conversion(lead + key, parameter, state, key, code) for key in keys]
        if found:
            told = (f"{n} tensors from {was} to {now}" for (was, now), n in found.items())
            self.message = f"optimizer: moments change their type, {', '.join(told)}"

    def convert(self) -> None:
        """Read the moments that need conversion, one tensor at a time; every rank must call."""
        with torch.no_grad():
            for name, parameter, state, key, code in self._conversions:
                values = self._values(name, parameter)
                if isinstance(code, Float16Scaled):
                    size = values.abs().amax() if values.numel() else values.new_zeros(())
                    (largest,) = maxima_over_ranks([parameter], [size])
                    code.next_scale(state[f"{key}_scale"], 0.0, largest)
                write_moment(code, state, key, values, None, Workspace(values.device))

    def _values(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Decoded local shard of a saved moment, (R, C), which may begin and end inside blocks."""
        own = torch.empty_like(rows(parameter))
        if not own.numel():
            return own
        saved, place = self.source.tensors, place_of(parameter)
        *lead, last = place.box
        dtype = saved[name].dtype
        code = CODES[_SAVED_AS.get(dtype, "float32")](place.shape[-1])
        first, end = last.start // code.block, -(-last.stop // code.block)
        start, stop = first * code.block, min(end * code.block, code.width)
        codes, scales = self._read(name, (*lead, slice(start, stop)), own.device), None
        if (kept := saved.get(f"{name}_scale")) is not None and kept.shape:
            scales = self._read(f"{name}_scale", (*lead, slice(first, end)), own.device)
        elif kept is not None:
            scales = read_whole(self.source, f"{name}_scale").to(own.device)
        wide = own.dtype if code.name == "float32" else torch.float32
        found = torch.empty(codes.shape, dtype=wide, device=own.device)
        code.read(Moment(codes, scales, is_signed(name)), found, Workspace(own.device))
        return own.copy_(found[:, last.start - start :][:, : own.shape[1]])

    def _read(self, name: str, box: tuple[slice, ...], device: torch.device) -> Tensor:
        """A part of a saved tensor, (R, C)."""
        sizes = [s.stop - s.start for s in box]
        part = torch.empty(sizes, dtype=self.source.tensors[name].dtype, device=device)
        self.source.read(name, box, part)
        return part.view(-1, sizes[-1])


def _saved_as(saved: Mapping[str, Stored], name: str) -> StateDtype:
    """Storage type of a saved signed moment; torchao's codes are uint8 and have one axis of scales."""
    if saved[name].dtype != torch.uint8:
        return _SAVED_AS.get(saved[name].dtype, "float32")
    block = math.prod(saved[name].shape) / max(math.prod(saved[f"{name}_scale"].shape), 1)
    is_int8 = block == FORMATS["torchao-int8"].torchao_block
    return "torchao-int8" if is_int8 else "torchao-int4"
