"""Row moves are exact copies, the sum per token is the FP32 sum, and gradients of any order are right."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times, sums_of_terms
from tests.support.poison import poisoned_empty

from expertmesh.errors import ConfigError
from expertmesh.functional import combine, permute, route_metadata, unpermute

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(0, 2, 3, 4), (1, 1, 1, 1), (7, 3, 5, 5), (40, 2, 4, 33), (9, 8, 8, 16)]


def _routing(num_tokens, top_k, num_experts, *, max_rows=None, device="cpu"):
    ids = torch.randint(0, num_experts + 1, (num_tokens, top_k), device=device)
    return ids, route_metadata(ids, num_experts, max_rows=max_rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_moves_are_copies(shape, dtype):
    num_tokens, top_k, num_experts, dim = shape
    ids, metadata = _routing(num_tokens, top_k, num_experts)
    live = int(metadata.offsets_E[-1])
    x = torch.randn(num_tokens, dim).to(dtype)
    with poisoned_empty():
        rows = permute(x, metadata)
        slots = unpermute(rows, metadata, top_k)
    assert torch.equal(rows[:live], x[metadata.token_of_row_N[:live].long()])
    assert torch.equal(rows[live:], torch.zeros_like(rows[live:]))
    expected = torch.where((ids < num_experts)[..., None], x[:, None].expand(-1, top_k, -1), 0)
    assert torch.equal(slots, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_combine_sums_live_rows_once_rounded(shape, dtype):
    num_tokens, top_k, num_experts, dim = shape
    _, metadata = _routing(num_tokens, top_k, num_experts)
    rows = torch.randn(num_tokens * top_k, dim).to(dtype)
    rows[int(metadata.offsets_E[-1]) :] = float("nan")  # a dead row may hold anything
    with poisoned_empty():
        y = combine(rows, metadata, top_k)
    slots = unpermute(rows, metadata, top_k)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sums = sums_of_terms(slots.double(), 1, dtype=wide)
    plain, exact = slots.to(wide).sum(1).to(dtype), slots.double().sum(1)
    assert_two_times(y, plain, exact, what="combine", sums=sums)


def test_max_rows_shortens_the_rows():
    ids = torch.tensor([[0, 2], [1, 2], [2, 2]])  # 2 means no expert
    metadata = route_metadata(ids, 2, max_rows=3)
    x = torch.randn(3, 4)
    rows = permute(x, metadata)
    assert rows.shape == (3, 4)
    assert torch.equal(rows[:2], x[:2])
    assert torch.equal(combine(rows, metadata, 2), torch.cat([x[:2], torch.zeros(1, 4)]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_gradients_of_first_and_second_order(shape, backend):
    num_tokens, top_k, num_experts, dim = shape
    _, metadata = _routing(num_tokens, top_k, num_experts, device=DEVICE)
    x, rows = (
        torch.randn(n, dim, dtype=torch.float64, device=DEVICE, requires_grad=True)
        for n in (num_tokens, num_tokens * top_k)
    )
    for fn, inputs in (
        (lambda v: permute(v, metadata, backend=backend), (x,)),
        (lambda v: unpermute(v, metadata, top_k, backend=backend), (rows,)),
        (lambda v: combine(v, metadata, top_k, backend=backend), (rows,)),
    ):
        torch.autograd.gradcheck(fn, inputs, fast_mode=backend == "triton")
        torch.autograd.gradgradcheck(fn, inputs, fast_mode=backend == "triton")


@pytest.mark.parametrize(("backend", "sizes"), [("torch", (6, 9, 33)), ("triton", (6, 9))])
def test_compile_without_breaks_or_recompiles(backend, sizes):
    def moves(x, ids):
        metadata = route_metadata(ids, 4, backend=backend)
        rows = permute(x, metadata, backend=backend)
        slots = unpermute(rows, metadata, 2, backend=backend)
        return combine(rows, metadata, 2, backend=backend) + slots.sum(1)

    compiled = torch.compile(moves, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, num_tokens in enumerate(sizes):
        x = torch.randn(num_tokens, 8, device=DEVICE, requires_grad=True)
        ids = torch.randint(0, 5, (num_tokens, 2), device=DEVICE)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            y = compiled(x, ids)
        assert torch.equal(y, moves(x, ids))
        y.sum().backward()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_opcheck(backend):
    ids, m = _routing(9, 2, 4, device=DEVICE)
    x, rows = (torch.randn(n, 6, device=DEVICE, requires_grad=True) for n in (9, 18))
    maps = (m.offsets_E, m.token_of_row_N, m.row_of_slot_N)
    slots = (m.offsets_E, m.slot_of_row_N, m.row_of_slot_N)
    for name, args in {
        "route_metadata": (ids, 4, 10),
        "tokens_to_rows": (x, *maps),
        "sum_rows": (rows, *maps, 2),
        "rows_to_slots": (rows, *slots),
    }.items():
        operator = getattr(torch.ops.expertmesh, name).default
        torch.library.opcheck(operator, (*args, backend))


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_metadata_of_another_batch_is_told(backend):
    """A kernel would read what lies behind the tensors."""
    _, m = _routing(5, 2, 4)
    rows = torch.randn(10, 3)
    for call, words in (
        (lambda: permute(rows[:3], m, backend=backend), "x has 3 tokens and the metadata 10"),
        (lambda: permute(rows[:2], m, backend=backend), "x has 2 tokens and the metadata 10"),
        (lambda: permute(rows, m, backend=backend), "x has 10 tokens and the metadata 10"),
        (lambda: permute(rows[:0], m, backend=backend), "x has 0 tokens"),
        (lambda: combine(rows[:7], m, 2, backend=backend), "y has 7 rows"),
        (lambda: combine(rows, m, 3, backend=backend), "top_k is 3"),
        (lambda: combine(rows, m, 0, backend=backend), "top_k is 0"),
        (lambda: unpermute(rows[:7], m, 2, backend=backend), "y has 7 rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
