"""The experts by the kernels in C as an operator: seen by graphs, fakes and autocast, with the bits of a plain call."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from expertmesh import ConfigError, MoELayer
from expertmesh.kernels.cpu.library import loaded
from expertmesh.ops.activation import num_branches
from expertmesh.ops.experts import native

D, F, E, K = 7, 5, 3, 2
NAME = "expertmesh.native_experts.default"
pytestmark = pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")


def arguments(num_tokens=5, *, dtype=torch.float32, activation="swiglu", bias=False):
    """Arguments of the operator."""
    torch.manual_seed(0)
    branches = num_branches(activation)
    x_TD, w_in = torch.randn(num_tokens, D), torch.randn(E, branches, F, D)
    given = (x_TD, w_in, torch.randn(E, D, F), torch.randn(E, branches, F), torch.randn(E, D))
    x_TD, w_in, w_out, b_in, b_out = (one.to(dtype) for one in given)
    ids_TK, weights_TK = torch.randint(0, E + 1, (num_tokens, K)), torch.rand(num_tokens, K)
    biases = (b_in, b_out) if bias else (None, None)
    return x_TD, ids_TK, weights_TK, w_in, w_out, None, None, *biases, activation, E


OPERATORS = {
    "FP32": {},
    "BF16": {"dtype": torch.bfloat16},
    "biases": {"bias": True},
    "one branch": {"activation": "relu2"},
    "one token": {"num_tokens": 1},
    "no token": {"num_tokens": 0},
}


@pytest.mark.parametrize("options", OPERATORS.values(), ids=OPERATORS)
def test_the_operator_keeps_the_rules_of_operators(options):
    torch.library.opcheck(native._operator, arguments(**options))


@pytest.mark.parametrize("options", OPERATORS.values(), ids=OPERATORS)
def test_a_fake_has_the_shape_and_type_of_the_result(options):
    given = arguments(**options)
    made = native._operator(*given)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in given]
        fake = native._operator(*fakes)
    assert (fake.shape, fake.dtype, fake.stride()) == (made.shape, made.dtype, made.stride())


def test_an_id_out_of_range_is_refused_by_the_operator():
    given = arguments()
    with pytest.raises(ConfigError, match="expert_ids holds 9; it must be from 0 to 3"):
        native._operator(given[0], torch.full_like(given[1], 9), *given[2:])


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def layer(dtype):
    options = {"num_experts": E, "top_k": K, "batch_invariant": True, "seed": 1}
    return MoELayer(dim=D, hidden_dim=F, dtype=dtype, **options).eval()


WHOLE = {  # type of the layer, of x, context
    "FP32": (torch.float32, torch.float32, nullcontext),
    "BF16": (torch.bfloat16, torch.bfloat16, nullcontext),
    "autocast": (torch.bfloat16, torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize(("dtype", "given", "context"), WHOLE.values(), ids=WHOLE)
def test_a_compiled_layer_is_one_graph_with_the_operator(dtype, given, context):
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return module.forward

    moe = layer(dtype)
    compiled = torch.compile(moe, backend=keep, fullgraph=True, dynamic=True)
    with torch.no_grad(), context():
        for num_tokens in (2, 5, 9):
            x_TD = torch.randn(num_tokens, D, dtype=given)
            assert torch.equal(compiled(x_TD)[0], moe(x_TD)[0])
    assert [targets(graph).count(NAME) for graph in graphs] == [1]


def test_an_exported_layer_has_the_operator():
    moe, x_TD = layer(torch.float32), torch.randn(5, D)
    with torch.no_grad():
        program = torch.export.export(moe, (x_TD,))
        assert torch.equal(program.module()(x_TD)[0], moe(x_TD)[0])
    assert targets(program.graph).count(NAME) == 1


def test_a_compiled_layer_that_wants_gradients_has_no_such_operator():
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return module.forward

    compiled = torch.compile(layer(torch.float32), backend=keep, fullgraph=True)
    compiled(torch.randn(5, D))[0].sum().backward()
    assert [targets(graph).count(NAME) for graph in graphs] == [0]
