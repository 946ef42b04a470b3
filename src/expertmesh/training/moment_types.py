"""Storage types of optimizer moments: encoding from FP32, and decoding.

`bfloat16` and `int8` use stochastic rounding, whose mean is the exact value. With round-to-nearest, a moment would
never change if its updates are smaller than half a step of its type.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.config.run import StateDtype
from expertmesh.parallel.matrices import own_part
from expertmesh.parallel.shard_place import laid_out_as
from expertmesh.spec.moments import block_size, is_compact
from expertmesh.training.stochastic_rounding import Words
from expertmesh.training.workspace import Workspace

ROWS_OF = 1 << 17
"""Elements per block of rows on a CPU, sized for its cache."""
_ROWS_OF_GPU = 1 << 26
_LEAST_NORMAL = 2.0**-126
_LEAST_FP16 = 2.0**-24
_LEAST = 1.4e-45
"""Smallest positive number of FP32."""

State = dict[str, Tensor]
"""Optimizer state of a parameter: each moment by name and, if its type has scales, its scales by NAME_scale."""


class Moment(NamedTuple):
    """Rows of a stored moment."""

    codes: Tensor  # (R, C)
    scales: Tensor | None  # scales of these rows, the scalar scale of a whole tensor, or None
    is_signed: bool  # whether values may be negative

    @classmethod
    def of(cls, state: State, key: str) -> "Moment":
        """All rows of the local shard of a moment, sharing memory."""
        scales = state.get(f"{key}_scale")
        scales = scales if scales is None or not scales.ndim else rows(scales)
        return cls(rows(state[key]), scales, is_signed(key))

    def part(self, part: slice) -> "Moment":
        """The rows of a slice."""
        scales = self.scales if self.scales is None or not self.scales.ndim else self.scales[part]
        return Moment(self.codes[part], scales, self.is_signed)


class Code:
    """Storage type of moments, for tensors with a given last axis; this one is the parameter's own dtype.

    Args:
        width: length of the whole last axis.
    """

    name: StateDtype = "float32"
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = None, None
    """Dtypes of the codes of a signed moment, and of a non-negative one; None: the parameter's."""
    is_stochastic = False
    """Whether rounding uses random words."""
    block = 1
    """Elements along the last axis that are decoded together."""

    def __init__(self, width: int) -> None:
        self.width = width

    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """Scales of a zero moment; None: the type has no scales."""
        return None

    def read(self, moment: Moment, out: Tensor, space: Workspace) -> None:
        """Decode rows of a moment into `out`, (R, C) in FP32 or FP64."""
        out.copy_(moment.codes)

    def write(self, values: Tensor, moment: Moment, words: Tensor | None, space: Workspace) -> None:
        """Encode rows of a moment.

        Args:
            values: (R, C) FP32 or FP64, overwritten.
            moment: these rows; codes and scales are set. A scale of the whole tensor is an input.
            words: (R, C) int32 random words, overwritten. A signed moment uses their lower halves, a non-negative one
                their upper halves, so one word serves both. None: round to nearest.
        """
        moment.codes.copy_(values)

    def new(self, parameter: Tensor, key: str) -> State:
        """Zero moment by name, with the layout of a parameter."""
        dtype = self.dtypes[0] if is_signed(key) else self.dtypes[1]
        scales = self.new_scales(parameter)
        state = {key: torch.zeros_like(parameter, dtype=dtype)}
        return state if scales is None else {**state, f"{key}_scale": scales}


class Bfloat16(Code):
    """Moments in bfloat16: the upper half of FP32's bits. Non-finite values become NaN."""

    name = "bfloat16"
    dtypes = torch.bfloat16, torch.bfloat16
    is_stochastic = True

    def write(self, values: Tensor, moment: Moment, words: Tensor | None, space: Workspace) -> None:
        """Encode rows; see `Code.write`."""
        if words is None:
            moment.codes.copy_(values)
            return
        values = _in_fp32(values, space)
        rounded = space.table("rounded", values.shape, torch.int32)
        if not moment.is_signed:
            words.bitwise_right_shift_(16)
        # upper half of FP32's bits; a carry from the lower half gives the next number
        torch.add(values.view(torch.int32), words.bitwise_and_(0xFFFF), out=rounded)
        found = rounded.bitwise_and_(-0x10000).view(torch.float32)
        moment.codes.copy_(found.add_(values.mul_(0)))


class Float16Scaled(Code):
    """FP16 with one scale per tensor, as in fairseq's fp16-adam-stats.

    The scale is an upper bound of the whole tensor's largest value, divided by 65,504, and is equal on all ranks. It is
    updated like the moment itself (`next_scale`), so it is known before the moment is, and does not depend on the
    layout over ranks. Rounding is to nearest, except that non-negative moments are not rounded to zero, because the
    next step divides by them.
    """

    name = "fp16-scaled"
    dtypes = torch.float16, torch.float16
    largest = torch.finfo(torch.float16).max

    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """Scale of the tensor, a scalar."""
        return torch.zeros((), dtype=torch.float32, device=own_part(parameter).device)

    def read(self, moment: Moment, out: Tensor, space: Workspace) -> None:
        """Decode rows; see `Code.read`."""
        codes, scales, _ = moment
        assert scales is not None
        out.copy_(codes).mul_(scales)

    def write(self, values: Tensor, moment: Moment, words: Tensor | None, space: Workspace) -> None:
        """Encode rows; see `Code.write`."""
        codes, scales, signed = moment
        assert scales is not None
        values.div_(scales)
        codes.copy_(values if signed else values.clamp_min_(_LEAST_FP16))

    @staticmethod
    def next_scale(scales: Tensor, decay: float, largest: Tensor) -> None:
        """Update a scale in place for moment = decay moment + (1 - decay) x.

        Args:
            largest: largest |x| of the whole tensor.
        """
        part = (1 - decay) / Float16Scaled.largest
        scales.mul_(decay).add_(largest.to(scales), alpha=part).clamp_min_(_LEAST_NORMAL)


