"""A traced function as compiled loops, and between them the operators that a compiler would not improve.

A large model computes few tokens in less time than Python and PyTorch take to name its hundreds of operators. Here a function is
traced once, cut at the operators that have a way of their own (matrix products, attention, experts), and what is between two cuts
becomes one loop of Inductor's. Equal pieces, as all layers of a model have, are compiled once.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.tools_common import legalize_graph

from expertmesh.ops.cpu.compiled_loops import compile_graph, while_tracing

Rewrite = Callable[[fx.Graph, fx.Node], fx.Node]
"""Puts an operator's own way, or a formula for the compiler, in the place of its node, and returns what stands for it."""

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
"""Views, and numbers made of sizes: done where they are needed, in each piece again."""


def traced(
    function: Callable[..., Any],
    example: Iterable[Tensor],
    weights: Iterable[Tensor],
    formulas: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """The graph of a function of tensors, first of any sizes (but 0 and 1 where those of the example are neither), then of fixed ones.

    Args:
        function: of the example's tensors and the weights; returns a tuple of tensors.
        example: tensors whose sizes differ where they may.
        weights: tensors whose sizes stay.
        formulas: what stands for an operator, in operators that the compiler knows.

    Raises:
        ValueError: what the function does depends on the sizes.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)
    given = [mode.from_tensor(t) for t in example]
    given += [mode.from_tensor(t, static_shapes=True) for t in weights]
    with while_tracing(), torch.no_grad(), mode:
        module: fx.GraphModule = make_fx(function, dict(formulas or {}))(*given)
    if sizes.guards:
        raise ValueError(f"the function goes another way for other sizes: {sizes.guards[0].expr}")
    module.graph.eliminate_dead_code()
    return module


def in_pieces(
    module: fx.GraphModule, own_ways: Mapping[Any, Rewrite], loops: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """Compile what is between the operators that have ways of their own.

    Args:
        module: as `traced` gave it; it is changed.
        own_ways: by operator. Nodes that they put into the graph are looked at again, unless they call a function of Python.
        loops: pieces that are compiled already, by what they compute; new ones are added.

    Returns:
        A function of the same arguments.
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
        _compile_piece(graph, piece, loops)
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
        # of a loop's or an operator's several results: that is where they are
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_free(source)
    return node.target in _FREE or isinstance(node.meta.get("val"), _NUMBERS)


def _is_opaque(node: fx.Node) -> bool:
    """Whether a node is called as it is: a function of Python that a rewriting has put there."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_opaque(source)
    return node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload)


def _pieces(graph: fx.Graph) -> list[list[fx.Node]]:
    """What is to be compiled together, in the order of the graph."""
    pieces: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if _is_free(node):
            continue
        if _is_opaque(node):
            pieces.append([])
        else:
            pieces[-1].append(node)
    return [piece for piece in pieces if piece]


def _compile_piece(
    graph: fx.Graph, piece: list[fx.Node], loops: dict[Any, Callable[..., Any]]
) -> None:
    """Put one call in the place of the nodes of a piece."""
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
                # a name of its own, so that equal pieces read alike
                copies[node] = own.create_node(node.op, node.target, args, kwargs)
                copies[node].meta = dict(node.meta)
            else:
                inputs.append(node)
                copies[node] = own.placeholder(f"x{len(inputs)}")
                copies[node].meta = dict(node.meta)
        return copies[node]

    # placeholders come first in a graph
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
        run = compile_graph(fx.GraphModule({}, own), [node.meta["val"] for node in inputs])
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
    """Take a node and views of it out of the graph."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function for a graph, which asks for its name."""

    def piece(*tensors: Tensor) -> Any:
        return run(*tensors)

    piece.__name__ = name
    return piece


def _is_needed_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether something that is not of the piece uses a node, as it is or as a view."""
    return any(
        _is_needed_outside(user, inside) if _is_free(user) else user not in inside
        for user in node.users
    )


def _roots(node: fx.Node, inside: set[fx.Node]) -> Iterable[fx.Node]:
    """What a node of a piece takes from outside, through views."""
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
