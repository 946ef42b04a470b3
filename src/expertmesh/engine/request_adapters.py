"""Low-rank adapters of an engine, at most one per request: W + s B A for the request's tokens, W for others in the same
step.

Matmuls with W run once over all tokens of a step. The factors of all adapters of a module lie one after another, so
that s (x A^T) B^T of all tokens is two grouped products, in the module's arithmetic: in deterministic mode a token has
the same bits alone and in any batch.
"""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.peft_folder import Factors, read_adapter_files, read_factors
from expertmesh.config.engine import EngineConfig
from expertmesh.config.values import check_type, quoted, type_of
from expertmesh.engine.block_pool import ROOT
from expertmesh.errors import ConfigError
from expertmesh.models.scored import Head
from expertmesh.moe.dense_parts import Linear
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.experts import DenseMLP, GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.ops.backend import runs_triton
from expertmesh.ops.experts.adapters import add_of_tokens
from expertmesh.ops.experts.call import LowRank, TokenAdapters, stack_adapters
from expertmesh.parallel.experts.coordinated import CoordinatedDispatcher

OVER_RANKS = (
    "adapters over ranks are served where each rank has whole experts and all of the dense parts; use ep_degree "
    "alone, without"
    " enable_eplb, or one process"
)
_RANK = 16
"""Multiple to which adapter ranks are padded, because matmuls that keep a row's bits need it."""


def folders_by_name(adapters: Any) -> Mapping[str, Any]:
    """Checked `adapters` argument; an empty mapping for None."""
    adapters = {} if adapters is None else adapters
    check_type("adapters", adapters, Mapping, "folders by name", "give {'name': 'folder'}")
    return adapters


def check_adapters(model: Any, config: EngineConfig, *, is_whole: bool | None) -> None:
    """Raise ConfigError if an engine does not support adapters; see `OVER_RANKS` for `is_whole`; None: one process."""
    layers = (module for module in model.modules() if isinstance(module, MoELayer))
    if is_whole is None:
        fits = all(isinstance(layer.dispatcher, LocalDispatcher) for layer in layers)
    else:
        fits = is_whole and not config.enable_eplb
    problem = None
    if config.compile:
        problem = "compile=True: steps with adapters are not recorded; leave one of them out"
    elif not hasattr(model, "spec"):
        problem = (
            f"adapters on {type_of(model)} are not served, only on a GPT of ours; open the folder without"
            " implementation=transformers"
        )
    elif not fits:
        problem = OVER_RANKS
    elif model.config.batch_invariant and model.device.type != "cpu" and not runs_triton(model.device):
        problem = "deterministic: adapters keep their bits on CPUs and with Triton only; leave one of them out"
    if problem:
        raise ConfigError(problem)


@dataclass(eq=False)
class LoadedAdapter:
    """Adapter of an engine."""

    name: str  # name for requests
    folder: Path  # folder that it was read from
    root: int  # unique root prefix of its requests' tokens, below `ROOT`
    # low-rank additions of each module by path: "weight" of a linear map, w_in and w_out of experts; views of the
    # module's `_Stack`
    of_module: dict[str, dict[str, LowRank]]
    num_bytes: int = 0  # bytes of its factors


class AdapterSpan(NamedTuple):
    """Consecutive tokens of a step with the same adapter."""

    first: int
    stop: int
    adapter: LoadedAdapter


class _Stack(NamedTuple):
    """All adapters of a module."""

    roots: tuple[int, ...]  # their roots, by slot
    on_in: LowRank | None  # of w_in, or of a linear map's weight
    on_out: LowRank | None  # of w_out


