"""The parameters of a model, written once per family and read by all who need to know them, without torch.

A family's `spec.py` lists every parameter in the order of the model. Costs count them, the optimiser and the initial weights go
by their roles, tensor parallelism by their cut, experts by their axes, files of the hub by their names there.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Role = Literal[
    "embedding", "positions", "head", "router", "gate", "matrix", "norm", "bias", "scale"
]
"""What a parameter is. embedding: rows that are looked up; positions: what is added or scaled with by place; head: from or to
what is outside the model; router: scores of experts; gate: weights of parts; matrix: a product inside; norm: its weight; bias;
scale: a factor that is learned."""

LearnedAs = Literal["table", "edge", "matrix", "vector"]
"""What an optimiser does: table, vector: AdamW without decay; edge: AdamW with decay; matrix: Muon where there is one, decayed."""

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
    """One parameter of a model.

    Attributes:
        name: in the model.
        shape: its sizes.
        axes: what each of them counts: vocab, model (D), heads (rows of all heads), hidden (F), branch (G), expert (E), ...
        role: what it is.
        part: of the model that it counts as, `attention` or `experts`; the word is the family's.
        layer: number of its layer in the model; None: it is outside the layers.
        cut: axis of `axes` along which tensor parallelism cuts it, even sizes permitting; None: every rank has it whole.
        is_output: whether its product is added to the residual stream; such matrices begin smaller.
        begins: the value that all its elements begin with; None: 1 of norms, 0 of biases, drawn of all others.
        hub: names of what it is made of in the hub's files: along heads queries, keys and values, along branches one each;
            `{expert}` stands for an expert's number. Empty: the hub has none.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: Role
    part: str
    layer: int | None = None
    cut: str | None = None
    is_output: bool = False
    begins: float | None = None
    hub: tuple[str, ...] = ()

    @property
    def first_value(self) -> float | None:
        """What all its elements begin with; None: they are drawn."""
        return _FIRST.get(self.role) if self.begins is None else self.begins

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        return math.prod(self.shape)

    @property
    def learned_as(self) -> LearnedAs:
        """What an optimiser does with it; a tied head is an embedding."""
        return LEARNED_AS[self.role]

    @property
    def is_matrix(self) -> bool:
        """Whether Muon is for it."""
        return self.learned_as == "matrix"

    @property
    def expert_axis(self) -> int | None:
        """Which axis is one of routed experts, each of which has its own part; None: none is."""
        return self.axes.index("expert") if self.part == "experts" else None

    @property
    def is_expert(self) -> bool:
        """Whether it is one of routed experts."""
        return self.expert_axis is not None

    @property
    def tensor_axis(self) -> int | None:
        """Number of the axis that tensor parallelism cuts."""
        return None if self.cut is None else self.axes.index(self.cut)

    def inside(self, ours: str, theirs: str = "", *, layer: int | None = None) -> "Parameter":
        """The same parameter inside a module.

        Args:
            ours: what its name begins with then, `layers.3.`.
            theirs: the same of its names in the hub's files.
            layer: its layer then.
        """
        hub = tuple(theirs + name for name in self.hub)
        return replace(self, name=ours + self.name, hub=hub, layer=layer)


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
        name: in its module.
        role: see `Parameter`.
        part: see `Parameter`.
        cut: see `Parameter`.
        is_output: see `Parameter`.
        begins: see `Parameter`.
        hub: see `Parameter`; one name stands for a tuple of it.
        **sizes: of each axis by its name.

    Example:
        >>> from expertmesh.layout.spec import parameter
        >>> parameter("out.weight", "matrix", "attention", model=64, heads=48, cut="heads").tensor_axis
        1
    """
    names = (hub,) if isinstance(hub, str) else hub
    shape, axes = tuple(sizes.values()), tuple(sizes)
    return Parameter(
        name, shape, axes, role, part, cut=cut, is_output=is_output, begins=begins, hub=names
    )


@dataclass(frozen=True)
class ModelSpec:
    """What a model consists of, from its configuration alone.

    Attributes:
        parameters: all of them, in the order of the model.
        experts_per_token: routed experts that a token uses, K; of which at most as many as there are count.

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
        """The parameters by number of layer; under None those outside."""
        found: dict[int | None, list[Parameter]] = {None: []}
        for one in self.parameters:
            found.setdefault(one.layer, []).append(one)
        return {layer: tuple(ones) for layer, ones in found.items()}

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all of them."""
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
    def num_of_muon(self) -> int:
        """Elements of the matrices, which Muon is for."""
        return num_elements(one for one in self.parameters if one.is_matrix)

    @cached_property
    def dense_layers(self) -> list[int]:
        """Elements of each layer without its routed experts, in their order."""
        numbered = (ones for layer, ones in self.layers.items() if layer is not None)
        return [num_elements(one for one in ones if not one.is_expert) for ones in numbered]

    def count(self, *parts: str) -> int:
        """Elements of some parts of the model.

        Args:
            *parts: see `Parameter.part`.
        """
        return num_elements(one for one in self.parameters if one.part in parts)


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Elements of some parameters."""
    return sum(one.num_elements for one in parameters)
