"""The types that an optimiser may keep a moment in: how it is written from FP32, and read again.

All rounding of `bfloat16` and `int8` is stochastic, up or down so that the mean is the value: a moment whose change is smaller than
half a step of its type would otherwise stand still.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from expertmesh.config.run import StateDtype
from expertmesh.layout.moments import THEIRS, block_size, is_compact
from expertmesh.parallel.matrices import own_part
from expertmesh.parallel.shard_place import laid_out_as
from expertmesh.training.stochastic_rounding import Words
from expertmesh.training.workspace import Workspace

ROWS_OF = 1 << 17
"""Elements that are worked on at a time on a CPU, so that they stay in its cache."""
_ROWS_OF_GPU = 1 << 26
_LEAST_NORMAL = 2.0**-126
_LEAST_FP16 = 2.0**-24
_LEAST = 1.4e-45
"""The smallest number of FP32."""

State = dict[str, Tensor]
"""The tensors of a parameter: each moment by its name and, where its type has any, its scales by NAME_scale."""


class Code(ABC):
    """One type of moments, of tensors with a last axis of some length.

    Args:
        width: length of the whole last axis.
    """

    name: StateDtype
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of a moment with signs, and of one that is never negative."""
    is_stochastic = True
    """Whether it is rounded with random words."""

    def __init__(self, width: int) -> None:
        self.width = width

    @abstractmethod
    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """Scales of a moment of zeros; None: there are none."""

    @abstractmethod
    def read(self, codes: Tensor, scales: Tensor | None, out: Tensor, space: Workspace) -> None:
        """Write what rows of a moment stand for into FP32 or FP64.

        Args:
            codes: (R, C).
            scales: of these rows.
            out: (R, C).
            space: for what is in between.
        """

    @abstractmethod
    def write(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        words: Tensor | None,
        space: Workspace,
        *,
        signed: bool,
    ) -> None:
        """Round rows of a moment.

        Args:
            values: (R, C) FP32 or FP64, overwritten.
            codes: (R, C), set.
            scales: of these rows, set; one of the whole tensor is as it must be already.
            words: (R, C) int32, random, overwritten: of a moment with signs their lower halves count most, else their upper
                ones, so that one serves both. None: to the nearest.
            space: for what is in between.
            signed: whether values may be negative.
        """

    def new(self, parameter: Tensor, key: str) -> State:
        """A moment of zeros by its name, laid out as a parameter is."""
        dtype = self.dtypes[0] if is_signed(key) else self.dtypes[1]
        scales = self.new_scales(parameter)
        state = {key: torch.zeros_like(parameter, dtype=dtype)}
        return state if scales is None else {**state, f"{key}_scale": scales}


class Bfloat16(Code):
    """Half of FP32's bits, in its range. What is not finite becomes NaN."""

    name: StateDtype = "bfloat16"
    dtypes = torch.bfloat16, torch.bfloat16

    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """None."""
        return None

    def read(self, codes: Tensor, scales: Tensor | None, out: Tensor, space: Workspace) -> None:
        """See `Code.read`."""
        out.copy_(codes)

    def write(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        words: Tensor | None,
        space: Workspace,
        *,
        signed: bool,
    ) -> None:
        """See `Code.write`."""
        if words is None:
            codes.copy_(values)
            return
        values = _in_fp32(values, space)
        rounded = space.table("rounded", values.shape, torch.int32)
        if not signed:
            words.bitwise_right_shift_(16)
        # the upper half of FP32's bits, of which a carry from the lower one is the next number
        torch.add(values.view(torch.int32), words.bitwise_and_(0xFFFF), out=rounded)
        found = rounded.bitwise_and_(-0x10000).view(torch.float32)
        codes.copy_(found.add_(values.mul_(0)))


