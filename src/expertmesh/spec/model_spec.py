"""Specification of a model's parameters, written once per family, without torch.

A family's `spec.py` lists every parameter in the order of the model. Costs count them. The optimizer and the initial
weights read their roles, tensor parallelism reads their cut, expert parallelism their axes, and checkpoints of the hub
their hub names.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from expertmesh.spec.resting import Resting

Role = Literal["embedding", "positions", "head", "router", "gate", "matrix", "norm", "bias", "scale"]
"""Kind of a parameter. embedding: rows that are looked up; positions: added or multiplied by position; head: projection
of the model's inputs or outputs; router: scores of experts; gate: mixing weights of parallel blocks; matrix: product
inside the model; norm: weight of a norm; bias; scale: a learned factor."""

LearnedAs = Literal["table", "edge", "matrix", "vector"]
"""Optimizer group. table, vector: AdamW without decay; edge: AdamW with decay; matrix: Muon where it is used, with
decay."""

LEARNED_AS: Mapping[Role, LearnedAs] = {
    "embedding": "table",
    "positions": "table",
    "head": "edge",
    "router": "edge",
    "gate": "edge",
    "matrix": "matrix",
    "norm": "vector",
    "bias": "vector",
    "scale": "vector",
}

_FIRST: Mapping[Role, float] = {"norm": 1.0, "bias": 0.0}


@dataclass(frozen=True)
class Parameter:
    """Specification of one parameter.

    Attributes:
        hub: names of the tensors that it is made of in checkpoints of the hub: queries, keys and values along heads,
            one per branch along branches; `{expert}` stands for an expert's number. Empty: the hub has none.
    """

    name: str  # name in the model
    shape: tuple[int, ...]  # sizes of its axes
    # names of its axes: vocab, model (D), heads (rows of all heads), hidden (F), branch (G), expert (E), ...
    axes: tuple[str, ...]
    role: Role  # see `Role`
    part: str  # part of the model that it is counted in, such as `attention` or `experts`; each family names its own
    layer: int | None = None  # index of its layer in the model; None: it is outside the layers
    # axis of `axes` along which tensor parallelism cuts it, if the sizes divide evenly; None: every rank has it whole
    cut: str | None = None
    # whether its product is added to the residual stream; such matrices have smaller initial values
    is_output: bool = False
    # initial value of all its elements; None: 1 for norms, 0 for biases, drawn at random for all others
    begins: float | None = None
    hub: tuple[str, ...] = ()
    rests: Resting | None = None  # how it is kept where it does not learn; None: it learns, in FP32

    @property
    def first_value(self) -> float | None:
        """Initial value of all its elements; None: they are drawn at random."""
        return _FIRST.get(self.role) if self.begins is None else self.begins

    @property
    def num_elements(self) -> int:
        """Number of elements, the product of the sizes."""
        return math.prod(self.shape)

    @property
    def learned_as(self) -> LearnedAs:
        """Optimizer group; a tied head is an embedding."""
        return LEARNED_AS[self.role]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix that Muon may update."""
        return self.learned_as == "matrix"

    @property
    def expert_axis(self) -> int | None:
        """Index of the axis over routed experts; None: it belongs to no routed experts."""
        return self.axes.index("expert") if self.part == "experts" else None

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts."""
        return self.expert_axis is not None

    @property
    def tensor_axis(self) -> int | None:
        """Index of the axis that tensor parallelism cuts; None: none."""
        return None if self.cut is None else self.axes.index(self.cut)

    def inside(self, prefix: str, hub_prefix: str = "", *, layer: int | None = None) -> "Parameter":
        """Copy of the parameter, placed inside a module."""
        hub = tuple(hub_prefix + name for name in self.hub)
        return replace(self, name=prefix + self.name, hub=hub, layer=layer)


def parameter(
    name: str,
    role: Role,
    part: str,
    *,
    cut: str | None = None,
    is_output: bool = False,
    begins: float | None = None,
    hub: str | tuple[str, ...] = (),
    **sizes: int,
) -> Parameter:
    """A parameter with its axes as keywords in their order.

    Args:
        name: name in its module.
        role: see `Parameter`.
        part: see `Parameter`.
        cut: see `Parameter`.
        is_output: see `Parameter`.
        begins: see `Parameter`.
        hub: see `Parameter`; a string stands for a tuple of one name.
        **sizes: size of each axis by its name.

    Example:
        >>> from expertmesh.spec.model_spec import parameter
        >>> parameter("out.weight", "matrix", "attention", model=64, heads=48, cut="heads").tensor_axis
        1
    """
    names = (hub,) if isinstance(hub, str) else hub
    shape, axes = tuple(sizes.values()), tuple(sizes)
    return Parameter(name, shape, axes, role, part, cut=cut, is_output=is_output, begins=begins, hub=names)


@dataclass(frozen=True)
class ModelSpec:
    """Parameters of a model, from its configuration alone.

    Attributes:
        parameters: all parameters, in the order of the model.
        experts_per_token: K, routed experts that a token uses; in a layer with fewer experts, all of them.

    Example:
        >>> from expertmesh.models.gpt.spec import gpt_spec
        >>> spec = gpt_spec(em.recipe("gpt-moe-test").model)
        >>> spec.num_parameters, spec.by_name["embedding.weight"].axes
        (135872, ('vocab', 'model'))
    """

    parameters: tuple[Parameter, ...]
    experts_per_token: int = 0

    def __iter__(self) -> Iterator[Parameter]:
        """The parameters."""
        return iter(self.parameters)

    @cached_property
    def by_name(self) -> Mapping[str, Parameter]:
        """The parameters by name."""
        return {one.name: one for one in self.parameters}

    @cached_property
    def layers(self) -> Mapping[int | None, tuple[Parameter, ...]]:
        """The parameters by index of their layer; None: parameters outside the layers."""
        found: dict[int | None, list[Parameter]] = {None: []}
        for one in self.parameters:
            found.setdefault(one.layer, []).append(one)
        return {layer: tuple(ones) for layer, ones in found.items()}

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return num_elements(self.parameters)

    @cached_property
    def num_active(self) -> int:
        """Elements that one token uses, the embedding included."""
        return self.num_parameters - self.num_inactive

    @cached_property
    def num_inactive(self) -> int:
        """Elements of the routed experts that one token does not use."""
        found = 0
        for one in self.parameters:
            if one.expert_axis is not None:
                experts = one.shape[one.expert_axis]
                unused = max(experts - self.experts_per_token, 0)
                found += one.num_elements // experts * unused
        return found

    @cached_property
    def num_experts(self) -> tuple[int, ...]:
        """Number of routed experts of each layer that has some, in layer order."""
        found = {one.layer: one.shape[one.expert_axis] for one in self if one.expert_axis is not None}
        return tuple(found.values())

    @cached_property
    def alike(self) -> tuple[tuple[Parameter, int], ...]:
        """(parameter, number) of parameters that differ in name and layer alone."""
        return tuple(Counter(replace(one, name="", layer=None, hub=()) for one in self.parameters).items())

    @cached_property
    def _hash(self) -> int:
        return hash((self.parameters, self.experts_per_token))

    def __hash__(self) -> int:
        """Computed once: costs keep what they know of a model by its specification."""
        return self._hash

    def count(self, *parts: str) -> int:
        """Elements of some parts of the model.

        Args:
            *parts: see `Parameter.part`.
        """
        return num_elements(one for one in self.parameters if one.part in parts)


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Elements of some parameters."""
    return sum(one.num_elements for one in parameters)
