"""Low-rank adapters (LoRA: Hu et al. 2022), trained while all other parameters are frozen.

Example:
    >>> import torch
    >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0)
    >>> em.lora.add(layer, rank=2)
    1
    >>> [name for name, p in layer.named_parameters() if p.requires_grad][0]
    'experts.adapters.w_in.a'
    >>> y, stats = layer(torch.randn(5, 8))  # as before: the second factors are zero at first
    >>> em.lora.merge(layer)  # into the weights
    1
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import ConfigError
from expertmesh.moe.check_arguments import check_draw, check_dtype, check_module
from expertmesh.moe.init import draw_seed
from expertmesh.moe.module_adapters import Adapter, ModuleAdapters, adapters_in, add_low_rank
from expertmesh.moe.token_dropout import AdapterDropout, TokenPlaces
from expertmesh.spec.adapter_targets import adaptable, check_dropout, check_rank, kind_of, targeted
from expertmesh.spec.model_spec import ModelSpec

_log = logging.getLogger("expertmesh.lora")
_RANK = Number(1, fix="use 8, for example", types=WHOLE)
_EXPERT_RANK = Number(1, fix="leave it out, for rank", types=WHOLE, optional=True)
_DROPOUT = Number(0, 0.99, fix="use 0.05, for example")
_ALPHA = Number(0, fix="use twice the rank, for example", is_open=True)


__all__ = ["adapters", "add", "merge", "remove"]


def add(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("experts",),
    expert_rank: int | None = None,
    rslora: bool = False,
    dropout: float = 0.0,
    shared: bool = False,
    freeze: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> int:
    """Add adapters to the matrices of a model: W becomes W + (alpha / r) B A.

    B starts at zero, so outputs are unchanged; A is N(0, 1 / fan_in). The product is computed as x A^T B^T: neither the
    sum nor a gradient of W is formed. Queries, keys and values are one matrix here, gate and up another: each has one
    adapter. Shard the model over ranks afterwards.

    Args:
        model: a model or a layer.
        rank: r, the inner size of each adapter.
        alpha: numerator of the factor of every addition.
        targets: attention, dense, shared, experts and head; or ends of names, ours (w_in, attention.qkv) or peft's
            (q_proj k_proj v_proj, mlp.experts.gate_up_proj).
        expert_rank: r of routed experts; None: rank.
        rslora: divide alpha by the square root of r (Kalajdzievski 2023).
        dropout: share of an adapter's input that training leaves out; not with experts.
        shared: one adapter for all experts of a layer; else one per expert.
        freeze: freeze all parameters except adapters, until `merge` or `remove`, which make all of them trainable.
        dtype: dtype of the factors; matmuls use the dtype of the weights.
        seed: seed of the first factors; None: drawn from torch's default generator.

    Returns:
        Number of modules with adapters.

    Raises:
        ConfigError: a target matches nothing; a module has adapters already, or is sharded; a rank is above a matrix's;
            rank, alpha, dtype or seed break a rule. The model is then unchanged.
    """
    check_module(model)
    _RANK.check("rank", rank)
    _EXPERT_RANK.check("expert_rank", expert_rank)
    _ALPHA.check("alpha", alpha)
    _DROPOUT.check("dropout", dropout)
    check_dtype(dtype)
    check_draw(seed, std=None, out_std=None)
    are_names = isinstance(targets, Collection) and all(isinstance(one, str) for one in targets)
    if isinstance(targets, str) or not are_names:
        raise ConfigError(f"targets={targets!r}: must be a list of names; write ['experts']")
    sizes = {}
    names = targeted(_parts(model), targets)
    check_dropout(dropout, names)
    for name in names:
        r = expert_rank if expert_rank and kind_of(name) == "experts" else rank
        path, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(path)
        check_rank(r, module.matrices[leaf], of=name, is_stack=hasattr(module, "num_experts"))
        sizes[name] = Size(r, alpha / (r**0.5 if rslora else r))
    how: dict[str, Any] = {"dropout": dropout, "shared": shared, "freeze": freeze}
    return attach(model, sizes, **how, dtype=dtype, seed=seed)


class Size(NamedTuple):
    """Rank r and scale s of an adapter."""

    rank: int
    scaling: float


def attach(
    model: nn.Module,
    sizes: Mapping[str, Size],
    *,
    dropout: float = 0.0,
    shared: bool = False,
    freeze: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> int:
    """Add adapters to parameters by their names; see `add`."""
    found = defaultdict[str, dict[str, Size]](dict)
    for name, size in sizes.items():
        path, _, leaf = name.rpartition(".")
        found[path][leaf] = size
    for path, own in found.items():
        _check(path, model.get_submodule(path), list(own))
    seed = draw_seed() if seed is None else seed
    if freeze:
        model.requires_grad_(False)
    places, sites = TokenPlaces(), itertools.count()
    if dropout:
        model.register_forward_pre_hook(places, with_kwargs=True)
    for path, own in found.items():
        module: Any = model.get_submodule(path)
        made = {}
        for leaf, size in own.items():
            weight: Tensor = getattr(module, leaf)
            drop = None
            if dropout:
                of_head = kind_of(f"{path}.{leaf}") == "head"
                drop = AdapterDropout(dropout, site=next(sites), places=places, of_head=of_head)
            made[leaf] = Adapter(
                module.matrices[leaf],
                num_experts=getattr(module, "num_experts", None),
                rank=size.rank,
                scaling=size.scaling,
                shared=shared,
                drop=drop,
                device=weight.device,
                dtype=dtype,
            )
            if weight.device.type != "meta":
                made[leaf].reset(seed, f"{path}.{leaf}".removeprefix("."))
        module.adapters = ModuleAdapters(made, froze_model=freeze)
    return len(found)


def _parts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Names of transformers' modules of each parameter that may have an adapter, by its name."""
    theirs: dict[str, tuple[str, ...]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(spec := getattr(module, "spec", None), ModelSpec):
            theirs |= {f"{path}.{n}".removeprefix("."): ends for n, ends in adaptable(spec).items()}
        for leaf, shape in getattr(module, "matrices", {}).items():
            name = f"{path}.{leaf}".removeprefix(".")
            if kind_of(name) is not None:
                parts[name] = theirs.get(name) or _usual_parts(leaf, shape)
    return parts


def _usual_parts(leaf: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Names of the modules that a parameter is in transformers, for a model that does not tell them."""
    if leaf == "weight":
        return ()
    if leaf == "w_out":
        return ("down_proj",)
    return ("gate_proj", "up_proj") if shape[-3] == 2 else ("up_proj",)


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """All adapters of a model, by the names of the adapted parameters.

    Raises:
        ConfigError: there are no adapters.
    """
    check_module(model)
    found = dict(adapters_in(model))
    if not found:
        raise ConfigError(f"{type(model).__name__} has no adapters; put some there with expertmesh.lora.add")
    return found


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules with adapters, by path."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in adapters(model)):
        yield path, model.get_submodule(path)


def merge(model: nn.Module) -> int:
    """Merge every adapter into its weights, and remove it; see `remove` for which parameters are trainable then.

    Quantised weights are widened, added to and rounded to their format again, which a warning compares with the change.

    Returns:
        Number of modules that had adapters.

    Raises:
        ConfigError: there are no adapters, or the model is sharded over ranks.
    """
    found = list(_adapted(model))
    for path, module in found:
        if any(type(p.data) is not torch.Tensor for p in module.parameters()):
            raise ConfigError(f"{path}: is spread over ranks; save the adapters, and merge them into the whole model")
    for path, module in found:
        _merge(path, module)
    return remove(model)


def remove(model: nn.Module) -> int:
    """Remove all adapters without merging; if `add` froze the model, all its parameters are trainable then.

    Returns:
        Number of modules that had adapters.

    Raises:
        ConfigError: there are no adapters.
    """
    found = [module for _, module in _adapted(model)]
    is_frozen = any(module.adapters.froze_model for module in found if module.adapters)
    for module in found:
        module.adapters = None
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, TokenPlaces):
                del module._forward_pre_hooks[key]
    if is_frozen:
        model.requires_grad_(True)
    return len(found)


def _merge(path: str, module: Any) -> None:
    """Merge a module's adapters."""
    for name, adapter in module.adapters.named_children():
        if getattr(module, "format", "dense") != "dense":
            _merge_packed(path, module, name, adapter)
        else:
            adapter.add_to(getattr(module, name))


@torch.no_grad()
def _merge_packed(path: str, experts: Any, name: str, adapter: Adapter) -> None:
    """Merge an adapter into quantised matrices, one widened at a time, and say what rounding them again changes."""
    E, G, F, _ = experts.shape
    a_erK, b_eNr = adapter.factors()
    squares = torch.zeros(3, dtype=torch.float64)  # of the sums, of the change, of the error

    def wide(expert: int) -> Tensor:
        one: Tensor = getattr(experts.weights().slices()[0], name)(expert, experts.dtype)
        return one

    for expert in range(E):
        before, at = wide(expert), slice(expert, expert + 1) if len(a_erK) > 1 else slice(1)
        merged = before.clone()
        add_low_rank(merged[None], a_erK[at], b_eNr[at], adapter.scaling)
        experts.put(name, expert, merged.unflatten(0, (G, F)) if name == "w_in" else merged)
        found = (merged, merged - before, merged - wide(expert))
        squares += torch.stack([one.double().square().sum().cpu() for one in found])
    change, error = (squares[1:] / squares[0]).sqrt().tolist()
    _log.warning(
        f"{path or 'experts'}.{name}: adapters changed {change:.2g} of the weights' norm, rounding them to "
        f"{experts.format} again {error:.2g}"
    )


def _check(path: str, module: Any, names: Sequence[str]) -> None:
    """Raise ConfigError for a module that adapters cannot be added to."""
    if module.adapters is not None:
        raise ConfigError(
            f"{path}: has adapters already; merge or remove them first (expertmesh.lora.merge, expertmesh.lora.remove)"
        )
    if getattr(module, "paging", None) is not None:
        raise ConfigError(f"{path}: its experts are in slots, for inference; open it with all of them")
    if any(type(getattr(module, name).data) is not torch.Tensor for name in names):
        raise ConfigError(f"{path}: is spread over ranks already; add adapters first, then spread the model")