class Int8(Code):
    """8-bit codes in blocks along the last axis, each with its largest value in FP32.

    With the largest value a of a block, code q stands for a (q / 127)^4 with the sign of q, in non-negative moments for
    a (q / 255)^8. Steps are 3 % at a, and at a / 10,000 they are 31 % and 10 % of the value. Nonzero values of a
    non-negative moment are not rounded to zero, because the next step divides by them. A block with a non-finite value
    becomes NaN.
    """

    name = "int8"
    dtypes = torch.int8, torch.uint8
    is_stochastic = True

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.block = block_size(width)

    def num_blocks(self, width: int) -> int:
        """Number of blocks of `width` elements, the last one perhaps partial."""
        return -(-width // self.block)

    def new_scales(self, parameter: Tensor) -> Tensor | None:
        """Scales, one per block."""
        own = own_part(parameter)
        shape = (*own.shape[:-1], self.num_blocks(own.shape[-1]))
        part = torch.zeros(shape, dtype=torch.float32, device=own.device)
        return laid_out_as(parameter, part, last=self.num_blocks(self.width))

    def read(self, moment: Moment, out: Tensor, space: Workspace) -> None:
        """Decode rows; see `Code.read`."""
        codes, scales, _ = moment
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

    def write(self, values: Tensor, moment: Moment, words: Tensor | None, space: Workspace) -> None:
        """Encode rows; see `Code.write`."""
        codes, scales, signed = moment
        assert scales is not None
        powers, levels = (2, 127) if signed else (3, 255)
        is_even = values.shape[1] % self.block == 0 and values.dtype == torch.float32
        x = values.view(len(values), -1, self.block) if is_even else self._blocks(values, "value", space)
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
        # non-negative moments are not rounded to zero: the next step divides by them
        below = torch.copysign(below, x, out=below) if signed else below.clamp_min_(1)
        codes.copy_(below.view(len(codes), -1)[:, : codes.shape[1]])

    def _blocks(self, x: Tensor, name: str, space: Workspace) -> Tensor:
        """(R, C) of any dtype as (R, blocks, elements) in FP32, the last block padded with zeros."""
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


CODES: Mapping[StateDtype, type[Code]] = {code.name: code for code in (Code, Bfloat16, Int8, Float16Scaled)}
"""Our types; torchao's have an optimizer of their own."""


@cache
def _code(state_dtype: StateDtype, width: int) -> Code:
    return CODES[state_dtype](width)


def code_of(parameter: Tensor, state_dtype: StateDtype) -> Code:
    """Storage type of a parameter's moments among ours (`spec/moments.py` has the rule)."""
    own = own_part(parameter)
    is_wide = parameter.dtype in (torch.float32, torch.float64) and own.is_contiguous()
    if state_dtype not in CODES or not is_wide:
        return _code("float32", 1)
    if not is_compact(parameter.shape, own.shape, state_dtype):
        return _code("float32", 1)
    return _code(state_dtype, parameter.shape[-1])


def kept_as(parameter: Tensor, state_dtype: StateDtype) -> StateDtype:
    """Type in which a parameter's moments are stored, ours or torchao's, where `state_dtype` is requested."""
    if state_dtype in CODES:
        return code_of(parameter, state_dtype).name
    shape = parameter.shape
    is_theirs = parameter.is_contiguous() and is_compact(shape, shape, state_dtype)
    return state_dtype if is_theirs else "float32"


def rows(tensor: Tensor) -> Tensor:
    """Local shard as a table of its rows, sharing memory."""
    own = own_part(tensor)
    return own.view(-1, own.shape[-1]) if own.numel() else own.reshape(0, own.shape[-1])


def row_slices(table: Tensor) -> list[slice]:
    """Slices of rows that are processed at a time."""
    elements = ROWS_OF if table.device.type == "cpu" else _ROWS_OF_GPU
    count = max(elements // max(table.shape[1], 1), 1)
    return [slice(start, start + count) for start in range(0, len(table), count)]


def read_moment(
    code: Code,  # storage type
    state: State,  # optimizer state of the parameter
    key: str,  # name of the moment
    dtype: torch.dtype,  # FP32 or FP64
    space: Workspace,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """Decoded local shard of a moment, (R, C) in new memory.

    Args:
        scale: scale of the whole tensor to use instead of the state's, which is already the next step's.
    """
    moment = Moment.of(state, key)
    moment = moment if scale is None else moment._replace(scales=scale)
    found = torch.empty(moment.codes.shape, dtype=dtype, device=moment.codes.device)
    for part in row_slices(found):
        code.read(moment.part(part), found[part], space)
    return found


def write_moment(code: Code, state: State, key: str, values: Tensor, words: Words | None, space: Workspace) -> None:
    """Encode the local shard of a moment; `values` (R, C) stay as they are, for `words` see `Code.write`."""
    moment = Moment.of(state, key)
    for part in row_slices(moment.codes):
        some = space.table("given", values[part].shape, values.dtype).copy_(values[part])
        drawn = None if words is None else words.of(part, space)
        code.write(some, moment.part(part), drawn, space)


def is_signed(key: str) -> bool:
    """Whether a moment may be negative, by its name."""
    return not key.endswith("_sq")
