"""Low-rank adapters of an engine, at most one per request: W + s B A for the request's tokens, W for others in the same
step.

Matmuls with W run once over all tokens of a step. Tokens with the same adapter are adjacent in a step
(`Scheduler.schedule`), and s (x A^T) B^T is added to their outputs in the module's arithmetic: in deterministic mode a
token has the same bits alone and in any batch.
"""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
from expertmesh.ops.experts.call import AdapterRun, LowRank
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
    elif model.config.batch_invariant and model.device.type != "cpu":
        problem = "deterministic: adapters keep their bits on a CPU only; leave one of them out"
    if problem:
        raise ConfigError(problem)


@dataclass(eq=False)
class LoadedAdapter:
    """Adapter of an engine."""

    name: str  # name for requests
    folder: Path  # folder that it was read from
    root: int  # unique root prefix of its requests' tokens, below `ROOT`
    # low-rank additions of each module by path: "weight" of a linear map, w_in and w_out of experts
    of_module: dict[str, dict[str, LowRank]]
    num_bytes: int = 0  # bytes of its factors


class AdapterSpan(NamedTuple):
    """Consecutive tokens of a step with the same adapter."""

    first: int
    stop: int
    adapter: LoadedAdapter


class Adapters:
    """Adapters of a model, by name; hooks do not keep them alive."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._known: dict[str, LoadedAdapter] = {}
        self._roots = itertools.count(ROOT - 1, -1)
        self._runs: tuple[AdapterSpan, ...] = ()
        self._expert_runs: tuple[AdapterSpan, ...] = ()
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
        return loaded

    def unload(self, name: Any) -> None:
        """Remove an adapter that no request uses any more."""
        del self._known[self.get(name).name]

    def runs(self, chunks: Sequence[tuple[int, int]]) -> tuple[AdapterSpan, ...]:
        """Spans of tokens with the same adapter."""
        by_root = {one.root: one for one in self._known.values()}
        found: list[AdapterSpan] = []
        first = 0
        for count, root in chunks:
            stop = first + count
            if root != ROOT:
                last = found[-1] if found else None
                if last is not None and last.stop == first and last.adapter.root == root:
                    found[-1] = last._replace(stop=stop)
                else:
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
                module.of_rows.append(partial(_of_tokens, own, path))
            elif isinstance(module, MoELayer) and module.grouped is not None:
                way = module.dispatcher
                is_exact = isinstance(way, CoordinatedDispatcher) and way.is_exact
                each = module.top_k if is_exact else 1
                module.grouped.of_rows.append(partial(_of_expert_rows, own, f"{path}.experts", each))

    def spans(self, *, of_experts: bool = False) -> tuple[AdapterSpan, ...]:
        """Adapter spans of the step's tokens, or of the tokens that this rank's experts receive."""
        return self._expert_runs if of_experts else self._runs


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
        if (hooks := getattr(module, "of_rows", None)) is not None:
            hooks[:] = [hook for hook in hooks if not _is_idle(hook)]


def _is_idle(hook: Any) -> bool:
    owner = hook.args[0] if isinstance(hook, partial) and hook.args else None
    return isinstance(owner, _Owner) and owner() is None


def _add_to(owner: _Owner, path: str, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
    """Add the adapters' outputs to the output of a linear map, in place."""
    adapters = owner()
    if adapters is None or not (spans := adapters.spans()):
        return
    assert isinstance(module, Linear)
    linear = module.arithmetic.in_mode(module.training).linear
    x_TK, y_TN = args[0].flatten(0, -2), y.view(-1, y.shape[-1])
    for first, stop, adapter in spans:
        own = adapter.of_module.get(path)
        if own is not None:
            a_ErK, b_ENr, *_ = own["weight"]
            low_nr = linear(x_TK[first:stop], a_ErK[0], backend=module.backend)
            y_TN[first:stop] += linear(low_nr, b_ENr[0], backend=module.backend)


def _of_tokens(owner: _Owner, path: str) -> tuple[AdapterRun, ...]:
    """Adapter runs for a dense module, whose rows are the step's tokens."""
    adapters = owner()
    return () if adapters is None else _adapter_runs(path, adapters.spans(), 1)


def _of_expert_rows(owner: _Owner, path: str, each: int) -> tuple[AdapterRun, ...]:
    """Adapter runs for the experts of a layer, which see `each` rows of a token."""
    adapters = owner()
    return () if adapters is None else _adapter_runs(path, adapters.spans(of_experts=True), each)


def _adapter_runs(path: str, spans: Sequence[AdapterSpan], rows_per_token: int) -> tuple[AdapterRun, ...]:
    """Low-rank additions of a module to runs of its rows, for the spans whose adapter has some."""
    runs = []
    for first, stop, adapter in spans:
        if own := adapter.of_module.get(path):
            rows = first * rows_per_token, stop * rows_per_token
            runs.append(AdapterRun(*rows, own.get("w_in"), own.get("w_out")))
    return tuple(runs)
