"""Weights of a layer's experts, shared by operators, storage, loaders and adapters.

`ExpertWeights` holds slices along F in their stored format; a `WeightFormat` describes that format. Backends take one
slice at a time, an `ExpertSlice`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.cpu.products import selected

Shape = tuple[int, ...]
Kept = tuple[Shape, torch.dtype]
"""Shape and dtype of a tensor of a format."""

Weights = Tensor | Sequence[Tensor]
"""Tensor, or its slices along F, as `ExpertWeights.of` takes them."""


TENSORS = ("w_in", "w_in_scale", "w_out", "w_out_scale", "b_in", "b_out")
"""Names of the tensors of a layer's experts, in any format."""


class WeightFormat:
    """Storage format of the experts' matrices. This class is "dense", matrices as they are multiplied; other formats
    override all methods.

    Attributes:
        name: name of the format that `pack` makes.
        backends: names of the backends, in `expertmesh.ops.experts.backends.BACKENDS`, that read matrices of this
            format. "torch" reads every format by `unpack`.
    """

    name: str = "dense"
    backends: tuple[str, ...] = (
        "native",
        "adapters",
        "reference",
        "triton",
        "torch",
    )

    def columns(self, group_size: int) -> int:
        """Number whose multiples the columns of a matrix must be."""
        return 1

    def kept(self, shape: Shape, dtype: torch.dtype, group_size: int = 64) -> dict[str, Kept]:
        """Shapes and dtypes of the tensors that hold matrices (..., N, K), by the endings of their names.

        `dtype` is the type of the products and of the scales, `group_size` the columns per scale in a format of groups.
        """
        return {"": (shape, dtype)}

    def pack(self, w: Tensor, dtype: torch.dtype, group_size: int = 64) -> dict[str, Tensor]:
        """Values of the tensors of `kept` for a stack of matrices; a format of weights that are only read has none."""
        return {"": w.to(dtype)}

    def num_bytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """Bytes of both matrices of experts of shape (E, G, F, D), for products in a dtype; scales included."""
        E, _, F, D = shape
        kept = [*self.kept(shape, dtype).values(), *self.kept((E, D, F), dtype).values()]
        return sum(prod(size) * of.itemsize for size, of in kept)

    def shape(self, experts: "ExpertSlice") -> tuple[int, int, int, int]:
        """Shape (E, G, F, D) of a slice's matrices once unpacked."""
        E, G, F, D = experts.w_in_EGFD.shape
        return E, G, F, D

    def unit(self, experts: "ExpertSlice") -> int:
        """Divisor of a slice's size along F: the number of values that share a scale."""
        return 1

    def unpack(self, experts: "ExpertSlice", e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Unpack the matrices of one expert for its products, (G * F, D) and (D, F)."""
        return experts.w_in_EGFD[e].flatten(0, 1).to(dtype), experts.w_out_EDF[e].to(dtype)

    def unpack_in(self, experts: "ExpertSlice", e: int, dtype: torch.dtype) -> Tensor:
        """Unpack the first matrix only."""
        return self.unpack(experts, e, dtype)[0]

    def unpack_out(self, experts: "ExpertSlice", e: int, dtype: torch.dtype) -> Tensor:
        """Unpack the second matrix only."""
        return self.unpack(experts, e, dtype)[1]


FORMATS: dict[str, WeightFormat] = {"dense": WeightFormat()}
"""Formats by name; `quantized_formats.py` adds the 8-bit and 4-bit ones. Add a new format here."""


@dataclass(frozen=True)
class ExpertSlice:
    """Slice along F of all experts, as a backend takes it; gradients use the same class."""

    w_in_EGFD: Tensor  # first weights, in their stored format
    w_out_EDF: Tensor  # second weights, in their stored format
    b_in_EGF: Tensor | None  # first biases, or None
    b_out_ED: Tensor | None  # second biases; None without biases and in all slices but the first
    activation: str  # the name of the activation
    format: str = "dense"  # name of the weights' format in `FORMATS`
    scales_in: Tensor | None = None  # scales of w_in; None in a format without scales
    scales_out: Tensor | None = None  # scales of w_out, or None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (E, G, F, D) of the unpacked matrices."""
        return FORMATS[self.format].shape(self)

    def w_in(self, e: int, dtype: torch.dtype, rounding: torch.dtype | None = None) -> Tensor:
        """First weight of one expert as (G * F, D); quantised numbers are rounded to the dtype `rounding` first, if it
        is given."""
        if self.format != "dense":
            return FORMATS[self.format].unpack_in(self, e, rounding or dtype).to(dtype)
        w = self.w_in_EGFD[e].flatten(0, 1)
        return w if w.dtype == dtype else w.to(dtype)

    def w_out(self, e: int, dtype: torch.dtype, rounding: torch.dtype | None = None) -> Tensor:
        """Second weight of one expert, (D, F), like `w_in`."""
        if self.format != "dense":
            return FORMATS[self.format].unpack_out(self, e, rounding or dtype).to(dtype)
        w = self.w_out_EDF[e]
        return w if w.dtype == dtype else w.to(dtype)

    def w_ins(self, experts: Sequence[int], dtype: torch.dtype, rounding: torch.dtype) -> Iterator[Tensor]:
        """First weights of some experts, with few calls; copies, if needed, are made one at a time."""
        is_direct = self.format == "dense" and self.w_in_EGFD.dtype == dtype
        if not is_direct or not self.w_in_EGFD.is_contiguous():
            return (self.w_in(e, dtype, rounding) for e in experts)
        return selected(self.w_in_EGFD.flatten(1, 2), experts)

    def w_outs(self, experts: Sequence[int], dtype: torch.dtype, rounding: torch.dtype) -> Iterator[Tensor]:
        """Second weights of some experts, like `w_ins`."""
        if self.format != "dense" or self.w_out_EDF.dtype != dtype:
            return (self.w_out(e, dtype, rounding) for e in experts)
        return selected(self.w_out_EDF, experts)

    @property
    def are_narrow(self) -> bool:
        """Whether a weight is so small that the CPU library's code generation for a new shape costs more than its
        products."""
        _, G, F, D = self.shape
        return G * F * D <= 1 << 16

    def unpacked(self, dtype: torch.dtype) -> "ExpertSlice":
        """Copy of the slice with all matrices unpacked; the slice itself if it is dense."""
        if self.format == "dense":
            return self
        E, G, _, _ = self.shape
        pairs = [FORMATS[self.format].unpack(self, e, dtype) for e in range(E)]
        w_in, w_out = (torch.stack(matrices) for matrices in zip(*pairs, strict=True))
        w_in = w_in.unflatten(1, (G, -1))
        return ExpertSlice(w_in, w_out, self.b_in_EGF, self.b_out_ED, self.activation)


@dataclass(frozen=True)
class ExpertWeights:
    """Weights and biases of all experts of a layer, and their activation.

    Attributes:
        w_in: first weights, (E, G, F_i, D) for each slice if dense; G = 2 (gate, up) for gated activations.
        w_out: second weights, (E, D, F_i) for each slice if dense.
        activation: the name of the activation.
        b_in: first biases, (E, G, F_i) for each slice; empty without biases.
        b_out: second biases (E, D), or None.
        format: name of the weights' format in `FORMATS`.
        scales_in: scales of each slice of w_in; empty in a format without scales.
        scales_out: scales of each slice of w_out.
        slot_of_expert_E: (E,) integer index of each expert in the first dimension of the weights; None: expert e is at
            index e.
    """

    w_in: tuple[Tensor, ...]
    w_out: tuple[Tensor, ...]
    activation: str
    b_in: tuple[Tensor, ...] = ()
    b_out: Tensor | None = None
    format: str = "dense"
    scales_in: tuple[Tensor, ...] = ()
    scales_out: tuple[Tensor, ...] = ()
    slot_of_expert_E: Tensor | None = None

    @staticmethod
    def of(
        w_in: Weights,
        w_out: Weights,
        activation: str,
        *,
        b_in: Weights | None = None,
        b_out: Weights | None = None,
    ) -> "ExpertWeights":
        """Make dense weights from tensors or their slices.

        Raises:
            ConfigError: some are tensors and some are slices, or there is no slice.
        """
        sliced = not isinstance(w_in, Tensor)
        return ExpertWeights(
            _slices("w_in", w_in, sliced),
            _slices("w_out", w_out, sliced),
            activation,
            () if b_in is None else _slices("b_in", b_in, sliced),
            b_out if b_out is None or isinstance(b_out, Tensor) else b_out[0],
        )

    @staticmethod
    def of_names(
        slices: Mapping[str, Sequence[Tensor]],
        activation: str,
        format: str = "dense",
        slot_of_expert_E: Tensor | None = None,
    ) -> "ExpertWeights":
        """Make weights from the slices of each tensor, by the names in `TENSORS`."""
        w_in, scales_in, w_out, scales_out, b_in, b_out = (tuple(slices.get(n, ())) for n in TENSORS)
        first = b_out[0] if b_out else None
        return ExpertWeights(w_in, w_out, activation, b_in, first, format, scales_in, scales_out, slot_of_expert_E)

    @property
    def num_slots(self) -> int:
        """Number of experts in the weight tensors."""
        return self.w_in[0].shape[0]

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        if self.slot_of_expert_E is None:
            return self.num_slots
        return self.slot_of_expert_E.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether each weight is one tensor."""
        return len(self.w_in) == 1

    @property
    def parameters(self) -> list[Tensor]:
        """Weights and biases in the order of gradients: w_in of all slices, w_out of all, b_in of all, b_out."""
        b_out = () if self.b_out is None else (self.b_out,)
        return [*self.w_in, *self.w_out, *self.b_in, *b_out]

    def with_parameters(self, tensors: Sequence[Tensor]) -> "ExpertWeights":
        """Copy with other tensors in place of `parameters`."""
        n, after = len(self.w_in), 2 * len(self.w_in) + len(self.b_in)
        b_out = tensors[after] if len(tensors) > after else None
        return replace(
            self,
            w_in=tuple(tensors[:n]),
            w_out=tuple(tensors[n : 2 * n]),
            b_in=tuple(tensors[2 * n : after]),
            b_out=b_out,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, biases and scales."""
        scales = (*self.scales_in, *self.scales_out)
        return sum(tensor.nbytes for tensor in (*self.parameters, *scales))

    def slots_of(self, expert_ids_TK: Tensor) -> Tensor:
        """Map expert ids (T, K) to indices into the weight tensors; "no expert" becomes `num_slots`."""
        if self.slot_of_expert_E is None:
            return expert_ids_TK
        ids_TK = expert_ids_TK.to(torch.int64)
        no_expert = self.slot_of_expert_E.new_full((1,), self.num_slots)
        return torch.cat((self.slot_of_expert_E, no_expert))[ids_TK]

    def by_slot(self) -> "ExpertWeights":
        """Weights of all slots, for ids returned by `slots_of`."""
        return replace(self, slot_of_expert_E=None)

    def in_order(self) -> "ExpertWeights":
        """Weights with expert e at index e; copied if `slot_of_expert_E` is set."""
        slots = self.slot_of_expert_E
        if slots is None:
            return self

        def taken(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(tensor.index_select(0, slots) for tensor in tensors)

        return replace(
            self,
            w_in=taken(self.w_in),
            w_out=taken(self.w_out),
            b_in=taken(self.b_in),
            b_out=None if self.b_out is None else self.b_out.index_select(0, slots),
            scales_in=taken(self.scales_in),
            scales_out=taken(self.scales_out),
            slot_of_expert_E=None,
        )

    def to(self, dtype: torch.dtype) -> "ExpertWeights":
        """Cast to another dtype, differentiably; quantised matrices keep their format."""

        def cast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple([tensor.to(dtype) for tensor in tensors])

        b_out = None if self.b_out is None else self.b_out.to(dtype)
        if self.format != "dense":
            return replace(self, b_in=cast(self.b_in), b_out=b_out)
        return ExpertWeights(
            cast(self.w_in),
            cast(self.w_out),
            self.activation,
            cast(self.b_in),
            b_out,
            slot_of_expert_E=self.slot_of_expert_E,
        )

    def slices(self) -> list[ExpertSlice]:
        """Slices of the weights, one `ExpertSlice` each; only the first has b_out."""
        n = len(self.w_in)
        nothing: list[Tensor | None] = [None] * n
        columns = (
            self.w_in,
            self.w_out,
            self.b_in or nothing,
            [self.b_out, *nothing][:n],
            self.scales_in or nothing,
            self.scales_out or nothing,
        )
        return [
            ExpertSlice(w_in, w_out, b_in, b_out, self.activation, self.format, *scales)
            for w_in, w_out, b_in, b_out, *scales in zip(*columns, strict=True)
        ]

    def joined(self, dtype: torch.dtype) -> ExpertSlice:
        """Concatenate all slices to one dense slice; a single dense slice is not copied. `dtype` applies to quantised
        formats."""
        slices = [one.unpacked(dtype) for one in self.slices()]
        if len(slices) == 1:
            return slices[0]
        biases = [one.b_in_EGF for one in slices if one.b_in_EGF is not None]
        return ExpertSlice(
            torch.cat([one.w_in_EGFD for one in slices], 2),
            torch.cat([one.w_out_EDF for one in slices], 2),
            torch.cat(biases, 2) if biases else None,
            self.b_out,
            self.activation,
        )


def _slices(name: str, given: Weights, sliced: bool) -> tuple[Tensor, ...]:
    if isinstance(given, Tensor) == sliced:
        raise ConfigError(
            f"{name} is {'a tensor' if sliced else 'a list'} and w_in {'a list' if sliced else 'a tensor'}; both must "
            "be tensors or lists of slices; slice both alike"
        )
    if not isinstance(given, Tensor) and not given:
        raise ConfigError(f"{name} has no slices; there must be at least one; give the whole tensor")
    return (given,) if isinstance(given, Tensor) else tuple(given)


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of the experts' weights, or the buffers that accumulate them (main gradients).

    Attributes:
        w_in: (E, G, F, D), or a tuple of slices like the weights; None: not needed.
        w_out: (E, D, F), or a tuple of slices; None: not needed.
        b_in: (E, G, F), or a tuple of slices; None: no bias, or not needed.
        b_out: (E, D); None: no bias, or not needed.

    Example:
        >>> w_in_EGFD, w_out_EDF = torch.randn(4, 2, 16, 8, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
        >>> buffers = WeightGradients(torch.zeros(4, 2, 16, 8), torch.zeros(4, 8, 16))
        >>> maps, weights_TK = route_metadata(torch.randint(0, 4, (5, 2)), 4), torch.ones(5, 2)
        >>> y_TD = moe_mlp(torch.randn(5, 8), w_in_EGFD, w_out_EDF, weights_TK, maps, activation="swiglu", main_grads=buffers)
        >>> y_TD.sum().backward()
        >>> w_in_EGFD.grad is None, bool(buffers.w_in.any())
        (True, True)
    """  # noqa: E501

    w_in: Tensor | tuple[Tensor, ...] | None
    w_out: Tensor | tuple[Tensor, ...] | None
    b_in: Tensor | tuple[Tensor, ...] | None = None
    b_out: Tensor | None = None

    @staticmethod
    def of_names(slices: Mapping[str, Sequence[Tensor]]) -> "WeightGradients":
        """Make gradients from the slices of each parameter, by the names w_in, w_out, b_in, b_out."""
        given = {name: tuple(found) for name, found in slices.items()}
        b_out = given.get("b_out")
        first = None if b_out is None else b_out[0]
        return WeightGradients(given["w_in"], given["w_out"], given.get("b_in"), first)

    def by_name(self) -> dict[str, tuple[Tensor, ...]]:
        """Slices of each gradient by name."""
        found: dict[str, tuple[Tensor, ...]] = {}
        for name in ("w_in", "w_out", "b_in", "b_out"):
            given = getattr(self, name)
            found[name] = () if given is None else (given,) if isinstance(given, Tensor) else tuple(given)
        return found


@dataclass(frozen=True)
class Needs:
    """Gradients that a backward must compute."""

    x: bool
    w_in: bool
    w_out: bool
    weights: bool
    b_in: bool
    b_out: bool


@dataclass(frozen=True)
class HiddenGradients:
    """Hidden rows that `data_grads` passes to `weight_grads`; their layout depends on the backend."""

    a_RF: Tensor | None  # s * act(H); None if no gradient of w_out is needed
    d_h_RH: Tensor | None  # gradient of H; None if no gradient before H is needed
