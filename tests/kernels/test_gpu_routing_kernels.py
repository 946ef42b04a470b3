"""Maps, moves, choice, split gradients and the whole layer on a real GPU. Nothing here runs without one."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.experts_case import ExpertsCase, draw_ids
from tests.support.memory import saved_bytes
from tests.support.poison import poisoned_empty
from torch.utils._pytree import tree_leaves

from expertmesh import MoELayer
from expertmesh.functional import combine, permute, route_metadata, unpermute
from expertmesh.kernels import route_metadata as kernels
from expertmesh.moe.routing_noise import key_noise
from expertmesh.ops import reference
from expertmesh.ops.topk import choose_experts

# what CUDA's part of PyTorch and its compiler warn of is no failure
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
DEVICE = "cuda"
# tokens, experts, choices: one launch, three launches, many experts, none
SHAPES = [(7, 5, 2), (128, 8, 8), (9000, 128, 8), (4096, 2047, 4), (0, 4, 2)]


@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot", "dropped", "sparse"])
def test_maps_on_the_gpu(kind):
    for num_tokens, num_experts, top_k in SHAPES:
        if num_tokens == 0 and kind == "zipf":
            continue
        ids = draw_ids(kind, num_tokens, min(top_k, num_experts), num_experts)
        with poisoned_empty():
            ours = route_metadata(ids.to(DEVICE), num_experts, backend="triton")
        oracle = route_metadata(ids, num_experts, backend="torch")
        for a, b in zip(tree_leaves(ours), tree_leaves(oracle), strict=True):
            assert torch.equal(a.cpu(), b)


def test_tiles_cover_every_row_once_on_the_gpu():
    ids = draw_ids("zipf", 5000, 2, 61).to(DEVICE)
    offsets = route_metadata(ids, 61).offsets_E
    expert, row, used = kernels.tile_table(offsets, ids.numel(), 64)
    count, bounds = int(used), offsets.tolist()
    covered = [0] * ids.numel()
    for e, first in zip(expert[:count].tolist(), row[:count].tolist(), strict=True):
        for r in range(first, min(first + 64, bounds[e + 1])):
            covered[r] += 1
    assert covered == [1] * ids.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moves_and_gradients_on_the_gpu(dtype):
    ids = draw_ids("dropped", 3000, 4, 33).to(DEVICE)
    maps = route_metadata(ids, 33)
    x = torch.randn(3000, 514, device=DEVICE).to(dtype).requires_grad_()
    rows = torch.randn(ids.numel(), 514, device=DEVICE).to(dtype).requires_grad_()
    for move, value in (
        (lambda v, name: permute(v, maps, backend=name), x),
        (lambda v, name: unpermute(v, maps, 4, backend=name), rows),
        (lambda v, name: combine(v, maps, 4, backend=name), rows),
    ):
        exact_value = value.detach().double().requires_grad_()
        with poisoned_empty():
            ours = move(value, "triton")
        theirs, exact = move(value, "torch"), move(exact_value, "torch")
        assert_two_times(ours.detach(), theirs.detach(), exact.detach(), what="rows")
        grad = torch.randn_like(ours)
        (a,) = torch.autograd.grad(ours, value, grad)
        (b,) = torch.autograd.grad(theirs, value, grad)
        (c,) = torch.autograd.grad(exact, exact_value, grad.double())
        assert_two_times(a, b, c, what="gradient")


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (257, 2), (1024, 8)])
def test_choice_on_the_gpu(score_function, num_experts, top_k):
    logits = torch.randn(2000, num_experts, device=DEVICE)
    leaf = logits.clone().requires_grad_()
    ids, weights, scores = choose_experts(leaf, top_k, score_function=score_function, normalize=True, backend="triton")
    assert torch.equal(ids, logits.topk(top_k).indices)  # no ties among random numbers
    d_weights, d_scores = torch.randn_like(weights), torch.randn_like(scores)
    (grad,) = torch.autograd.grad((weights, scores), leaf, (d_weights, d_scores))

    def plain(dtype):
        x = logits.to(dtype).requires_grad_()
        w, s = reference.weigh_experts(x, ids, score_function=score_function, normalize=True, weight_scale=1.0)
        total = (w * d_weights.to(dtype)).sum() + (s * d_scores.to(dtype)).sum()
        return w.detach(), s.detach(), torch.autograd.grad(total, x)[0]

    same, exact = plain(torch.float32), plain(torch.float64)
    for what, a, b, c in zip(("weights", "scores", "gradient"), (weights, scores, grad), same, exact, strict=True):
        assert_two_times(a.detach(), b, c, what=what)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_hot_expert_is_split_on_the_gpu(accumulate):
    """Narrow and hot: the weight gradients of one expert are the work of many programs."""
    case = ExpertsCase.draw((16_384, 256, 128, 16, 2), kind="hot", dtype=torch.bfloat16, device=DEVICE)

    def run():
        with poisoned_empty():
            return case.run("triton", recompute_h=accumulate)

    case.check(run)
    first = run()
    assert all(torch.equal(first[name], again) for name, again in run().items())


def test_weights_at_odd_places_on_the_gpu():
    """A shard of a flat buffer need not begin at 16 bytes."""
    case = ExpertsCase.draw((512, 256, 128, 8, 2), dtype=torch.bfloat16, device=DEVICE)
    expected = case.run("triton")
    for name in ("w_in_EGFD", "w_out_EDF"):
        tensor = getattr(case, name)
        flat = tensor.new_empty(tensor.numel() + 1)[1:]
        object.__setattr__(case, name, flat.copy_(tensor.flatten()).view_as(tensor))
    for name, value in case.run("triton").items():
        assert torch.equal(value, expected[name]), name


def make_layer(**options):
    layer = MoELayer(
        dim=512, hidden_dim=256, num_experts=32, top_k=4, seed=0, device=DEVICE, dtype=torch.bfloat16, **options
    )  # fmt: skip
    key_noise(layer, seed=0, step=0)
    return layer


def step_of(layer, x):
    leaves = [x, *layer.parameters()]

    def run():
        y, stats = layer(x)
        loss = y.float().square().mean() + stats.aux_loss + stats.z_loss
        return (y, *torch.autograd.grad(loss, leaves))

    return run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_function": "sigmoid", "z_loss_weight": 1e-3, "router_noise": "gumbel"},
        {"capacity_factor": 1.0},
    ],
    ids=["dropless", "sigmoid", "capacity"],
)
def test_the_layer_never_waits_and_fits_a_graph_on_the_gpu(options):
    layer = make_layer(**options).train()
    x = torch.randn(1024, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    run = step_of(layer, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for ours, expected in zip(captured, run(), strict=True):
            assert torch.equal(ours, expected)


def test_the_layer_saves_x_and_h_on_the_gpu():
    layer = make_layer()
    T, D, F, E, K = 4096, 512, 256, 32, 4
    x = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    layer(x)
    found = saved_bytes(lambda: layer(x), parameters=layer.parameters())
    x_and_h = 2 * (T * D + T * K * 2 * F)
    maps_and_router = 4 * (E + 1 + 4 * T * K) + T * (8 * E + 24 * K)
    assert x_and_h <= found <= 1.01 * (x_and_h + maps_and_router)


def test_the_layer_compiles_with_inductor_on_the_gpu():
    layer = make_layer().train()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for number, num_tokens in enumerate((512, 301)):
        x = torch.randn(num_tokens, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            y, _ = compiled(x)
        expected, _ = layer(x)
        grads = [torch.autograd.grad(v.float().sum(), (x, layer.experts.w_in)) for v in (y, expected)]
        exact = expected.detach().double()
        assert_two_times(y.detach(), expected.detach(), exact, what="y", dtype=torch.bfloat16)
        for a, b in zip(*grads, strict=True):
            assert_two_times(a, b, b.double(), what="gradient", dtype=torch.bfloat16)
