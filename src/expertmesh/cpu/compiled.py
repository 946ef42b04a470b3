"""Compiled forward pass of a step: makes decoding fast on a CPU.

The pass is traced through the model's own modules, so all routers, layers and options are included. What is left is
one Python function that calls the model's operators one after the other, the same that the modules call: a step has
the same bits, compiled or not.
"""

import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from expertmesh.config.engine import EngineConfig
from expertmesh.engine.faster_forward import Computed
from expertmesh.engine.request_adapters import detach_collected
from expertmesh.engine.step_tensors import StepBatch, StepTensors
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import LanguageModel
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.layer import MoELayer, grouped_layers
from expertmesh.ops import native_linear, native_rows
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.cpu.compiled_loops import while_tracing
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.experts import native
from expertmesh.ops.experts.call import make_experts_call
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS, STEP_OPS, OpSet

FEWEST_WEIGHTS = 1 << 25
"""Parameters from which a step is worth the seconds of its trace (docs/log.md)."""
STEPS_BEFORE = 8
"""Number of steps of a kind before it is compiled, so that short answers do not trigger unused compilation."""

Rewrite = Callable[[fx.Graph, fx.Node], fx.Node]
"""Function that replaces an operator's node by a call of its own, and returns the new node."""

_log = logging.getLogger("expertmesh.engine")
_aten = torch.ops.aten


@torch.library.custom_op("expertmesh::attend", mutates_args=())
def _attend(
    q_THd: Tensor,
    k_Thd: Tensor,
    v_Thd: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    layer_index: int,
) -> Tensor:
    """Placeholder in a trace for the attention of a context."""
    raise NotImplementedError("only in a trace")


@_attend.register_fake
def _(q_THd: Tensor, k_Thd: Tensor, v_Thd: Tensor, *rest: Any) -> Tensor:
    return q_THd.new_empty(q_THd.shape[0], q_THd.shape[1] * v_Thd.shape[2])


class _TracedContext:
    """Attention context for tracing."""

    keeps = True

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def attend(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_Thd: Tensor,
        v_Thd: Tensor,
        *,
        arithmetic: Any,
        rule: ScoreRule | None = None,
    ) -> Tensor:
        rule = PLAIN if rule is None else rule
        words = rule.sinks_H, rule.window, rule.softcap, rule.chunk, layer_index
        y: Tensor = torch.ops.expertmesh.attend(q_THd, k_Thd, v_Thd, *words)
        return y


def _attend_by(arithmetic: OpSet) -> Callable[..., Tensor]:
    """Attention of a context by an op set, with the arguments of `_attend` behind the context."""

    def attend_now(
        context: Any,
        q_THd: Tensor,
        k_Thd: Tensor,
        v_Thd: Tensor,
        sinks_H: Tensor | None,
        window: int | None,
        softcap: float | None,
        chunk: int | None,
        layer_index: int,
    ) -> Tensor:
        rule = ScoreRule(window, softcap, sinks_H, chunk)
        y: Tensor = context.attend(layer_index, q_THd, k_Thd, v_Thd, arithmetic=arithmetic, rule=rule)
        return y

    return attend_now


def _experts_now(ids_TK: Tensor, *fields: Any) -> tuple[Tensor]:
    """Experts from expert ids, which replace the routing metadata."""
    given: tuple[Any, ...] = (*fields[:-4], [ids_TK] * 4, *fields[-4:])
    call = make_experts_call(*given)
    return (compute(call._replace(ids_TK=ids_TK, maps=None)),)


_KINDS = {"one": 1, "many": 7}
"""Kinds of steps: number of tokens of the traced example."""


