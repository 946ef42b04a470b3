"""Groups of a model's parameters for optimizers, by role (matrix, table, vector, edge), from modules and shapes, not
from names."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from expertmesh.moe.experts import DenseMLP, GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.learning import Role, said_role
from expertmesh.moe.module_adapters import Adapter
from expertmesh.moe.router import CosineRouter
from expertmesh.spec.model_spec import ModelSpec

ParameterRole = Role | Literal["vector"]
"""`expertmesh.moe.learning.Role`, or "vector": a parameter of one axis or equivalent shape; not decayed, updated by
AdamW."""

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_EDGES = (_ConvNd, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)
_STRICTEST: tuple[ParameterRole, ...] = ("vector", "table", "edge", "matrix")
"""Order of precedence for a parameter with several roles: a tied head is a table."""

DECAYED: tuple[ParameterRole, ...] = ("edge", "matrix")
"""Roles that weight decay applies to."""


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Role of every parameter.

    Precedence: `learn_as` of a module, then the spec of a model that has one (`expertmesh.spec.model_spec`), then the
    kind of module.

    * table: weights of `nn.Embedding`, also if shared; parameters beside an embedding of the same width; parameters
      whose first of several axes has length 1 (positions).
    * vector: parameters of one axis, norms, biases of experts.
    * edge: convolutions, recurrent weights, routers and other gates (a linear map to as many outputs as there are
      experts beside it, or to one), heads (a linear map outside the blocks to as many outputs as an embedding has rows,
      else the last map of the model), and unknown parameters.
    * matrix: all other linear maps, attention's, and stacks of experts with three or more axes.

    Args:
        model: a model of this package or any other; on several ranks whole or sharded.

    Returns:
        Roles by the names of `model.named_parameters()`.
    """
    found: dict[int, ParameterRole] = {}
    places = _Places(model)
    for name, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            role = places.role(name, module, leaf, parameter)
            known = found.get(id(parameter), role)
            found[id(parameter)] = min(role, known, key=_STRICTEST.index)
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def summary(model: nn.Module, *, muon: bool) -> str:
    """Text that says which optimizer updates the trainable parameters."""
    roles = parameter_roles(model)
    learned = [roles[name] for name, p in model.named_parameters() if p.requires_grad]
    count = {role: learned.count(role) for role in _STRICTEST}
    matrices = count["matrix"] + count["edge"]
    rest = f"{_counted(count['table'], 'table')} and {_counted(count['vector'], 'vector')}, not decayed"
    if not muon:
        return f"AdamW: {_matrices(matrices)}; {rest}"
    edges = f"{count['edge']} at the edges (heads, gates, convolutions)"
    return f"Muon: {count['matrix']} of {_matrices(matrices)}; AdamW: {edges}; {rest}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _matrices(number: int) -> str:
    return f"{number} matri{'x' if number == 1 else 'ces'}"


@dataclass(frozen=True)
class _Surroundings:
    """Sizes found directly in a module."""

    num_experts: frozenset[int]  # lengths of its stacks of experts and lists of modules
    widths: frozenset[int]  # widths of its embeddings and patch convolutions


