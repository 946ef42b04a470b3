"""Traced functions cut into compiled loops and operators that a compiler would not improve.

For few tokens, Python and PyTorch take longer to call a model's hundreds of operators than these take to compute. Here
a function is traced once and cut at operators with their own implementation (matrix products, attention, experts). The
operators between two cuts become one Inductor loop. Equal pieces, as in all layers of a model, are compiled once.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.tools_common import legalize_graph

from expertmesh.ops.cpu.compiled_loops import compile_graph, while_tracing

Rewrite = Callable[[fx.Graph, fx.Node], fx.Node]
"""Function that replaces an operator's node by its own implementation or by a formula for the compiler, and returns the new node."""

_aten = torch.ops.aten
_FREE = {
    _aten.t.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.select.int,
    _aten.expand.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.slice.Tensor,
    _aten.split_with_sizes.default,
    _aten.split.Tensor,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.squeeze.dim,
    _aten.unbind.int,
    operator.getitem,
}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Views, and numbers computed from sizes: recomputed in each piece that needs them."""


def traced(
    function: Callable[..., Any],
    example: Iterable[Tensor],
    weights: Iterable[Tensor],
) -> fx.GraphModule:
    """Trace a function of tensors with symbolic sizes (0 and 1 excepted) and of weights with fixed sizes.

    Args:
        function: takes the example's tensors, then the weights; returns a tuple of tensors.
        example: tensors of symbolic sizes; equal sizes are traced as always equal.
        weights: tensors of fixed sizes.

    Raises:
        ValueError: the function's control flow depends on the sizes.
    """
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


def in_pieces(
    module: fx.GraphModule,
    own_ways: Mapping[Any, Rewrite],
    loops: dict[Any, Callable[..., Any]],
    compile_piece: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]] = compile_graph,
) -> fx.GraphModule:
    """Compile the operators between those that have their own implementation.

    Args:
        module: a result of `traced`, changed in place.
        own_ways: rewrites by operator. ATen nodes that they insert are compiled with their piece; Python calls are kept
            as they are.
        loops: cache of compiled pieces by their content; new ones are added.
        compile_piece: compiler of a piece, given example values of its inputs.

    Returns:
        The rewritten module, which takes the same arguments.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in own_ways:
            with graph.inserting_before(node):
                new = own_ways[node.target](graph, node)
            if new is not node:
                new.meta.setdefault("val", node.meta.get("val"))
                node.replace_all_uses_with(new)
                graph.erase_node(node)
    graph.eliminate_dead_code()
    for piece in _pieces(graph):
        _replace_piece(graph, piece, loops, compile_piece)
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_free(node):
            graph.erase_node(node)
    legalize_graph(module)
    module.graph.lint()
    module.recompile()
    return module


def _is_free(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        # an item of a loop's or an operator's results belongs where these are computed
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_free(source)
    return node.target in _FREE or isinstance(node.meta.get("val"), _NUMBERS)


def _is_opaque(node: fx.Node) -> bool:
    """Whether a node is called as it is: a Python function that a rewrite has inserted, or no call at all."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_opaque(source)
    return node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload)


def _pieces(graph: fx.Graph) -> list[list[fx.Node]]:
    """Groups of nodes to compile together, in the order of the graph."""
    pieces: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if _is_free(node):
            continue
        if _is_opaque(node):
            pieces.append([])
        else:
            pieces[-1].append(node)
    return [piece for piece in pieces if piece]


def _replace_piece(
    graph: fx.Graph,
    piece: list[fx.Node],
    loops: dict[Any, Callable[..., Any]],
    compile_piece: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
) -> None:
    """Replace the nodes of a piece by one call of its compiled loop."""
    inside = set(piece)
    own = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in inside or _is_free(node):
                for one in node.all_input_nodes:
                    copied(one)
                args: Any = fx.map_arg(node.args, copies.__getitem__)
                kwargs: Any = fx.map_arg(node.kwargs, copies.__getitem__)
                # new names, so that equal pieces have equal text
                copies[node] = own.create_node(node.op, node.target, args, kwargs)
                copies[node].meta = dict(node.meta)
            else:
                inputs.append(node)
                copies[node] = own.placeholder(f"x{len(inputs)}")
                copies[node].meta = dict(node.meta)
        return copies[node]

    # placeholders must come first in a graph
    for node in piece:
        for one in _roots(node, inside):
            copied(one)
    for node in piece:
        copied(node)
    outputs = [
        node
        for node in piece
        if isinstance(node.meta.get("val"), Tensor) and _is_needed_outside(node, inside)
    ]
    if not outputs:
        return
    own.output(tuple(copied(node) for node in outputs))
    key = (str(own), *(_kind(node.meta["val"]) for node in inputs))
    if key not in loops:
        run = compile_piece(fx.GraphModule({}, own), [node.meta["val"] for node in inputs])
        loops[key] = _named(run, f"piece_{len(loops)}")
    with graph.inserting_after(piece[-1]):
        call = graph.call_function(loops[key], tuple(inputs))
    for index, node in enumerate(outputs):
        with graph.inserting_after(call):
            found = graph.call_function(operator.getitem, (call, index))
        found.meta = dict(node.meta)
        node.replace_all_uses_with(found, delete_user_cb=lambda user: user not in inside)
    for node in reversed(piece):
        _erase(graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a node and the views of it from the graph."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function so that it has a name, which graphs ask for."""

    def piece(*tensors: Tensor) -> Any:
        return run(*tensors)

    piece.__name__ = name
    return piece


def _is_needed_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node outside the piece uses this node or a view of it."""
    return any(
        _is_needed_outside(user, inside) if _is_free(user) else user not in inside
        for user in node.users
    )


def _roots(node: fx.Node, inside: set[fx.Node]) -> Iterable[fx.Node]:
    """Nodes outside the piece whose values a node uses, through views."""
    for one in node.all_input_nodes:
        if one in inside:
            continue
        if _is_free(one):
            yield from _roots(one, inside)
        else:
            yield one


def _kind(value: Any) -> Any:
    return (
        (value.dtype, str(value.shape), str(value.stride())) if isinstance(value, Tensor) else value
    )
