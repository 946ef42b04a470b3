"""The experts' kernels on a real GPU: exactness, determinism, graphs, no synchronisation. Nothing here runs without
one."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.experts_builds import GPU_DTYPES, GPU_HOT_SHAPE, GPU_SHAPES, gpu_options
from tests.support.experts_case import ExpertsCase
from tests.support.poison import poisoned_empty

from expertmesh.kernels import tiles
from expertmesh.ops import reference
from expertmesh.ops.experts.moe_mlp import moe_mlp
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata

# what CUDA's part of PyTorch warns of (TF32, the synchronisation debug mode) is no failure
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot", "dropped"])
def test_two_times_rule_on_the_gpu(dtype, kind):
    for number, shape in enumerate(GPU_SHAPES):
        if kind == "zipf" and shape[0] == 0:  # nothing can be drawn from no odds
            continue
        if kind == "hot" and number == 0:
            shape = GPU_HOT_SHAPE
        case = ExpertsCase.draw(shape, kind=kind, dtype=dtype, device=DEVICE, **gpu_options(number))

        def run(case=case):
            with poisoned_empty():
                return case.run("triton")

        case.check(run)


@pytest.mark.parametrize("activation", ["reglu", "gelu", "relu", "relu2", "silu"])
def test_activations_on_the_gpu(activation):
    case = ExpertsCase.draw((512, 256, 192, 8, 2), activation=activation, dtype=torch.bfloat16, device=DEVICE)
    case.check(lambda: case.run("triton"))


def test_tf32_is_used_only_where_allowed_on_the_gpu():
    case = ExpertsCase.draw((512, 1024, 256, 4, 2), device=DEVICE)
    exact = case.run("triton")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        fast = case.run("triton")
        case.check(lambda: fast)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not torch.equal(exact["y"], fast["y"])


def test_descriptors_and_pointers_agree_on_the_gpu(use_config):
    if tiles.architecture(torch.device(DEVICE)) != "sm_90":
        pytest.skip("only Hopper has both paths")
    case = ExpertsCase.draw((1000, 520, 328, 7, 2), dtype=torch.bfloat16, device=DEVICE)
    with_descriptors = case.run("triton")
    use_config(tma=False)
    plain = case.run("triton")
    for name, value in with_descriptors.items():
        assert torch.equal(value, plain[name]), name


def test_twenty_runs_give_the_same_bits_on_the_gpu():
    case = ExpertsCase.draw((4096, 1024, 768, 64, 8), kind="zipf", dtype=torch.bfloat16, bias=True, device=DEVICE)
    first = case.run("triton")
    for _ in range(20):
        again = case.run("triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


def step(case, ids):
    """Forward and backward from expert ids; what a training step captures."""
    leaves = case.leaves()
    x, w_in, w_out, weights, *_ = leaves

    def run():
        metadata = route_metadata(ids, w_in.shape[0])
        y = moe_mlp(x, w_in, w_out, weights, metadata, activation=case.activation)
        return (y, *torch.autograd.grad(y, (x, w_in, w_out, weights), case.grad_TD))

    return run, (x, weights)


def test_graph_capture_and_replay_with_new_routing_on_the_gpu():
    case = ExpertsCase.draw((2048, 512, 256, 16, 2), dtype=torch.bfloat16, device=DEVICE)
    ids = torch.randint(0, 16, (2048, 2), device=DEVICE)
    run, _ = step(case, ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        ids.copy_(torch.randint(0, 16, (2048, 2), device=DEVICE))
        graph.replay()
        for ours, expected in zip(captured, run(), strict=True):
            assert torch.equal(ours, expected)


def test_no_synchronisation_on_the_gpu():
    case = ExpertsCase.draw((512, 256, 128, 8, 2), dtype=torch.bfloat16, device=DEVICE)
    run, _ = step(case, torch.randint(0, 8, (512, 2), device=DEVICE))
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("E", [6, 9])
def test_offsets_beyond_int32_on_the_gpu(E):
    """A w_in of 3.2 GB, where a sum of strides in Triton's driver passes 2**31, or of more than 2**31 elements; the
    last expert is used."""
    F, D = 8192, 16384
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    w_in = torch.zeros(E, 2, F, D, dtype=torch.bfloat16, device=DEVICE)
    w_in[-1] = torch.randn(2, F, D, dtype=torch.bfloat16, device=DEVICE) / 128
    w_out = torch.zeros(E, D, F, dtype=torch.bfloat16, device=DEVICE)
    w_out[-1] = torch.randn(D, F, dtype=torch.bfloat16, device=DEVICE) / 90
    x = torch.randn(300, D, dtype=torch.bfloat16, device=DEVICE)
    weights = torch.rand(300, 1, device=DEVICE)
    ids = torch.full((300, 1), E - 1, device=DEVICE)
    maps = reference.route_metadata(ids, E)
    metadata = RouteMetadata(*maps)
    y = moe_mlp(x, w_in, w_out, weights, metadata, activation="swiglu", backend="triton")
    one = RouteMetadata(*reference.route_metadata(ids - (E - 1), 1))

    def plain(dtype):
        return moe_mlp(
            x.to(dtype),
            w_in[-1:].to(dtype),
            w_out[-1:].to(dtype),
            weights.to(dtype),
            one,
            activation="swiglu",
            backend="reference",
        )

    assert_two_times(y, plain(torch.bfloat16), plain(torch.float64), what="y")


def test_compiled_and_under_autocast_on_the_gpu():
    w_in = torch.randn(8, 2, 128, 256, device=DEVICE, requires_grad=True)
    w_out = torch.randn(8, 256, 128, device=DEVICE, requires_grad=True)
    router = torch.randn(256, 8, device=DEVICE, requires_grad=True)

    def block(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            weights, ids = (x.float() @ router).softmax(-1).topk(2)
            metadata = route_metadata(ids, 8)
            return moe_mlp(x, w_in, w_out, weights, metadata, activation="swiglu")

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, num_tokens in enumerate((512, 300, 77)):
        x = torch.randn(num_tokens, 256, device=DEVICE, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            y = compiled(x)
        expected = block(x)
        assert torch.equal(y, expected)
        leaves = (x, w_in, w_out, router)
        ours = torch.autograd.grad(y.float().sum(), leaves)
        theirs = torch.autograd.grad(expected.float().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