class Adapters:
    """Adapters of a model, by name; hooks do not keep them alive."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._known: dict[str, LoadedAdapter] = {}
        self._roots = itertools.count(ROOT - 1, -1)
        self._runs: tuple[AdapterSpan, ...] = ()
        self._expert_runs: tuple[AdapterSpan, ...] = ()
        self._stacks: dict[str, _Stack] = {}  # by path of the module
        # slots of a step's tokens for modules with the same adapters
        self._slots: dict[tuple[Any, ...], TokenAdapters | None] = {}
        self._is_attached = False

    @property
    def all(self) -> list[LoadedAdapter]:
        """Loaded adapters, in the order of loading."""
        return list(self._known.values())

    def get(self, name: Any) -> LoadedAdapter:
        """Adapter of a name."""
        if isinstance(name, str) and name in self._known:
            return self._known[name]
        known = ", ".join(map(repr, self._known)) or "none"
        raise ConfigError(
            "adapter",
            quoted(name),
            f"there is no such adapter (there are: {known})",
            "load it first",
        )

    def load(self, name: Any, folder: str | Path, *, root: int | None = None) -> LoadedAdapter:
        """Load a folder in peft's format. `root`: root prefix chosen by another rank; None: a new one."""
        if not isinstance(name, str) or not name:
            raise ConfigError("adapter", repr(name), "must be a name", "give a string")
        if name in self._known:
            raise ConfigError("adapter", repr(name), "is there already", "unload it first")
        what, fix = "a path", "give that of peft's save_pretrained"
        check_type(f"adapter {name!r}: folder", folder, (str, Path), what, fix)
        files = read_adapter_files(folder)
        found = read_factors(files, self._model.config, multiple=_RANK)
        of_module: dict[str, dict[str, LowRank]] = {}
        for parameter, factors in found.items():
            path, _, which = parameter.rpartition(".")
            self._check(path, files.folder)
            of_module.setdefault(path, {})[which] = self._low_rank(self._own(path, factors))
        if not self._is_attached:
            self._attach()
        root = next(self._roots) if root is None else root
        loaded = LoadedAdapter(name, files.folder, root, of_module)
        each = (one for both in of_module.values() for one in both.values())
        loaded.num_bytes = sum(one.a_ErK.nbytes + one.b_ENr.nbytes for one in each)
        self._known[name] = loaded
        self._stack(of_module)
        return loaded

    def unload(self, name: Any) -> None:
        """Remove an adapter that no request uses any more."""
        gone = self._known.pop(self.get(name).name)
        self._stack(gone.of_module)

    def _stack(self, paths: Iterable[str]) -> None:
        """Stack the factors of the modules' adapters anew; the adapters keep views."""
        for path in paths:
            loaded = [one for one in self._known.values() if path in one.of_module]
            if not loaded:
                del self._stacks[path]
                continue
            given = [one.of_module[path] for one in loaded]
            on_in = stack_adapters([own.get("weight", own.get("w_in")) for own in given])
            on_out = stack_adapters([own.get("w_out") for own in given])
            self._stacks[path] = _Stack(tuple(one.root for one in loaded), on_in, on_out)
            for slot, own in enumerate(given):
                for which, one in own.items():
                    own[which] = _in_slot(on_out if which == "w_out" else on_in, slot, one)

    def runs(self, chunks: Sequence[tuple[int, int]]) -> tuple[AdapterSpan, ...]:
        """Spans of tokens that have an adapter."""
        by_root = {one.root: one for one in self._known.values()}
        found: list[AdapterSpan] = []
        first = 0
        for count, root in chunks:
            stop = first + count
            if root != ROOT:
                found.append(AdapterSpan(first, stop, by_root[root]))
            first = stop
        return tuple(found)

    @contextmanager
    def on(self, runs: tuple[AdapterSpan, ...], of_experts: tuple[AdapterSpan, ...] | None = None) -> Iterator[None]:
        """Context of a step, with the adapters of its tokens, and of those that other ranks send to this one's
        experts."""
        self._runs, self._expert_runs = runs, runs if of_experts is None else of_experts
        try:
            yield
        finally:
            self._runs = self._expert_runs = ()
            self._slots.clear()

    def _check(self, path: str, folder: Path) -> None:
        """Raise ConfigError if the module of an adapter is of an unsupported kind."""
        module = self._model.get_submodule(path)
        is_paged = getattr(module, "paging", None) is not None
        # a head computes rows of some tokens
        is_known = isinstance(module, Linear | DenseMLP | GroupedExperts)
        if is_paged or not is_known or isinstance(module, Head):
            kind = "module of experts in slots" if is_paged else type(module).__name__
            raise ConfigError(
                f"{folder}: has an adapter on {path}, a {kind}, which takes none; open the model with all its "
                "experts, or train the"
                " adapter on attention alone"
            )
        if getattr(module, "adapters", None) is not None:
            raise ConfigError(
                f"{path}: has adapters already; merge or remove them first (expertmesh.lora.merge, "
                "expertmesh.lora.remove)"
            )

    def _own(self, path: str, factors: Factors) -> Factors:
        """Factors of the experts on this rank."""
        layer = self._model.get_submodule(path.rpartition(".")[0])
        if not isinstance(layer, MoELayer) or not path.endswith(".experts"):
            return factors
        way = layer.dispatcher
        if not isinstance(way, CoordinatedDispatcher):
            return factors
        a, b = (f.narrow(0, way.first_expert, way.num_local).clone() for f in factors[:2])
        return Factors(a, b, factors.scaling)

    def _low_rank(self, factors: Factors) -> LowRank:
        given = factors.a_erK, factors.scaled()
        a, b = (factor.to(self._model.device, self._dtype) for factor in given)
        return LowRank(a, b, 1.0, False)

    def _attach(self) -> None:
        """Attach hooks to the modules; without adapters in a step, modules compute as before.

        Hooks of other engines on the same model stay: each adds the adapters of its own steps only.
        """
        detach_collected(self._model)
        self._is_attached = True
        own = _Owner(self)
        for path, module in self._model.named_modules():
            if isinstance(module, Linear):
                module.register_forward_hook(partial(_add_to, own, path))
            elif isinstance(module, DenseMLP):
                module.of_tokens.append(partial(_of_tokens, own, path))
            elif isinstance(module, MoELayer) and module.grouped is not None:
                way = module.dispatcher
                is_exact = isinstance(way, CoordinatedDispatcher) and way.is_exact
                each = module.top_k if is_exact else 1
                path = f"{path}.experts"
                module.grouped.of_tokens.append(partial(_of_tokens, own, path, rows_per_token=each, of_experts=True))

    def of_tokens(
        self, path: str, num_rows: int, *, rows_per_token: int = 1, of_experts: bool = False
    ) -> TokenAdapters | None:
        """Adapters of a module for the step's tokens, or for the tokens that this rank's experts receive, which may
        have more rows each; None if no token has one."""
        spans, stack = self._expert_runs if of_experts else self._runs, self._stacks.get(path)
        if stack is None or not spans:
            return None
        key = stack.roots, num_rows, rows_per_token, of_experts
        if key not in self._slots:
            slots = [-1] * num_rows
            for first, stop, adapter in spans:
                if adapter.root in stack.roots:
                    rows = (stop - first) * rows_per_token
                    slots[first * rows_per_token : stop * rows_per_token] = [stack.roots.index(adapter.root)] * rows
            own = TokenAdapters.of_slots(slots, self._model.device)
            self._slots[key] = own if len(own.tokens_n) else None
        found = self._slots[key]
        return None if found is None else found._replace(on_in=stack.on_in, on_out=stack.on_out)