class Float16Scaled(Code):
    """FP16 with one scale per tensor, as fairseq's fp16-adam-stats.

    The scale is a bound of the whole tensor's largest value over 65,504, the same on all ranks, carried along with the moment itself
    (`next_scale`): so it is known before the moment is, and no layout over ranks changes it. Rounded to the nearest, but what is
    never negative not to zero, which the next step would divide by.
    """

    name: StateDtype = "fp16-scaled"
    dtypes = torch.float16, torch.float16
    largest = torch.finfo(torch.float16).max
    is_stochastic = False

    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """A scalar."""
        return torch.zeros((), dtype=torch.float32, device=own_part(parameter).device)

    def read(self, codes: Tensor, scales: Tensor | None, out: Tensor, space: Workspace) -> None:
        """See `Code.read`."""
        assert scales is not None
        out.copy_(codes).mul_(scales)

    def write(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        words: Tensor | None,
        space: Workspace,
        *,
        signed: bool,
    ) -> None:
        """See `Code.write`."""
        assert scales is not None
        values.div_(scales)
        codes.copy_(values if signed else values.clamp_min_(_LEAST_FP16))

    @staticmethod
    def next_scale(scales: Tensor, decay: float, largest: Tensor) -> None:
        """What moment = decay moment + (1 - decay) x makes of the scale.

        Args:
            scales: of the moment, set.
            decay: of the moment.
            largest: the whole tensor's largest |x|.
        """
        part = (1 - decay) / Float16Scaled.largest
        scales.mul_(decay).add_(largest.to(scales), alpha=part).clamp_min_(_LEAST_NORMAL)


