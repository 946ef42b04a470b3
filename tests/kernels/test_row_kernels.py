"""Row-moving kernels against plain torch: copies to the bit, sums bitwise too because the order is fixed."""

import pytest
import torch
from tests.support.poison import poisoned_empty

from expertmesh.kernels import combine as combine_kernels
from expertmesh.kernels import permute as permute_kernels
from expertmesh.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    (0, 2, 3, 4),
    (1, 1, 1, 1),
    (7, 3, 5, 5),
    (40, 2, 61, 33),
    (9, 8, 8, 16),
    (128, 8, 16, 64),
]
SLOW_SHAPES = [
    (1000, 1, 7, 96),
    (1000, 2, 64, 257),
    (1000, 8, 128, 130),
    (128, 61, 61, 17),
    (3, 2, 4, 5000),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _large_blocks(threshold, request):
    """As for many rows: few programs keep the interpreter fast; one test takes the blocks of small inputs."""
    if "small" not in request.node.name:
        threshold(combine_kernels, "_FEW_PROGRAMS", 0)


def with_slow(shapes, slow):
    return shapes + [pytest.param(shape, marks=pytest.mark.exhaustive) for shape in slow]


def routing(num_tokens, top_k, num_experts, max_rows=None):
    ids = torch.randint(0, num_experts + 1, (num_tokens, top_k))
    if num_tokens > 20:
        ids[5:20] = 1  # a hot expert
        ids[ids == 2] = 0  # and one without tokens
    maps = reference.route_metadata(ids, num_experts, max_rows)
    return ids.to(DEVICE), *(m.to(DEVICE) for m in maps)


def rows_with_dead_tail(num_rows, dim, dtype, live):
    rows = torch.randn(num_rows, dim).to(DEVICE, dtype)
    rows[live:] = float("nan")  # nothing may be read there
    return rows


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("shape", with_slow(SHAPES, SLOW_SHAPES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_are_copies(shape, dtype):
    num_tokens, top_k, num_experts, dim = shape
    ids, offsets, token_of_row, slot_of_row, row_of_slot = routing(*shape[:3])
    live, num_rows = int(offsets[-1]), num_tokens * top_k
    x = torch.randn(num_tokens, dim).to(DEVICE, dtype)
    with poisoned_empty():
        rows = permute_kernels.tokens_to_rows(x, offsets, row_of_slot, num_rows)
        slots = permute_kernels.rows_to_slots(rows_with_dead_tail(num_rows, dim, dtype, live), offsets, row_of_slot)
        back = permute_kernels.tokens_to_rows(
            torch.where((ids < num_experts).view(-1, 1), slots, float("nan")),
            offsets,
            row_of_slot,
            num_rows,
        )
    assert torch.equal(rows, reference.gather_rows(x, token_of_row, live))
    assert torch.equal(slots, reference.rows_to_slots(back, row_of_slot, live))
    assert torch.equal(back, reference.gather_rows(slots, slot_of_row, live))


def test_moves_keep_the_bits_of_negative_zero_and_of_strided_input():
    _, offsets, token_of_row, _, row_of_slot = routing(9, 2, 3)
    x = torch.randn(9, 8, device=DEVICE)
    x[:, 0] = -0.0
    view = x.t().contiguous().t()
    rows = permute_kernels.tokens_to_rows(view, offsets, row_of_slot, 18)
    assert torch.equal(rows, reference.gather_rows(x, token_of_row, int(offsets[-1])))
    slots = permute_kernels.rows_to_slots(rows, offsets, row_of_slot)
    assert bool(torch.signbit(slots[row_of_slot < offsets[-1], 0]).all())


@pytest.mark.parametrize("shape", with_slow(SHAPES, SLOW_SHAPES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_is_the_ordered_sum_to_the_bit(shape, dtype):
    num_tokens, top_k, num_experts, dim = shape
    _, offsets, _, _, row_of_slot = routing(*shape[:3])
    live = int(offsets[-1])
    rows = rows_with_dead_tail(num_tokens * top_k, dim, dtype, live)
    with poisoned_empty():
        y = combine_kernels.sum_rows(rows, offsets[-1:], row_of_slot, top_k)
        again = combine_kernels.sum_rows(rows, live, row_of_slot, top_k)
    slots = reference.rows_to_slots(rows, row_of_slot, live).to(wide(dtype))
    expected = torch.zeros(num_tokens, dim, dtype=wide(dtype), device=DEVICE)
    for j in range(top_k):
        expected += slots.view(num_tokens, top_k, dim)[:, j]
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(y, again)


@pytest.mark.parametrize("shape", [(3, 2, 4, 700), (1, 8, 16, 256)])
def test_blocks_of_small_inputs(shape):
    num_tokens, top_k, _, dim = shape
    assert combine_kernels.row_tile(num_tokens, dim, 4) == (1, 256)
    _, offsets, token_of_row, _, row_of_slot = routing(*shape[:3])
    live = int(offsets[-1])
    x = torch.randn(num_tokens, dim, device=DEVICE)
    with poisoned_empty():
        rows = permute_kernels.tokens_to_rows(x, offsets, row_of_slot, num_tokens * top_k)
        y = combine_kernels.sum_rows(rows, live, row_of_slot, top_k)
    assert torch.equal(rows, reference.gather_rows(x, token_of_row, live))
    assert torch.equal(y, reference.combine(rows, row_of_slot, live, top_k))


def test_max_rows_shortens_the_rows():
    ids, offsets, token_of_row, _, row_of_slot = routing(30, 2, 5, max_rows=58)
    live = int(offsets[-1])
    x = torch.randn(30, 6, device=DEVICE)
    with poisoned_empty():
        rows = permute_kernels.tokens_to_rows(x, offsets, row_of_slot, 58)
        y = combine_kernels.sum_rows(rows, offsets[-1:], row_of_slot, 2)
    assert torch.equal(rows, reference.gather_rows(x, token_of_row, live))
    assert torch.equal(y, x * (ids < 5).sum(1, keepdim=True))


def test_results_are_repeatable_and_do_not_depend_on_the_batch():
    _, offsets, _, _, row_of_slot = routing(64, 4, 8)
    rows = torch.randn(256, 48, device=DEVICE)
    first = combine_kernels.sum_rows(rows, offsets[-1:], row_of_slot, 4)
    for _ in range(3):
        again = combine_kernels.sum_rows(rows, offsets[-1:], row_of_slot, 4)
        assert torch.equal(first, again)
    part = combine_kernels.sum_rows(rows, offsets[-1:], row_of_slot[40:80], 4)
    assert torch.equal(part, first[10:20])


@pytest.mark.exhaustive
def test_addresses_beyond_2_31_elements():
    # memory that nobody touches is not committed: 4 GiB of addresses, some pages of memory
    num_rows, dim = 2**21 + 8, 1024
    rows = torch.empty(num_rows, dim, dtype=torch.bfloat16, device=DEVICE)
    index = torch.tensor([num_rows - 1, 3, num_rows - 2, 5], dtype=torch.int32, device=DEVICE)
    values = torch.randn(4, dim, device=DEVICE).to(torch.bfloat16)
    rows[index.long()] = values
    y = combine_kernels.sum_rows(rows, num_rows, index, 2)
    assert torch.equal(y, values.view(2, 2, dim).float().sum(1).to(torch.bfloat16))
    grad = torch.randn(2, dim, device=DEVICE).to(torch.bfloat16)
    offsets = torch.tensor([0, num_rows], dtype=torch.int32, device=DEVICE)
    spread = permute_kernels.tokens_to_rows(grad, offsets, index, num_rows)
    assert torch.equal(spread[index.long()], grad.repeat_interleave(2, 0))
