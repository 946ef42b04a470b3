"""Scores of rows in chunks: the plain formula in FP64, the two-times rule, and no tensor of all logits."""

import weakref
from functools import partial

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_two_times
from tests.support.operators import NewTensors

from expertmesh.config.run import TrainConfig
from expertmesh.config.text import TextConfig
from expertmesh.costs import sizes
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.recipes import gpt_moe_test
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.scored import Scores, score_rows
from expertmesh.models.task import Part
from expertmesh.models.token_rows import OwnRows
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS
from expertmesh.parallel.ranks import Ranks

V = 23


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of three rows."""
    monkeypatch.setitem(sizes.CHUNK_ELEMENTS, "cpu", 3 * V)


def plain(h_RD, head_VD, targets_R, *, label_smoothing=0.0, temperature=1.0, entropy=False):
    z = (h_RD @ head_VD.t()).to(torch.promote_types(h_RD.dtype, torch.float32)) / temperature
    logp = z - z.logsumexp(1, keepdim=True)
    of_target = logp.gather(1, targets_R[:, None]).squeeze(1)
    scores_R = (1 - label_smoothing) * of_target + label_smoothing * logp.mean(1)
    return Scores(scores_R, -(logp.exp() * logp).sum(1) if entropy else None)


def results(function, h_RD, head_VD, targets_R, weights_R):
    leaves = [t.clone().requires_grad_() for t in (h_RD, head_VD)]
    scores = function(*leaves, targets_R)
    each_R = scores.logprobs_R
    if scores.entropies_R is not None:
        each_R = each_R + scores.entropies_R * (weights_R.to(each_R) - 0.5)
    (each_R * weights_R.to(each_R)).sum().backward()
    return each_R.detach(), *(leaf.grad for leaf in leaves)


def drawn(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    h, head = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (rows, V))
    targets = torch.randint(V, (rows,), generator=generator)
    return h.to(dtype), head.to(dtype), targets, torch.rand(rows, generator=generator).double()


HOW = (
    {},
    {"label_smoothing": 0.1},
    {"temperature": 0.7},
    {"entropy": True},
    {"temperature": 1.3, "entropy": True},
)


@pytest.mark.parametrize("how", HOW, ids=" ".join)
@pytest.mark.parametrize("ops", [DEFAULT_OPS, BATCH_INVARIANT_OPS], ids=["default", "invariant"])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 11])
@pytest.mark.usefixtures("small_chunks")
def test_the_plain_formula_in_fp64(rows, ops, how):
    given = drawn(rows, torch.float64)
    ours = partial(score_rows, linear=ops.linear, **how)
    found, expected = (results(f, *given) for f in (ours, partial(plain, **how)))
    for one, other, what in zip(found, expected, ("scores", "hidden", "head"), strict=True):
        assert_close_fp64(one, other, what=what)


@pytest.mark.parametrize("how", HOW, ids=" ".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_chunks")
def test_the_two_times_rule(dtype, how):
    given = drawn(40, dtype)
    wide = [t.double() if t.is_floating_point() else t for t in given]
    every = [
        results(f, *of)
        for f, of in (
            (partial(score_rows, linear=DEFAULT_OPS.linear, **how), given),
            (partial(plain, **how), given),
            (partial(plain, **how), wide),
        )
    ]
    for ours, usual, exact, what in zip(*every, ("scores", "hidden", "head"), strict=True):
        assert_two_times(ours, usual, exact, what=what)


def test_sums_over_chunks_are_in_fp32(monkeypatch):
    """256 chunks of one row each would lose their gradients in 16 bits."""
    monkeypatch.setitem(sizes.CHUNK_ELEMENTS, "cpu", V)
    h, head, targets, weights = drawn(256, torch.float32)
    targets, h = torch.zeros_like(targets), h[:1].expand_as(h).contiguous()
    head.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score_rows(h, head, targets, linear=DEFAULT_OPS.linear)
    scores.logprobs_R.sum().backward()
    one = head.grad.clone()
    head.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score_rows(h[:1], head, targets[:1], linear=DEFAULT_OPS.linear)
    scores.logprobs_R.sum().backward()
    assert torch.equal(one, 256 * head.grad)


@pytest.mark.usefixtures("small_chunks")
def test_a_frozen_head_gets_no_gradient():
    h, head, targets, _ = drawn(7, torch.float32)
    h.requires_grad_()
    with NewTensors() as seen:
        score_rows(h, head, targets, linear=DEFAULT_OPS.linear).logprobs_R.sum().backward()
    assert head.grad is None and h.grad is not None
    assert head.shape not in dict(seen.made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_chunks")
def test_one_chunk_of_logits_is_held_at_a_time(dtype):
    made = []

    def linear(x_RK, w_NK):
        assert all(one() is None for one in made)
        z = DEFAULT_OPS.linear(x_RK, w_NK)
        made.append(weakref.ref(z))
        return z

    results(partial(score_rows, linear=linear), *drawn(11, dtype))
    assert len(made) == 2 * 4  # in the forward, and again in the backward


def largest(seen):
    """Elements of the largest tensor that an operator made."""
    return max(shape.numel() for shape, _ in seen.made)


def task_of(vocab_size):
    usual = gpt_moe_test()
    model = usual.model.model_copy(update={"vocab_size": vocab_size})
    config = GPTRunConfig(model=model, data=TextConfig(seq_len=64), train=TrainConfig(run_dir="unused", batch_size=4))
    return GPTTask(config)


def batch_of(vocab_size, *, learned):
    B, S = 4, 64
    ids = torch.randint(vocab_size, (B, S + 1), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1], ids[:, 1:]
    if learned is None:
        return batch
    counts = torch.zeros(B, S, dtype=torch.bool)
    counts[:, :learned] = True
    return *batch, {"counts": counts, "is_token": torch.ones(B, S, dtype=torch.bool)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("learned", [None, 0, 5])
def test_training_never_holds_the_logits_of_all_rows(learned, tied, monkeypatch):
    vocab_size = 3001
    task, batch = task_of(vocab_size), batch_of(vocab_size, learned=learned)
    config = task.config.model.model_copy(update={"tie_embeddings": tied})
    task.config = task.config.model_copy(update={"model": config})
    num_rows = 256 if learned is None else 4 * learned
    monkeypatch.setitem(sizes.CHUNK_ELEMENTS, "cpu", 16 * vocab_size)
    model = task.builder_class(task.config).build(dtype=torch.float64, device="cpu")
    part = Part(0, slice(0, 4), Ranks(), task.num_items(batch))
    with NewTensors() as seen:
        loss = task.loss(model, batch, part).total
        loss.backward()
    assert largest(seen) <= max(16, config.dim) * vocab_size < 256 * vocab_size
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    logits = model(batch[0]).logits_BSV.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, batch[1].flatten(), reduction="none")
    expected = (losses if learned is None else losses * batch[2]["counts"].flatten()).sum()
    expected.backward()
    assert_close_fp64(loss.detach(), expected.detach(), what="loss", scale=max(1.0, num_rows * 8.0))
    for one, parameter in zip(gradients, model.parameters(), strict=True):
        if parameter.grad is not None or one is not None:
            assert_close_fp64(one, parameter.grad, what="gradient", scale=1.0)
    with torch.no_grad(), NewTensors() as seen:
        sums = task.measure(model.eval(), (*batch[:2], batch[1], *batch[2:]), part)
    assert largest(seen) <= max(16, config.dim) * vocab_size
    assert int(sums["items"]) == num_rows


@pytest.mark.parametrize("is_cut", [False, True], ids=["one chunk", "chunks"])
def test_rows_that_stand_for_some_tokens_are_the_head_s(is_cut, request):
    """Scores and gradients of a head with these rows in the place of its own, which get none."""
    if is_cut:
        request.getfixturevalue("small_chunks")
    h, head, targets, weights = drawn(7, torch.float64)
    ids, rows = torch.tensor([4, int(targets[0])]).sort().values, torch.randn(2, 8, dtype=torch.float64)
    linear = DEFAULT_OPS.linear
    found, expected = [], []
    for ours, results_ in ((True, found), (False, expected)):
        leaves = [t.clone().requires_grad_() for t in (h, head, rows)]
        if ours:
            own = OwnRows(ids, leaves[2])
            scores_R = score_rows(leaves[0], leaves[1], targets, linear=linear, own=own).logprobs_R
        else:
            whole = leaves[1].index_copy(0, ids, leaves[2])
            scores_R = plain(leaves[0], whole, targets).logprobs_R
        (scores_R * weights).sum().backward()
        results_ += [scores_R.detach(), *(leaf.grad for leaf in leaves)]
    torch.testing.assert_close(found, expected)
    assert not found[2][ids].any() and found[3].any()