class CompiledForward:
    """`model(ids, context=..., logit_rows_R=...)` without its modules, traced in the background while the engine runs
    them."""

    pads, description = False, ""

    def __init__(self, model: Any) -> None:
        self.problem = ""  # why compilation failed, in one line; empty: it did not
        modules = list(model.modules())
        self._state = [
            (tensors, name)
            for kind in ("_parameters", "_buffers")
            for module in modules
            for tensors in (getattr(module, kind),)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self._names = [
            name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)
        ]
        # tracing replaces tensors in modules for a while, and the model's own modules may be in use
        shared = {id(tensors[name]): tensors[name] for tensors, name in self._state}
        self._copy = copy.deepcopy(model, shared)
        is_one = native_linear.is_only_way(*model.parameters())
        self._arithmetic = DEFAULT_OPS
        if model.config.batch_invariant or is_one:
            self._arithmetic = BATCH_INVARIANT_OPS
        for module in self._copy.modules():
            if isinstance(getattr(module, "arithmetic", None), OpSet):
                module.arithmetic = STEP_OPS if self._arithmetic is DEFAULT_OPS else self._arithmetic
        self._graphs: dict[str, fx.GraphModule] = {}
        self._steps: Counter[str] = Counter()
        self._worker: threading.Thread | None = None

    def padding(self, batch: StepBatch) -> None:
        """No padding: the trace takes any number of tokens."""

    def __call__(self, step: StepTensors, context: Any, forward: Callable[[StepTensors], Computed]) -> Computed | None:
        """See `FasterForward`; None: this kind of step is not compiled yet."""
        rows_R = step.rows_R
        T, R = len(step.ids_T), len(rows_R)
        kind = "one" if T == 1 else "many"
        graph = self._graphs.get(kind)
        if graph is None:
            self._ask_for(kind)
            return None
        least = min(T, 2)
        if least > R:  # the trace knows other numbers of rows only
            rows_R = F.pad(rows_R, (0, least - R))
        state = [tensors[name] for tensors, name in self._state]
        logits_RV, *ids_of_layers = graph(step.ids_T, step.positions_T, rows_R, *state, context)
        return Computed(logits_RV[:R], ids_of_layers)

    def compile_all(self, forward: Callable[[StepTensors], Computed]) -> None:
        """Compile every kind of step and wait; on failure `problem` gives the reason."""
        with self._going_on():
            for kind in _KINDS:
                if kind not in self._graphs:
                    self._graphs[kind] = self._compiled(kind)

    def _ask_for(self, kind: str) -> None:
        """Compile a kind of step in the background after enough such steps; one kind at a time."""
        self._steps[kind] += 1
        if self.problem or self._steps[kind] < STEPS_BEFORE:
            return
        if self._worker is None or not self._worker.is_alive():
            args = kind, torch.get_num_threads()
            self._worker = threading.Thread(target=self._work, args=args, daemon=True)
            self._worker.start()

    def _work(self, kind: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # the number of threads is per Python thread
        with self._going_on():
            self._graphs[kind] = self._compiled(kind)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Context in which a failed compilation is recorded as `problem`, because the engine can run uncompiled."""
        try:
            yield
        except Exception as error:
            self.problem = str(error).strip().partition("\n")[0] or type(error).__name__
            _log.warning("the engine's steps are not compiled: %s", self.problem)

    def _compiled(self, kind: str) -> fx.GraphModule:
        """Compiled function of (ids, positions, rows, *state, context)."""
        num_tokens = _KINDS[kind]
        _log.info("compiling steps of %s token(s), which takes some seconds", kind)

        def forward(ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, *state: Tensor) -> Any:
            call = {
                "context": _TracedContext(positions_T),
                "logit_rows_R": rows_R,
                "capacity_factor": self._copy.config.moe.dropless_factor,
                "losses": False,
            }
            named = dict(zip(self._names, state, strict=True))
            output = torch.func.functional_call(self._copy, named, (ids_T,), call)
            return output.logits_BSV, *(one.topk_expert_ids_TK for one in output.stats)

        ids_T = torch.zeros(num_tokens, dtype=torch.int64)
        rows_R = torch.zeros(1 if num_tokens == 1 else num_tokens + 2, dtype=torch.int64)
        state = [tensors[name].detach() for tensors, name in self._state]
        module = traced(forward, (ids_T, ids_T.clone(), rows_R), state)
        last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
        with module.graph.inserting_after(last):
            context = module.graph.placeholder("context")
        return rewritten(module, self._own_ways(context))

    def _own_ways(self, context: fx.Node) -> dict[Any, Rewrite]:
        """Rewrites of operations that are called without PyTorch's dispatcher."""
        ops, attend_now = self._arithmetic, _attend_by(self._arithmetic)

        # functions with names, which an op set's need not be, for the graph's text
        def linear_now(*given: Any) -> Tensor:
            return ops.linear(*given)

        def router_linear_now(*given: Any) -> Tensor:
            return ops.router_linear(*given)

        def attend(graph: fx.Graph, node: fx.Node) -> fx.Node:
            return graph.call_function(attend_now, (context, *node.args))

        def experts(graph: fx.Graph, node: fx.Node) -> fx.Node:
            given: Any = node.args
            *fields, maps, activation, format, backend, is_invariant, _, _ = given
            ids = maps[0].args[0].args[0]  # argument of `route_metadata`
            words = activation, format, backend, is_invariant
            return graph.call_function(_experts_now, (ids, *fields, *words))

        def product(graph: fx.Graph, node: fx.Node) -> fx.Node:
            given: Any = node.args
            *bias, x, w = given
            if w.target is not _aten.t.default or w.args[0].op != "placeholder":
                return node
            return graph.call_function(linear_now, (x, w.args[0], *bias))

        def router(graph: fx.Graph, node: fx.Node) -> fx.Node:
            return graph.call_function(router_linear_now, node.args)

        return {
            torch.ops.expertmesh.attend.default: attend,
            torch.ops.expertmesh.moe_mlp.default: experts,
            torch.ops.expertmesh.router_linear.default: router,
            _aten.mm.default: product,
            _aten.addmm.default: product,
            **{operator: _directly(run) for operator, run in _DIRECT.items()},
        }


_DIRECT = {
    **native_rows.DIRECT,
    **native_linear.DIRECT,
    **native.DIRECT,
    **invariant.DIRECT,
}


def _directly(run: Callable[..., Any]) -> Rewrite:
    return lambda graph, node: graph.call_function(run, node.args, node.kwargs)


def traced(
    function: Callable[..., Any],  # takes the example's tensors, then the weights; returns a tuple of tensors
    example: Iterable[Tensor],  # tensors of symbolic sizes; equal sizes are traced as always equal
    weights: Iterable[Tensor],  # tensors of fixed sizes
) -> fx.GraphModule:
    """Trace a function of tensors with symbolic sizes (0 and 1 excepted) and of weights with fixed sizes."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)
    given = [mode.from_tensor(t) for t in example]
    given += [mode.from_tensor(t, static_shapes=True) for t in weights]
    with while_tracing(), torch.no_grad(), mode:
        module: fx.GraphModule = make_fx(function)(*given)
    if sizes.guards:
        raise ValueError(f"the function goes another way for other sizes: {sizes.guards[0].expr}")
    module.graph.eliminate_dead_code()
    return module


def rewritten(module: fx.GraphModule, own_ways: Mapping[Any, Rewrite]) -> fx.GraphModule:
    """A result of `traced`, changed in place: operators are replaced by their own ways."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in own_ways:
            with graph.inserting_before(node):
                new = own_ways[node.target](graph, node)
            if new is not node:
                node.replace_all_uses_with(new)
                graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def is_large(model: Any) -> bool:
    """Whether the model is large enough that faster decoding outweighs the compile time."""
    weights = (*model.parameters(), *model.buffers())  # buffers: codes of quantised weights
    return sum(weight.numel() for weight in weights) >= FEWEST_WEIGHTS


def why_not_compiled(model: Any) -> str:
    """Reason why a model's steps cannot be compiled, as a continuation of "compile=True"; empty: they can."""
    if not isinstance(model, LanguageModel):
        return "is for models of ours"
    parameters = list(model.parameters())
    if not all(p.is_cpu for p in parameters):
        return "is for models on a CPU"
    if autocast_dtype(torch.device("cpu")):
        return "is for models without autocast"
    if any(type(p) is not torch.nn.Parameter for p in parameters) or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    ):
        return "is for plain models: no parameter of another class, no hook"
    grouped = [experts for _, _, experts in grouped_layers(model)]
    if any(experts.paging is not None for experts in grouped):
        return "is for experts that are not in slots"
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not all(isinstance(layer.dispatcher, LocalDispatcher) for layer in layers):
        return "is for models on one rank"
    if any(experts.adapters is not None for experts in grouped):
        return "is for experts without adapters"
    return ""


def compiled_forward(model: Any, config: EngineConfig) -> CompiledForward | None:
    """Compiled forward of a model, of which no kind is compiled yet; None: run uncompiled."""
    if config.compile is False:
        return None
    detach_collected(model)
    problem = why_not_compiled(model)
    if problem and config.compile:
        raise ConfigError("compile", True, problem, "leave it out")
    wanted = config.compile or is_large(model)
    return CompiledForward(model) if wanted and not problem else None