def _in_slot(stack: LowRank | None, slot: int, own: LowRank) -> LowRank:
    """View of an adapter's factors in a stack."""
    assert stack is not None
    E, rank, _ = own.a_ErK.shape
    a, b = (factor.narrow(0, slot * E, E) for factor in (stack.a_ErK, stack.b_ENr))
    return own._replace(a_ErK=a[:, :rank], b_ENr=b[:, :, :rank])


class _Owner:
    """Weak reference of a hook to its adapters; in a copy of the model it refers to none."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self._adapters = None if adapters is None else weakref.ref(adapters)

    def __call__(self) -> Adapters | None:
        return None if self._adapters is None else self._adapters()

    def __deepcopy__(self, memo: Any) -> "_Owner":
        return _Owner()

    def __reduce__(self) -> Any:
        return _Owner, ()


def detach_collected(model: nn.Module) -> None:
    """Remove hooks of adapters that were collected with their engine, and those in a copy of the model.

    Not done by a finalizer, which could run while a module calls its hooks.
    """
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if _is_idle(hook):
                del module._forward_hooks[key]
        if (hooks := getattr(module, "of_tokens", None)) is not None:
            hooks[:] = [hook for hook in hooks if not _is_idle(hook)]


def _is_idle(hook: Any) -> bool:
    owner = hook.args[0] if isinstance(hook, partial) and hook.args else None
    return isinstance(owner, _Owner) and owner() is None


def _add_to(owner: _Owner, path: str, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
    """Add the adapters' outputs to the output of a linear map, in place."""
    x_TK, y_TN = args[0].flatten(0, -2), y.view(-1, y.shape[-1])
    if (own := _of_tokens(owner, path, len(x_TK))) is not None:
        assert isinstance(module, Linear)
        is_invariant = module.arithmetic.in_mode(module.training).is_invariant_for(x_TK)
        add_of_tokens(y_TN, x_TK, own, batch_invariant=is_invariant, backend=module.backend)


def _of_tokens(owner: _Owner, path: str, num_rows: int, **how: Any) -> TokenAdapters | None:
    """See `Adapters.of_tokens`."""
    adapters = owner()
    return None if adapters is None else adapters.of_tokens(path, num_rows, **how)
