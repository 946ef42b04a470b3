"""Loading of optimizer moments from a checkpoint, with conversion between storage types."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.source import Stored, TensorSource, read_into, read_whole
from expertmesh.config.run import StateDtype
from expertmesh.errors import ConfigError
from expertmesh.parallel.matrices import own_part
from expertmesh.parallel.shard_place import Place, maxima_over_ranks, place_of
from expertmesh.spec.moments import THEIRS
from expertmesh.training.compact import new_state, state_dtype_of
from expertmesh.training.moment_types import (
    Code,
    Float16Scaled,
    Int8,
    State,
    code_of,
    rows,
    write_moment,
)
from expertmesh.training.theirs import plain_tensors, their_state
from expertmesh.training.workspace import Workspace

_ADAMW = ("exp_avg", "exp_avg_sq")
_MUON = ("momentum_buffer",)
_SAVED_AS: dict[torch.dtype, StateDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "fp16-scaled",
    torch.int8: "int8",
    torch.uint8: "int8",
}


@dataclass(frozen=True)
class _Conversion:
    """Parameter whose moments are saved in another type.

    Attributes:
        name: prefix of its tensors' names.
        parameter: the parameter.
        state: optimizer state to be filled.
        keys: names of the moments.
        code: storage type of the state; None: the parameter's own dtype.
    """

    name: str
    parameter: nn.Parameter
    state: State
    keys: tuple[str, ...]
    code: Code | None


class MomentsReader:
    """Fills the state of an optimizer from a checkpoint.

    Args:
        source: the checkpoint.
        optimizer: AdamW or Muon.
        parameters: trainable parameters by name.
        step: number of steps done, for a type that needs it where the saved state lacks it.
    """

    def __init__(
        self,
        source: TensorSource,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        step: int,
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
            keys = next((k for k in (_ADAMW, _MUON) if lead + k[-1] in saved), ())
            if not keys:
                continue
            code = code_of(parameter, wanted[parameter])
            was = _saved_as(saved, lead, keys[0])
            now: StateDtype = code.name if code is not None else _theirs_or_plain(wanted[parameter])
            _check_theirs_stay(was, now)
            if now in THEIRS:
                state = their_state(parameter, now)
                optimizer.state[parameter] = state
                for key, value in state.items():
                    self.targets |= {lead + k: t for k, t in plain_tensors(key, value).items()}
                continue
            state = _new_state(parameter, code, keys)
            if lead + "step" not in saved and "step" in state:
                state["step"].fill_(step)
            if was == now:
                read = state.items()
            else:
                found[was, now] = found.get((was, now), 0) + 1
                self._conversions.append(_Conversion(lead, parameter, state, keys, code))
                read = {"step": state["step"]}.items() if "step" in state else {}.items()
            self.targets |= {
                lead + key: t for key, t in read if lead + key in saved or key != "step"
            }
            optimizer.state[parameter] = state
        if found:
            told = (f"{n} tensors from {was} to {now}" for (was, now), n in found.items())
            self.message = f"optimizer: moments change their type, {', '.join(told)}"

    def convert(self) -> None:
        """Read the moments that need conversion, one tensor at a time; every rank must call.

        Raises:
            CheckpointError: a moment is incomplete.
        """
        with torch.no_grad():
            for one in self._conversions:
                for key in one.keys:
                    self._convert(one, key)

    def _convert(self, one: _Conversion, key: str) -> None:
        parameter, state, code = one.parameter, one.state, one.code
        values = self._values(one.name + key, parameter)
        if code is None:
            own_part(state[key]).copy_(values.view_as(own_part(state[key])))
            return
        if isinstance(code, Float16Scaled):
            size = values.abs().amax() if values.numel() else values.new_zeros(())
            (largest,) = maxima_over_ranks([parameter], [size])
            Float16Scaled.next_scale(state[f"{key}_scale"], 0.0, largest)
        write_moment(code, state, key, values, None, Workspace(values.device))

    def _values(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Local shard of a saved moment, (R, C)."""
        was = _SAVED_AS.get(self.source.tensors[name].dtype, "float32")
        part = torch.zeros_like(parameter)
        if was in ("float32", "bfloat16"):
            read_into(self.source, {name: part})
            return rows(part)
        own = rows(part)
        if not own.numel():
            return own
        place = place_of(parameter)
        if was == "fp16-scaled":
            codes = self._read(name, place.box, own.device)
            scale = read_whole(self.source, f"{name}_scale").to(own.device)
            return own.copy_(codes.to(torch.float32).mul_(scale))
        return own.copy_(self._of_blocks(name, place, own.device))

    def _of_blocks(self, name: str, place: Place, device: torch.device) -> Tensor:
        """Decoded shard of an int8 moment, which may begin and end inside blocks."""
        code, width = Int8(place.shape[-1]), place.shape[-1]
        start, stop = place.box[-1].start, place.box[-1].stop
        first, last = start // code.block, code.num_blocks(stop)
        ahead = place.box[:-1]
        codes = self._read(
            name, (*ahead, slice(first * code.block, min(last * code.block, width))), device
        )
        scales = self._read(f"{name}_scale", (*ahead, slice(first, last)), device)
        found = torch.empty(codes.shape, dtype=torch.float32, device=device)
        code.read(codes, scales, found, Workspace(device))
        return found[:, start - first * code.block :][:, : stop - start]

    def _read(self, name: str, box: tuple[slice, ...], device: torch.device) -> Tensor:
        """A part of a saved tensor, (R, C)."""
        sizes = [s.stop - s.start for s in box]
        part = torch.empty(sizes, dtype=self.source.tensors[name].dtype, device=device)
        self.source.read(name, box, part)
        return part.view(-1, sizes[-1])


def _saved_as(saved: Mapping[str, Stored], lead: str, key: str) -> StateDtype:
    """Storage type of a saved signed moment; torchao's codes are uint8 and have one axis of scales."""
    info = saved[lead + key]
    if info.dtype != torch.uint8:
        return _SAVED_AS.get(info.dtype, "float32")
    block = math.prod(info.shape) / max(math.prod(saved[f"{lead}{key}_scale"].shape), 1)
    return "torchao-int8" if block == THEIRS["torchao-int8"].block else "torchao-int4"


def _theirs_or_plain(wanted: StateDtype) -> StateDtype:
    return wanted if wanted in THEIRS else "float32"


def _check_theirs_stay(was: StateDtype, now: StateDtype) -> None:
    if was != now and (was in THEIRS or now in THEIRS):
        raise ConfigError(
            "optim.state_dtype",
            now,
            f"the checkpoint has moments of {was}, and torchao's are not converted",
            f"use {was}",
        )


def _new_state(parameter: nn.Parameter, code: Code | None, keys: tuple[str, ...]) -> State:
    if code is not None:
        return new_state(parameter, code, *keys)
    state = {key: torch.zeros_like(parameter) for key in keys}
    if keys == _MUON:
        return state
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, **state}