class Int8(Code):
    """8 bits, in blocks along the last axis with the largest value in FP32.

    A value x of a block with the largest value a is a (q / 127)^4 with the sign of q, and where no value is negative a (q / 255)^8:
    steps of 3 % at a, and smaller ones as the value is smaller: at a / 10,000 of 31 and 10 % of it. Of a moment that is never
    negative, what is not zero is not rounded to zero, which the next step would divide by. A block with a value that is not
    finite is NaN.
    """

    name: StateDtype = "int8"
    dtypes = torch.int8, torch.uint8

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.block = block_size(width)

    def num_blocks(self, width: int) -> int:
        """Of so many elements from the edge of a block."""
        return -(-width // self.block)

    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """Of each block."""
        own = own_part(parameter)
        shape = (*own.shape[:-1], self.num_blocks(own.shape[-1]))
        part = torch.zeros(shape, dtype=torch.float32, device=own.device)
        return laid_out_as(parameter, part, last=self.num_blocks(self.width))

    def read(self, codes: Tensor, scales: Tensor | None, out: Tensor, space: Workspace) -> None:
        """See `Code.read`."""
        assert scales is not None
        is_even = codes.shape[1] % self.block == 0 and out.dtype == torch.float32
        x = out.copy_(codes).view(len(codes), -1, self.block) if is_even else None
        x = self._blocks(codes, "value", space) if x is None else x
        if codes.dtype == torch.uint8:
            x.mul_(1 / 255).square_().square_().square_()
        else:
            x.mul_(1 / 127)
            size = torch.abs(x, out=space.table("size", x.shape, torch.float32))
            x.mul_(size).mul_(size.square_())
        x.mul_(scales.unsqueeze(-1))
        if not is_even:
            out.copy_(x.view(len(codes), -1)[:, : codes.shape[1]])

    def write(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        words: Tensor | None,
        space: Workspace,
        *,
        signed: bool,
    ) -> None:
        """See `Code.write`."""
        assert scales is not None
        powers, levels = (2, 127) if signed else (3, 255)
        is_even = values.shape[1] % self.block == 0 and values.dtype == torch.float32
        x = (
            values.view(len(values), -1, self.block)
            if is_even
            else self._blocks(values, "value", space)
        )
        share, below, low, high = (
            space.table(name, x.shape, torch.float32) for name in ("share", "below", "low", "high")
        )
        share = torch.abs(x, out=share) if signed else x
        torch.amax(share, -1, out=scales)
        share.div_(scales.clamp_min(_LEAST).unsqueeze(-1))
        torch.sqrt(share, out=below)
        for _ in range(powers - 1):
            below.sqrt_()
        below.mul_(levels).floor_().clamp_max_(levels - 1)
        share.mul_(float(levels) ** 2**powers)
        torch.square(below, out=low)
        torch.add(below, 1, out=high).square_()
        for _ in range(powers - 1):
            low.square_()
            high.square_()
        share.sub_(low)
        high.sub_(low)
        if words is None:
            high.mul_(0.5)
        else:
            if signed:
                words.bitwise_left_shift_(16)
            part = self._blocks(words, "low", space)
            high.mul_(part.mul_(2.0**-32).add_(0.5))
        below.add_(torch.gt(share, high, out=low))
        # nothing is rounded to zero that the next step would divide by
        below = torch.copysign(below, x, out=below) if signed else below.clamp_min_(1)
        codes.copy_(below.view(len(codes), -1)[:, : codes.shape[1]])

    def _blocks(self, x: Tensor, name: str, space: Workspace) -> Tensor:
        """(R, C) of any type as (R, blocks, elements) in FP32, the last one filled up with zeros."""
        width = self.num_blocks(x.shape[1]) * self.block
        table = space.table(name, (len(x), width), torch.float32)
        table[:, : x.shape[1]].copy_(x)
        if width > x.shape[1]:
            table[:, x.shape[1] :].zero_()
        return table.view(len(x), -1, self.block)


def _in_fp32(values: Tensor, space: Workspace) -> Tensor:
    if values.dtype == torch.float32:
        return values
    return space.table("value", values.shape, torch.float32).copy_(values)


CODES: Mapping[StateDtype, type[Code]] = {
    code.name: code for code in (Bfloat16, Int8, Float16Scaled)
}


@cache
def _code(state_dtype: StateDtype, width: int) -> Code:
    return CODES[state_dtype](width)


def code_of(parameter: Tensor, state_dtype: StateDtype) -> Code | None:
    """What the moments of a parameter are kept in; None: its own type (`layout/moments.py` says of which).

    Args:
        parameter: a plain one or a DTensor.
        state_dtype: what is asked for.
    """
    if state_dtype in THEIRS:
        return None
    is_wide = parameter.dtype in (torch.float32, torch.float64)
    own = own_part(parameter)
    if not is_wide or not own.is_contiguous():
        return None
    if not is_compact(parameter.shape, own.shape, state_dtype):
        return None
    return _code(state_dtype, parameter.shape[-1])


def is_kept_as(parameter: Tensor, state_dtype: StateDtype) -> bool:
    """Whether the moments of a parameter are kept in the type that is asked for, ours or torchao's."""
    if state_dtype in THEIRS:
        shape = parameter.shape
        return parameter.is_contiguous() and is_compact(shape, shape, state_dtype)
    return code_of(parameter, state_dtype) is not None


def rows(tensor: Tensor) -> Tensor:
    """This rank's part as a table of its rows, in the same memory."""
    own = own_part(tensor)
    return own.view(-1, own.shape[-1]) if own.numel() else own.reshape(0, own.shape[-1])


def row_slices(table: Tensor) -> list[slice]:
    """Rows to be worked on at a time."""
    elements = ROWS_OF if table.device.type == "cpu" else _ROWS_OF_GPU
    count = max(elements // max(table.shape[1], 1), 1)
    return [slice(start, start + count) for start in range(0, len(table), count)]


def read_moment(
    code: Code,
    state: State,
    key: str,
    dtype: torch.dtype,
    space: Workspace,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """What this rank's part of a moment stands for, (R, C) in memory of its own.

    Args:
        code: its type.
        state: of the parameter.
        key: name of the moment.
        dtype: FP32 or FP64.
        space: for what is in between.
        scale: of the whole tensor, in the place of the state's, which is that of the moment to come.
    """
    codes, scales = rows(state[key]), scale_rows(state, key) if scale is None else scale
    found = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for part in row_slices(codes):
        code.read(codes[part], of_rows(scales, part), found[part], space)
    return found


def write_moment(
    code: Code, state: State, key: str, values: Tensor, words: Words | None, space: Workspace
) -> None:
    """Round this rank's part of a moment.

    Args:
        code: its type.
        state: of the parameter.
        key: name of the moment.
        values: (R, C), kept as they are.
        words: see `Code.write`.
        space: for what is in between.
    """
    codes, scales = rows(state[key]), scale_rows(state, key)
    for part in row_slices(codes):
        some = space.table("given", values[part].shape, values.dtype).copy_(values[part])
        drawn = None if words is None else words.of(part, space)
        code.write(some, codes[part], of_rows(scales, part), drawn, space, signed=is_signed(key))


def is_signed(key: str) -> bool:
    """Whether a moment may be negative, by its name."""
    return not key.endswith("_sq")


def scale_rows(state: State, key: str) -> Tensor | None:
    """Scales of a moment by row, the one of the whole tensor, or None."""
    scales = state.get(f"{key}_scale")
    if scales is None or not scales.ndim:
        return scales
    return rows(scales)


def of_rows(scales: Tensor | None, part: slice) -> Tensor | None:
    """The scales of some rows."""
    return scales if scales is None or not scales.ndim else scales[part]
