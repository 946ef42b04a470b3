"""The weights of a layer's experts, as operators, storage, loaders and adapters speak of them.

`ExpertWeights` holds slices along F in the form in which they are stored; a `WeightFormat` says what that form is. The backends
take one slice at a time, an `ExpertSlice`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.cpu.products import selected

Weights = Tensor | Sequence[Tensor]
"""A tensor, or its slices along F: how callers may give what `ExpertWeights.of` takes."""


class WeightFormat:
    """How the matrices of experts are stored: here as they are multiplied, which is "dense". Other formats override all of it.

    Attributes:
        backends: names in `expertmesh.ops.experts.backends.BACKENDS` of those that read matrices of this format where they lie.
            "torch" takes every format, by `unpack`.
    """

    backends: tuple[str, ...] = (
        "few_rows",
        "adapters",
        "reference",
        "invariant_triton",
        "invariant",
        "triton",
        "torch",
    )

    def num_bytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """Bytes of both matrices of experts of a shape (E, G, F, D), for products in a type; scales included."""
        _, G, _, _ = shape
        return prod(shape) * (G + 1) // G * dtype.itemsize

    def shape(self, experts: "ExpertSlice") -> tuple[int, int, int, int]:
        """(E, G, F, D) of the matrices that a slice stands for."""
        E, G, F, D = experts.w_in_EGFD.shape
        return E, G, F, D

    def unpack(self, experts: "ExpertSlice", e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The matrices of one expert as they are multiplied, (G * F, D) and (D, F)."""
        return experts.w_in_EGFD[e].flatten(0, 1).to(dtype), experts.w_out_EDF[e].to(dtype)

    def unpack_in(self, experts: "ExpertSlice", e: int, dtype: torch.dtype) -> Tensor:
        """The first matrix of `unpack` alone."""
        return self.unpack(experts, e, dtype)[0]

    def unpack_out(self, experts: "ExpertSlice", e: int, dtype: torch.dtype) -> Tensor:
        """The second."""
        return self.unpack(experts, e, dtype)[1]


FORMATS: dict[str, WeightFormat] = {"dense": WeightFormat()}
"""All formats by name; `quantized_formats.py` adds those of 8 and 4 bits. A new one is added here."""


