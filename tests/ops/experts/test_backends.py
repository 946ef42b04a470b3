"""One table decides who computes the experts, and experts' weights come in formats and slots."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.oracle.numerics import assert_two_times, relative_error

import expertmesh
from expertmesh.functional import route_metadata
from expertmesh.kernels.cpu.library import loaded
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.checked_arguments import checked
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import FORMATS, ExpertWeights, WeightFormat

SOURCE = Path(expertmesh.__file__).parent
E, D, F, T, K = 5, 32, 48, 7, 2


def weights(dtype=torch.float32, sizes=(F,), **options):
    generator = torch.Generator().manual_seed(1)
    w_in = torch.randn(E, 2, F, D, generator=generator).to(dtype)
    w_out = torch.randn(E, D, F, generator=generator).to(dtype)
    if len(sizes) == 1:
        return ExpertWeights.of(w_in, w_out, "swiglu", **options)
    return ExpertWeights.of(w_in.split(sizes, 2), w_out.split(sizes, 2), "swiglu", **options)


def make_call(experts, **options):
    generator = torch.Generator().manual_seed(2)
    ids_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    ids_TK[3, 1] = E  # no expert
    weights_TK = torch.rand(T, K, generator=generator)
    x_TD = torch.randn(T, D, generator=generator).to(options.pop("dtype", torch.float32))
    options = {"backend": "auto", "ids_TK": ids_TK} | options
    return ExpertsCall(x_TD, weights_TK, experts, **options)


def chosen(call):
    """The name of the backend that computes a call."""
    for name, backend in BACKENDS.items():
        if backend.serves(call):
            return name
    maps = route_metadata(call.ids_TK, call.experts.num_slots)
    call = checked(call, maps)
    return next(name for name, backend in BACKENDS.items() if backend.serves(call))


def names(*wanted):
    """Names of rows, or of those that compute where the native kernels are not."""
    if loaded().kernels is not None:
        return set(wanted)
    return {"torch" if name == "native" else name for name in wanted}


LOW_RANK = LowRank(torch.zeros(E, 2, D), torch.zeros(E, 2 * F, 2), 1.0, False)


@pytest.mark.parametrize(
    ("given", "options", "name"),
    [
        ({}, {}, "native"),
        ({"sizes": (16, 32)}, {}, "torch"),
        ({"b_out": torch.zeros(E, D)}, {}, "native"),
        ({}, {"backend": "reference"}, "reference"),
        ({}, {"backend": "triton"}, "triton"),
        ({"sizes": (16, 32)}, {"batch_invariant": True}, "native"),
        ({}, {"batch_invariant": True, "backend": "triton"}, "triton"),
        ({}, {"adapters": (LOW_RANK, None)}, "adapters"),
        ({"dtype": torch.float64}, {"dtype": torch.float64, "batch_invariant": True}, "torch"),
    ],
)
def test_the_first_that_serves_computes(given, options, name):
    with torch.no_grad():
        assert {chosen(make_call(weights(**given), **options))} == names(name)


def test_every_backend_computes_the_same():
    exact = compute(make_call(weights(torch.float64), dtype=torch.float64)._replace(backend="reference"))
    plain = compute(make_call(weights(), backend="reference"))
    found = set()
    for options in (
        {},
        {"backend": "triton"},
        {"batch_invariant": True},
        {"adapters": (LOW_RANK, None)},
    ):
        for own in (weights(), weights(sizes=(16, 32))):
            call = make_call(own, **options)
            found.add(chosen(call))
            y_TD = compute(call)
            assert_two_times(y_TD, plain, exact, what=str(options), dtype=torch.float32)
    assert found == names("native", "torch", "triton", "adapters")


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_slots(backend):
    """Experts that lie elsewhere, some not in use: the same to the bit."""
    own = weights()
    slot_of_expert_E = torch.tensor([4, 0, 6, 1, 3])
    stored = torch.full((7, 2, F, D), torch.nan), torch.full((7, D, F), torch.nan)
    for tensor, given in zip(stored, (own.w_in[0], own.w_out[0]), strict=True):
        tensor[slot_of_expert_E] = given
    elsewhere = replace(ExpertWeights.of(*stored, "swiglu"), slot_of_expert_E=slot_of_expert_E)
    assert (elsewhere.num_experts, elsewhere.num_slots) == (E, 7)
    with torch.no_grad():
        y_TD = compute(make_call(elsewhere, backend=backend))
        assert torch.equal(y_TD, compute(make_call(own, backend=backend)))
    for found, given in zip(elsewhere.in_order().parameters, own.parameters, strict=True):
        assert torch.equal(found, given)


class HalfBytes(WeightFormat):
    """int8 with a scale per expert, as a format that only "torch" and what joins slices read."""

    backends = ("torch", "reference")

    def num_bytes(self, shape, dtype):
        E, G, F, D = shape
        return E * (G + 1) * F * D + 2 * E * 4

    def unpack(self, experts, e, dtype):
        w_in = experts.w_in_EGFD[e].flatten(0, 1) * experts.scales_in[e]
        return w_in.to(dtype), (experts.w_out_EDF[e] * experts.scales_out[e]).to(dtype)


@pytest.fixture
def half_bytes():
    FORMATS["half_bytes"] = HalfBytes()
    yield
    del FORMATS["half_bytes"]


def packed(w):
    scales = w.flatten(1).abs().amax(1) / 127
    return (w / scales.view(-1, *[1] * (w.dim() - 1))).round().to(torch.int8), scales


@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"batch_invariant": True}])
@pytest.mark.parametrize("sizes", [(F,), (16, 32)])
def test_a_format(half_bytes, sizes, options):
    """A format is one entry: its weights are computed with as they are stored, expert by expert, with a gradient for
    the tokens."""
    dense = weights(sizes=sizes)
    ins, scales_in = zip(*map(packed, dense.w_in), strict=True)
    outs, scales_out = zip(*map(packed, dense.w_out), strict=True)
    own = ExpertWeights(ins, outs, "swiglu", format="half_bytes", scales_in=scales_in, scales_out=scales_out)
    again = ExpertWeights.of(
        [i * s.view(-1, 1, 1, 1) for i, s in zip(ins, scales_in, strict=True)],
        [o * s.view(-1, 1, 1) for o, s in zip(outs, scales_out, strict=True)],
        "swiglu",
    )
    results = []
    for experts in (own, again):
        call = make_call(experts, **options)
        x_TD = call.x_TD.requires_grad_()
        y_TD = compute(call)
        results.append((y_TD.detach(), *torch.autograd.grad(y_TD.square().sum(), x_TD)))
    for found, expected in zip(*results, strict=True):
        if options.get("batch_invariant"):  # its products are of single experts, the others' of the kernels in C
            assert relative_error(found, expected) < 1e-6
        else:
            assert torch.equal(found, expected)
    if len(sizes) == 1:
        shape = own.slices()[0].shape
        assert own.num_bytes == FORMATS["half_bytes"].num_bytes(shape, torch.float32)
        assert dense.num_bytes == FORMATS["dense"].num_bytes(shape, torch.float32)


def sources(*folders):
    return [path for folder in folders for path in (SOURCE / folder).rglob("*.py")]


def test_one_place_chooses():
    """Whether a backend serves is said by the rows of `BACKENDS`, and asked where the experts are computed."""
    says, asks = set(), set()
    for path in sources("ops/experts", "moe", "parallel"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if text.startswith(("native.serves(", "Backend(")):
                says.add(path.name)
            if text == "backend.serves(call)":
                asks.add(path.name)
    assert (says, asks) == ({"backends.py"}, {"moe_mlp.py"})


def test_one_place_tells_a_tensor_from_its_slices():
    tells = set()
    for path in sources("ops", "moe", "parallel", "integrations"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.BinOp) else ""
            if text.startswith(("isinstance(w_", "isinstance(parameters.")):
                tells.add(path.name)
            if text == "Tensor | Sequence[Tensor]":
                tells.add(path.name)
    assert tells == {"weights.py"}
