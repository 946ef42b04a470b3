"""Beam search against all outputs there are, on a toy whose next token depends on source and tokens so far."""

import itertools

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, relative_error
from torch.overrides import TorchFunctionMode

from expertmesh.errors import ConfigError
from expertmesh_families.seq2seq.beam import beam_search, length_penalty_of

VOCAB, END, LONGEST = 4, 0, 4


class Cache:
    def __init__(self, rows):
        self.length, self.rows, self.sources = 0, [[] for _ in range(rows)], []

    def branch(self, num_beams):
        self.rows = [list(row) for row in self.rows for _ in range(num_beams)]
        self.sources = [source for source in self.sources for _ in range(num_beams)]

    def reorder(self, rows_R):
        before = [self.sources[i] for i in rows_R.tolist()]
        assert before == self.sources, "a beam moved to another source"
        self.rows = [list(self.rows[i]) for i in rows_R.tolist()]


class Toy(torch.nn.Module):
    """Logits by a table of (source, last token but one, last token)."""

    vocab_size, max_seq_len, max_source_len, device = VOCAB, 9, 5, torch.device("cpu")

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (VOCAB, VOCAB, VOCAB, VOCAB)
        self.table = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def new_cache(self, *, batch_size, max_len):
        return Cache(batch_size)

    def encode(self, ids_BS, *, token_mask_BS, cache):
        cache.sources = ids_BS[:, 0].tolist()

    def next_logits(self, ids_BS, *, token_mask_BS, cache):
        cache.length += ids_BS.shape[1]
        for row, new in zip(cache.rows, ids_BS.tolist(), strict=True):
            row.extend(new)
        return torch.stack(
            [
                self.table[source, ([0] + row)[-2], row[-1]]
                for source, row in zip(cache.sources, cache.rows, strict=True)
            ]
        )


def log_probability(toy, source, ids):
    cache = Cache(1)
    cache.sources = [source]
    total, new = 0.0, [[2]]
    for token in ids:
        logits = toy.next_logits(torch.tensor(new), token_mask_BS=None, cache=cache)
        total += float(logits[0].log_softmax(-1)[token])
        new = [[token]]
    return total


def best_of_all(toy, source, alpha):
    others = [token for token in range(VOCAB) if token != END]
    found = []
    for length in range(LONGEST):
        for body in itertools.product(others, repeat=length):
            score = log_probability(toy, source, [*body, END])
            found.append((score / length_penalty_of(length + 1, alpha), list(body)))
    return max(found)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_enough_beams_find_the_best_of_all_outputs(alpha):
    toy = Toy(3)
    sources = [[1], [3, 3], [2]]
    found = beam_search(
        toy, sources, start=[2], end_id=END, num_beams=VOCAB**LONGEST, length_penalty=alpha,
        max_tokens=LONGEST,
    )  # fmt: skip
    lengths = set()
    for (source, *_), hypothesis in zip(sources, found, strict=True):
        score, ids = best_of_all(toy, source, alpha)
        assert hypothesis.ids == ids and hypothesis.is_finished
        assert relative_error(hypothesis.score, score) <= FP64_RELATIVE
        lengths.add(len(ids))
    assert alpha < 2.5 or max(lengths) > 1, "the penalty must matter"


def test_one_beam_is_greedy_and_few_beams_are_alike_alone_and_together():
    toy = Toy(5)
    sources = [[1], [3], [2]]
    greedy = beam_search(toy, sources, start=[2], end_id=END, num_beams=1, length_penalty=0, max_tokens=LONGEST)
    for (source,), hypothesis in zip(sources, greedy, strict=True):
        ids = [0, 2]
        while len(ids) < 2 + LONGEST and ids[-1] != END:
            ids.append(int(toy.table[source, ids[-2], ids[-1]].argmax()))
        assert hypothesis.ids == ids[2 : -1 if ids[-1] == END else None]
    together = beam_search(toy, sources, start=[2], end_id=END, num_beams=2, max_tokens=7)
    for source, hypothesis in zip(sources, together, strict=True):
        alone = beam_search(toy, [source], start=[2], end_id=END, num_beams=2, max_tokens=7)
        assert alone == [hypothesis]


def test_an_output_that_does_not_end_is_cut_off():
    toy = Toy(1)
    toy.table[..., END] = -1e9
    (found,) = beam_search(toy, [[1]], start=[2], end_id=END, num_beams=2, max_tokens=3)
    assert len(found.ids) == 3 and not found.is_finished


def test_each_source_has_its_own_limit_as_if_it_were_alone():
    toy = Toy(5)
    toy.table[1, ..., END] = -1e9
    sources, limits = [[1], [3], [2], [1]], [2, 7, 1, 4]
    options = {"start": [2], "end_id": END, "num_beams": 2, "length_penalty": 2.0}
    together = beam_search(toy, sources, max_tokens=limits, **options)
    for source, limit, hypothesis in zip(sources, limits, together, strict=True):
        (alone,) = beam_search(toy, [source], max_tokens=limit, **options)
        assert alone == hypothesis
    assert [len(together[row].ids) for row in (0, 3)] == [2, 4]
    with pytest.raises(ConfigError, match="max_tokens: 1 for 4 sources"):
        beam_search(toy, sources, max_tokens=[3], **options)


class Asked(TorchFunctionMode):
    """Counts what the host asks for, and would wait for on a GPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)
        return func(*args, **(kwargs or {}))


class Silent(Toy):
    """Asks for nothing, and never ends."""

    logits = torch.tensor([-1e9, 1.0, 2.0, 3.0]).expand(2, VOCAB)

    def new_cache(self, *, batch_size, max_len):
        cache = Cache(batch_size)
        cache.reorder = lambda rows: None
        return cache

    def next_logits(self, ids_BS, *, token_mask_BS, cache):
        return self.logits


def test_the_host_asks_once_per_token():
    counts = []
    for limit in (3, 5):
        with Asked() as asked:
            beam_search(Silent(0), [[1]], start=[2], end_id=END, num_beams=2, max_tokens=limit)
        counts.append(asked.count)
    assert counts[1] - counts[0] == 2, "one more for each of two more tokens"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beams": 0}, "num_beams=0: must be a whole number from 1 to 1,000"),
        ({"length_penalty": -1}, "length_penalty=-1: must be a number from 0 to 10"),
        ({"length_penalty": float("nan")}, "length_penalty=nan: must be a number from 0 to 10"),
        ({"max_tokens": 9}, "max_tokens=9: with a prompt of 1 tokens it passes"),
        ({"sources": [[1] * 6]}, "source of 6 tokens: the model reads at most 5"),
        ({"sources": [[1], []]}, "source='': is empty"),
        ({"sources": [[VOCAB]]}, "token id 4: must be a whole number from 0 to 3"),
    ],
)
def test_wrong_options_are_one_line(options, words):
    values = {"sources": [[1]], "start": [2], "end_id": END} | options
    with pytest.raises(ConfigError, match=words):
        beam_search(Toy(0), **values)