@dataclass(frozen=True)
class ExpertSlice:
    """One slice of all experts, as a backend takes it; gradients have the same form.

    Attributes:
        w_in_EGFD: first weights, in the form of the format.
        w_out_EDF: second weights, likewise.
        b_in_EGF: first biases, or None.
        b_out_ED: second biases, or None; those of the first slice stand for all.
        activation: the name of the activation.
        format: name of how the weights are stored, in `FORMATS`.
        scales_in: of w_in, as the format has them; None where it has none.
        scales_out: of w_out.
    """

    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    b_in_EGF: Tensor | None
    b_out_ED: Tensor | None
    activation: str
    format: str = "dense"
    scales_in: Tensor | None = None
    scales_out: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(E, G, F, D)."""
        return FORMATS[self.format].shape(self)

    def w_in(self, e: int, dtype: torch.dtype) -> Tensor:
        """First weight of one expert as (G * F, D)."""
        if self.format != "dense":
            return FORMATS[self.format].unpack_in(self, e, dtype)
        w = self.w_in_EGFD[e].flatten(0, 1)
        return w if w.dtype == dtype else w.to(dtype)

    def w_out(self, e: int, dtype: torch.dtype) -> Tensor:
        """Second weight of one expert, (D, F)."""
        if self.format != "dense":
            return FORMATS[self.format].unpack_out(self, e, dtype)
        w = self.w_out_EDF[e]
        return w if w.dtype == dtype else w.to(dtype)

    def w_ins(self, experts: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """First weights of some experts, with as few calls as can be, and copies (if any) one at a time."""
        is_direct = self.format == "dense" and self.w_in_EGFD.dtype == dtype
        if not is_direct or not self.w_in_EGFD.is_contiguous():
            return (self.w_in(e, dtype) for e in experts)
        return selected(self.w_in_EGFD.flatten(1, 2), experts)

    def w_outs(self, experts: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """Second weights of some experts, as `w_ins`."""
        if self.format != "dense" or self.w_out_EDF.dtype != dtype:
            return (self.w_out(e, dtype) for e in experts)
        return selected(self.w_out_EDF, experts)

    @property
    def are_narrow(self) -> bool:
        """Whether a weight is so small that the CPU library's code for a new shape costs more than its products."""
        _, G, F, D = self.shape
        return G * F * D <= 1 << 16

    def unpacked(self, dtype: torch.dtype) -> "ExpertSlice":
        """The same with dense matrices, all at once."""
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
        w_in: first weights, of every slice (E, G, F_i, D) where they are dense; G = 2 (gate, up) for gated activations.
        w_out: second weights, of every slice (E, D, F_i).
        activation: the name of the activation.
        b_in: first biases, of every slice (E, G, F_i); empty without them.
        b_out: second biases (E, D), or None.
        format: name of how weights are stored, in `FORMATS`.
        scales_in: of every slice of w_in, as the format has them; empty where it has none.
        scales_out: of every slice of w_out.
        slot_of_expert_E: (E,) integers, where in the first dimension of the weights an expert lies; None: the e-th at e.
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
        """Dense weights, from tensors or their slices.

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
    def of_names(slices: Mapping[str, Sequence[Tensor]], activation: str) -> "ExpertWeights":
        """Dense weights from the slices of each parameter, by the names w_in, w_out, b_in, b_out."""
        b_in, b_out = tuple(slices.get("b_in", ())), slices.get("b_out")
        first = None if b_out is None else b_out[0]
        return ExpertWeights(tuple(slices["w_in"]), tuple(slices["w_out"]), activation, b_in, first)

    @property
    def num_slots(self) -> int:
        """Experts that there are weights of."""
        return self.w_in[0].shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        if self.slot_of_expert_E is None:
            return self.num_slots
        return self.slot_of_expert_E.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether each weight is one tensor."""
        return len(self.w_in) == 1

    @property
    def parameters(self) -> list[Tensor]:
        """Weights and biases: w_in of all slices, w_out of all, b_in of all, b_out. Gradients have this order."""
        b_out = () if self.b_out is None else (self.b_out,)
        return [*self.w_in, *self.w_out, *self.b_in, *b_out]

    def with_parameters(self, tensors: Sequence[Tensor]) -> "ExpertWeights":
        """The same with other tensors in the places of `parameters`."""
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
        """Bytes of all that is stored."""
        scales = (*self.scales_in, *self.scales_out)
        return sum(tensor.nbytes for tensor in (*self.parameters, *scales))

    def slots_of(self, expert_ids_TK: Tensor) -> Tensor:
        """The slots of experts (T, K), `num_slots` for "no expert"."""
        if self.slot_of_expert_E is None:
            return expert_ids_TK
        ids_TK = expert_ids_TK.to(torch.int64)
        no_expert = self.slot_of_expert_E.new_full((1,), self.num_slots)
        return torch.cat((self.slot_of_expert_E, no_expert))[ids_TK]

    def by_slot(self) -> "ExpertWeights":
        """The weights of all slots, for ids that `slots_of` gave."""
        return replace(self, slot_of_expert_E=None)

    def in_order(self) -> "ExpertWeights":
        """The same with the e-th expert at e, by a copy where it lies elsewhere."""
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
        """The same in another type, differentiably; what is not dense stays as it is stored."""

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
        """Slice by slice; only the first has b_out."""
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
        """All slices as one of dense matrices, by a copy where there are several; `dtype` counts for other formats."""
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
            f"{name} is {'a tensor' if sliced else 'a list'} and w_in {'a list' if sliced else 'a tensor'}; both must be "
            "tensors or lists of slices; slice both alike"
        )
    if not isinstance(given, Tensor) and not given:
        raise ConfigError(
            f"{name} has no slices; there must be at least one; give the whole tensor"
        )
    return (given,) if isinstance(given, Tensor) else tuple(given)


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of the experts' weights, or buffers that they are added to (main gradients).

    Attributes:
        w_in: (E, G, F, D), or a tuple of slices as the weights were given; None: not wanted.
        w_out: (E, D, F), or a tuple of slices; None: not wanted.
        b_in: (E, G, F), or a tuple of slices; None: no bias, or not wanted.
        b_out: (E, D); None: no bias, or not wanted.

    Example:
        >>> w_in_EGFD, w_out_EDF = torch.randn(4, 2, 16, 8, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
        >>> buffers = WeightGradients(torch.zeros(4, 2, 16, 8), torch.zeros(4, 8, 16))
        >>> maps, weights_TK = route_metadata(torch.randint(0, 4, (5, 2)), 4), torch.ones(5, 2)
        >>> y_TD = moe_mlp(torch.randn(5, 8), w_in_EGFD, w_out_EDF, weights_TK, maps, activation="swiglu", main_grads=buffers)
        >>> y_TD.sum().backward()
        >>> w_in_EGFD.grad is None, bool(buffers.w_in.any())
        (True, True)
    """

    w_in: Tensor | tuple[Tensor, ...] | None
    w_out: Tensor | tuple[Tensor, ...] | None
    b_in: Tensor | tuple[Tensor, ...] | None = None
    b_out: Tensor | None = None

    @staticmethod
    def of_names(slices: Mapping[str, Sequence[Tensor]]) -> "WeightGradients":
        """From the slices of each parameter, by the names w_in, w_out, b_in, b_out."""
        given = {name: tuple(found) for name, found in slices.items()}
        b_out = given.get("b_out")
        first = None if b_out is None else b_out[0]
        return WeightGradients(given["w_in"], given["w_out"], given.get("b_in"), first)

    def by_name(self) -> dict[str, tuple[Tensor, ...]]:
        """The slices of each."""
        found: dict[str, tuple[Tensor, ...]] = {}
        for name in ("w_in", "w_out", "b_in", "b_out"):
            given = getattr(self, name)
            found[name] = (
                () if given is None else (given,) if isinstance(given, Tensor) else tuple(given)
            )
        return found


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    w_in: bool
    w_out: bool
    weights: bool
    b_in: bool
    b_out: bool


@dataclass(frozen=True)
class HiddenGradients:
    """What `weight_grads` needs of `data_grads`; its layout is the backend's own.

    Attributes:
        a_RF: s * act(H), or None where no gradient of w_out is wanted.
        d_h_RH: gradient of H, or None where nothing before H has a gradient.
    """

    a_RF: Tensor | None
    d_h_RH: Tensor | None
