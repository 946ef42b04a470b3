"""The operators with backend="triton": same results, gradients, compilation and graph safety as the others."""

import sys

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_two_times

from expertmesh import MoELayer
from expertmesh.errors import ConfigError
from expertmesh.functional import combine, permute, route_metadata, unpermute
from expertmesh.ops import backend as backends
from expertmesh.ops.backend import explain_backends, resolve_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_too_many_experts_are_told_or_left_to_torch():
    ids = torch.randint(0, 5000, (9, 2), device=DEVICE)
    assert route_metadata(ids, 5000).offsets_E.shape == (5001,)
    with pytest.raises(ConfigError, match="5000.*2047"):
        route_metadata(ids, 5000, backend="triton")


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_moves_and_their_gradients(backend):
    ids = torch.randint(0, 6, (11, 3), device=DEVICE)
    metadata = route_metadata(ids, 5)
    x = torch.randn(11, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    rows = torch.randn(33, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for move, value in (
        (lambda v, name: permute(v, metadata, backend=name), x),
        (lambda v, name: unpermute(v, metadata, 3, backend=name), rows),
        (lambda v, name: combine(v, metadata, 3, backend=name), rows),
    ):
        ours, theirs = move(value, backend), move(value, "torch")
        assert torch.equal(ours, theirs)
        grad = torch.randn_like(ours)
        (a,) = torch.autograd.grad(ours, value, grad)
        (b,) = torch.autograd.grad(theirs, value, grad)
        assert backend == "reference" or torch.equal(a, b)
        assert_close_fp64(a, b, what="gradient")


@pytest.mark.gpu
def test_gpu_graph_holds_the_moves():
    ids = torch.randint(0, 9, (300, 4), device="cuda")
    x = torch.randn(300, 64, device="cuda")

    def moves():
        metadata = route_metadata(ids, 8, backend="triton")
        return combine(permute(x, metadata, backend="triton"), metadata, 4, backend="triton")

    moves()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moves()
    ids.copy_(torch.randint(0, 9, (300, 4)))
    graph.replay()
    assert torch.equal(y, moves())


def test_auto_on_the_cpu_is_torch_and_doctor_says_so():
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "torch"
    reports = {report.name: report for report in explain_backends()}
    assert reports["triton"].works == torch.cuda.is_available()
    assert "Triton" in reports["triton"].why


def test_missing_and_old_triton(monkeypatch):
    assert backends._too_old("3.5.1") == "Triton 3.5.1 is too old, 3.6 or newer is needed"
    assert backends._too_old("3.10.0+gitab") is backends._find_triton_problem() is None
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "triton", None)
        assert backends._find_triton_problem() == "Triton is not installed"
    monkeypatch.setattr(backends, "TRITON_PROBLEM", "Triton is not installed")
    assert resolve_backend("auto", torch.device("cuda"), torch.float32) == "torch"
    with pytest.raises(ConfigError, match="Triton is not installed"):
        resolve_backend("triton", torch.device("cpu"), torch.float32)
    report = explain_backends()[0]
    assert not report.works
    assert "not installed" in report.why


@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "sigmoid", "num_expert_groups": 3, "num_limited_groups": 2},
        {"capacity_factor": 1.0, "drop_policy": "first", "activation": "gelu", "bias": True},
    ],
    ids=["groups", "capacity"],
)
def test_the_whole_layer(options):
    x, grad = torch.randn(20, 16, device=DEVICE), torch.randn(20, 16, device=DEVICE)
    state = None
    results = []
    for backend, dtype in (
        ("triton", torch.float32),
        ("torch", torch.float32),
        ("torch", torch.float64),
    ):
        layer = MoELayer(dim=16, hidden_dim=24, num_experts=6, top_k=2, backend=backend, dtype=dtype, **options).to(
            DEVICE
        )
        state = state or layer.state_dict()
        layer.load_state_dict(state)
        inputs = x.detach().to(dtype).requires_grad_()
        y, stats = layer(inputs)
        ((y * grad.to(dtype)).sum() + stats.aux_loss).backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y.detach(), "x": inputs.grad, **grads})
    ours, same, oracle = results
    for name in ours:
        assert_two_times(ours[name], same[name], oracle[name], what=name)