class _Places:
    """Modules of a model with their surroundings, from which roles are derived."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._specs: dict[str, ParameterRole] = {
            f"{name}.{one.name}" if name else one.name: one.learned_as
            for name, module in self._modules.items()
            if isinstance(spec := getattr(module, "spec", None), ModelSpec)
            for one in spec
        }
        self._stacks = set(_stacks_of(model))
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        self._vocabularies = {m.num_embeddings for m in embeddings}
        self._embeddings = {id(m.weight) for m in embeddings}
        self._surroundings = {name: self._look(m) for name, m in self._modules.items()}
        self._gates = {
            id(part)
            for layer in model.modules()
            if isinstance(layer, MoELayer)
            for gate in (layer.router, layer.shared_gate, layer.residual_coefficient)
            if gate is not None
            for part in gate.modules()
        }
        self._heads = set(self._find_heads())

    def role(self, name: str, module: nn.Module, leaf: str, parameter: nn.Parameter) -> ParameterRole:
        """Role of a parameter in one of its modules."""
        if parameter.ndim < 2:
            return "vector"
        said = self._said(name) or self._specs.get(f"{name}.{leaf}" if name else leaf)
        if said is not None:
            return said
        if isinstance(module, GroupedExperts | DenseMLP):
            return "matrix" if leaf in ("w_in", "w_out") else "vector"
        if isinstance(module, (*_TABLES, CosineRouter)):
            return "table"
        if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
            return "vector"
        if id(module) in self._gates or isinstance(module, (*_EDGES, Adapter)):
            return "edge"
        if (rows := _rows_of_map(module)) is not None and parameter.ndim == 2:
            is_gate = rows in self._beside(name).num_experts or 1 in parameter.shape
            return "edge" if is_gate or id(module) in self._heads else "matrix"
        return self._role_of_other(name, module, parameter)

    def _role_of_other(self, name: str, module: nn.Module, parameter: Tensor) -> ParameterRole:
        """Role of a parameter that is directly in a module of an unknown kind."""
        if isinstance(module, nn.MultiheadAttention):
            return "table" if parameter.shape[0] == 1 else "matrix"
        if parameter.numel() == max(parameter.shape):
            return "table" if parameter.ndim > 2 else "edge"
        if id(parameter) in self._stacks:
            return "matrix"
        if parameter.ndim > 2:
            return "table"
        first, width = parameter.shape
        around = [self._surroundings[name]]
        if first in around[0].num_experts:
            return "vector"  # biases of stacked experts
        if not any(module.children()):
            around.append(self._beside(name))
        stands_beside = any(width in one.widths for one in around)
        return "table" if stands_beside and first != width and first not in self._vocabularies else "edge"

    def _said(self, name: str) -> Role | None:
        while True:
            found = said_role(self._modules[name])
            if found is not None or not name:
                return found
            name = name.rpartition(".")[0]

    def _beside(self, name: str) -> _Surroundings:
        return self._surroundings[name.rpartition(".")[0] if name else ""]

    def _look(self, module: nn.Module) -> _Surroundings:
        children = [*module.children()]
        inside = [module, *(m for m in children if not isinstance(m, nn.ModuleList))]
        counts = {p.shape[0] for m in inside for p in m.parameters(recurse=False) if id(p) in self._stacks}
        counts |= {len(m) for m in children if isinstance(m, nn.ModuleList) and len(m) > 1}
        widths = {m.embedding_dim for m in children if isinstance(m, nn.Embedding)}
        widths |= {m.out_channels for m in children if isinstance(m, _ConvNd)}
        return _Surroundings(frozenset(counts), frozenset(widths))

    def _find_heads(self) -> Iterator[int]:
        """Linear maps outside the blocks to a vocabulary; if there is none, the last map of the model."""
        maps = [n for n, m in self._modules.items() if n and _rows_of_map(m) is not None]
        outside = [name for name in maps if not self._is_in_block(name)]
        heads = [n for n in outside if _rows_of_map(self._modules[n]) in self._vocabularies]
        tied = {id(p) for n in maps for p in self._modules[n].parameters(recurse=False)}
        if not heads and tied.isdisjoint(self._embeddings) and len(maps) > 1:
            last = maps[-1]
            above = self._modules[last.rpartition(".")[0]]
            if last in outside and not isinstance(above, nn.ModuleList):
                heads = [last]
        yield from (id(self._modules[name]) for name in heads)

    def _is_in_block(self, name: str) -> bool:
        """Whether a module above is an entry of a module list, or has siblings of its type."""
        path = name.split(".")[:-1]
        for end in range(1, len(path) + 1):
            above = self._modules[".".join(path[: end - 1])]
            here = self._modules[".".join(path[:end])]
            if isinstance(here, nn.ModuleList):
                continue
            if isinstance(above, nn.ModuleList):
                return True
            if sum(type(child) is type(here) for child in above.children()) > 1:
                return True
        return False


def _rows_of_map(module: nn.Module) -> int | None:
    """Number of outputs of a linear map, which is `nn.Linear` or a module with only a matrix and a bias; else None."""
    if isinstance(module, nn.Linear):
        return module.out_features
    own = list(module.parameters(recurse=False))
    if any(module.children()) or sorted(p.ndim for p in own) != [1, 2]:
        return None
    bias, weight = sorted(own, key=lambda p: p.ndim)
    return bias.shape[0] if bias.shape[0] in weight.shape else None


def _stacks_of(model: nn.Module) -> Iterator[int]:
    """Ids of parameters that are stacks of matrices, one per expert: three or more axes, with another stack of equal
    length beside."""
    for module in model.modules():
        near = [module, *(m for m in module.children() if not any(m.children()))]
        stacks: Mapping[int, list[Tensor]] = defaultdict(list)
        for one in near:
            known = isinstance(one, (_ConvNd, nn.Bilinear, *_TABLES, *_NORMS, nn.MultiheadAttention))
            for p in () if known else one.parameters(recurse=False):
                if p.ndim > 2 and min(p.shape[0], *p.shape[-2:]) > 1:
                    stacks[p.shape[0]].append(p)
        for found in stacks.values():
            if len(found) > 1 and any(set(found[0].shape[1:]) & set(p.shape[1:]) for p in found[1:]):
                yield from map(id, found)
