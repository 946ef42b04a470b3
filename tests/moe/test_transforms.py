"""Derivatives by other ways than backward, and programs that are recorded: right, or refused in one line."""

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_close_to_difference
from torch.autograd import forward_ad

from expertmesh import MoELayer, functional
from expertmesh.errors import ConfigError
from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.ops.experts.weighted_activation import weighted_activation

# torch's own forward-mode differentiation uses what torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture
def layer(request):
    return MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0, dtype=torch.float64, **request.param)


X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(6, 8).sin()
V = X.cos()


def dual(call):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(X, V))


def dual_weights(layer):
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p.detach(), p.detach()) for n, p in layer.named_parameters()}
        return torch.func.functional_call(layer, duals, (X,))


OUTPUT = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (V,)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "vjp": lambda f: torch.func.vjp(f, X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum())(X),
    "linearize": lambda f: torch.func.linearize(f, X),
    "vmap": lambda f: torch.vmap(f)(torch.stack([X, 2 * X])),
    "dual": dual,
}
SETTINGS = [{}, {"backend": "reference"}, {"capacity_factor": 1.0}]


@pytest.mark.parametrize("name", OUTPUT)
@pytest.mark.parametrize("layer", SETTINGS, ids=str, indirect=True)
def test_transforms_of_a_layer_are_refused(layer, name):
    with pytest.raises(ConfigError, match=r"a MoE layer .*; use torch\.autograd"):
        OUTPUT[name](lambda x: layer(x)[0])
    with pytest.raises(ConfigError, match="a MoE layer"):
        OUTPUT[name](lambda x: layer(x)[1].aux_loss * x)


@pytest.mark.parametrize("layer", [{}], indirect=True)
def test_transforms_of_parameters_are_refused(layer):
    values = {name: p.detach() for name, p in layer.named_parameters()}
    with pytest.raises(ConfigError, match=r"torch\.func"):
        torch.func.grad(lambda p: torch.func.functional_call(layer, p, (X,))[0].sum())(values)
    with pytest.raises(ConfigError, match="tangents"):
        dual_weights(layer)


def operators():
    ids_TK = torch.tensor([[0, 1], [1, 2], [0, 2]])
    metadata = functional.route_metadata(ids_TK, 3)
    w_in, w_out = torch.ones(3, 1, 4, 8).double(), torch.ones(3, 8, 4).double()
    weights = torch.ones(3, 2).double()
    return {
        "permute": lambda x: functional.permute(x[:3], metadata),
        "unpermute": lambda x: functional.unpermute(x, metadata, 2),
        "combine": lambda x: functional.combine(x, metadata, 2),
        "moe_mlp": lambda x: functional.moe_mlp(x[:3], w_in, w_out, weights, metadata, activation="gelu"),
        "grouped_linear": lambda x: functional.grouped_linear(x, w_out.mT, metadata.offsets_E),
        "adapted_linear": lambda x: adapted_linear(
            x, w_out.mT, metadata.offsets_E, w_in[:, 0, :2], w_out[:, :4, :2], 1.0
        ),
        "weighted_activation": lambda x: weighted_activation(x, X[:, 0], activation="swiglu"),
        "choose_experts": lambda x: functional.choose_experts(
            x.float(), 2, score_function="softmax", normalize=True, backend="triton"
        )[1],
    }


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap", "dual"])
@pytest.mark.parametrize("name", operators())
def test_transforms_of_operators_are_refused(name, transform):
    with pytest.raises(ConfigError, match=name):
        OUTPUT[transform](operators()[name])


@pytest.mark.parametrize("layer", SETTINGS[:2], ids=str, indirect=True)
def test_what_the_message_advises_is_right(layer):
    def f(x):
        return layer(x)[0]

    step = 1e-6
    ratio = (f(X + step * V) - f(X - step * V)) / (2 * step)
    jacobian = torch.autograd.functional.jacobian(f, X)
    along = torch.einsum("tdse,se->td", jacobian, V)
    weight = X.square()
    found, expected = ((weight * t).sum().item() for t in (along, ratio))
    assert_close_to_difference(found, expected, what="the Jacobian along V", scale=abs(expected))
    if layer.options.backend == "reference":
        vectorized = torch.autograd.functional.jacobian(f, X, vectorize=True)
        assert_close_fp64(vectorized, jacobian, what="the vectorised Jacobian")
    else:
        with pytest.raises(ConfigError, match="the backward of moe_mlp of several gradients"):
            torch.autograd.functional.jacobian(f, X, vectorize=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"capacity_factor": 1.0, "drop_policy": "first"},
        {"num_shared_experts": 1, "score_function": "sigmoid"},
    ],
    ids=str,
    indirect=True,
)
def test_an_exported_layer_takes_any_number_of_tokens(layer, training):
    layer.train(training)
    program = torch.export.export(layer, (X,), dynamic_shapes=({0: torch.export.Dim("T")},))
    module = program.module()
    for num_tokens in (2, 31, 33, 600):
        x = torch.linspace(-2, 2, num_tokens * 8, dtype=torch.float64).reshape(-1, 8).cos()
        got, expected = module(x), layer(x)
        assert torch.equal(got[1].topk_expert_ids_TK, expected[1].topk_expert_ids_TK)
        assert_close_fp64(got[0], expected[0], what=f"{num_tokens} tokens")


@pytest.mark.parametrize("layer", SETTINGS, ids=str, indirect=True)
def test_a_torchscript_trace_is_refused_in_one_line(layer):
    with pytest.raises(ConfigError, match=r"torch\.jit\.trace: .*; use torch\.export") as info:
        torch.jit.trace(layer.eval(), (X,))
    assert "\n" not in str(info.value)
