"""What an encoder-decoder is given and cannot take: one line each, before anything is computed."""

import copy
import functools

import pytest
import torch
from tests.models.test_inputs import (
    IDS,
    INT,
    MASK,
    META,
    MOE,
    SMALL,
    assert_breaks_no_graph,
    assert_refused,
    cache_of,
    making,
)
from tests.oracle.numerics import assert_close_fp64

from expertmesh.errors import ConfigError
from expertmesh_families.seq2seq.config import Seq2SeqConfig
from expertmesh_families.seq2seq.model import Seq2Seq


@functools.cache
def seq2seq(positions="rotary"):
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "max_source_len": 8}
    config = Seq2SeqConfig(**SMALL, **layers, moe=MOE, positions=positions)
    return Seq2Seq(config, seed=0).eval()


def memory(rows=2, max_len=8, sources=IDS):
    cache = cache_of(rows, max_len, seq2seq())
    seq2seq().encode(sources, token_mask_BS=None, cache=cache)
    return cache


def forward(*args, **more):
    return lambda: seq2seq()(*args, **more)


def read(ids=IDS, mask=None, cache=None, positions="rotary"):
    return lambda: seq2seq(positions).encode(
        ids, token_mask_BS=mask, cache=cache_of(2, 8, seq2seq()) if cache is None else cache()
    )


def write(ids=IDS, mask=None, cache=memory):
    return lambda: seq2seq().next_logits(ids, token_mask_BS=mask, cache=cache())


HOLES = torch.tensor([[True, False, True, True]] * 2)
LEFT = torch.tensor([[True] * 4, [False, True, True, True]])
EMPTY = torch.tensor([[True] * 4, [False] * 4])
SEQ2SEQ_CALLS = {
    "a source that is a list": (forward([[1]], IDS), "source_BS is a list"),
    "a source of one axis": (forward(IDS[0], IDS), "source_BS has shape"),
    "a target of floats": (forward(IDS, IDS.float()), "target_BS has dtype"),
    "an id too large": (forward(IDS, IDS + 296), "target_BS holds 300"),
    "a negative id": (forward(IDS - 4, IDS), "source_BS holds -1"),
    "a source of no tokens": (forward(IDS[:, :0], IDS), r"source_BS has shape \(2, 0\)"),
    "a target of no tokens": (forward(IDS, IDS[:, :0]), r"target_BS has shape \(2, 0\)"),
    "reading no tokens": (read(IDS[:, :0]), r"ids_BS has shape \(2, 0\)"),
    "writing no tokens": (write(IDS[:, :0]), r"ids_BS has shape \(2, 0\)"),
    "a long source": (forward(torch.ones(2, 9, dtype=INT), IDS), "a source of 9 tokens"),
    "a long target": (forward(IDS, torch.ones(2, 17, dtype=INT)), "a target of 17 tokens"),
    "a source elsewhere": (forward(IDS.to(META), IDS), "source_BS is on meta"),
    "other rows": (forward(IDS, IDS[:1]), "source_BS has 2 rows and target_BS 1"),
    "a short mask of sources": (forward(IDS, IDS, source_mask_BS=MASK[:, 1:]), "source_mask_BS has shape"),
    "a mask of numbers": (forward(IDS, IDS, target_mask_BS=MASK.long()), "target_mask_BS has dtype"),
    "a long mask of targets": (forward(IDS, IDS, target_mask_BS=torch.ones(2, 5) > 0), "target_mask_BS has shape"),
    "padding before tokens": (forward(IDS, IDS, target_mask_BS=HOLES), "padding before a token"),
    "padding before untied sources": (
        lambda: seq2seq("untied")(IDS, IDS, source_mask_BS=LEFT), "source_mask_BS has padding before a token; sources with untied"),  # noqa: E501
    "reading padding before untied sources": (read(mask=LEFT, positions="untied"), "token_mask_BS has padding before a token"),  # noqa: E501
    "a source without tokens": (forward(IDS, IDS, source_mask_BS=EMPTY), "row without a token"),
    "indices of rows": (forward(IDS, IDS, source_index_T=torch.arange(2)), "source_index_T has shape"),
    "indices of floats": (forward(IDS, IDS, target_index_T=torch.ones(8)), "target_index_T has dtype"),
    "places in a square": (forward(IDS, IDS, target_places_N=IDS), "target_places_N has shape"),
    "places of bytes": (forward(IDS, IDS, target_places_N=IDS[0].to(torch.uint8)), "target_places_N has dtype torch.uint8"),  # noqa: E501
    "places of floats": (forward(IDS, IDS, target_places_N=torch.ones(3)), "target_places_N has dtype"),
    "a place that is none": (forward(IDS, IDS, target_places_N=torch.tensor([8])), "target_places_N holds 8"),
    "reading floats": (read(IDS.float()), "ids_BS has dtype"),
    "reading a short mask": (read(mask=MASK[:, 1:]), "token_mask_BS has shape"),
    "reading an empty row": (read(mask=EMPTY), "row without a token"),
    "reading into none": (read(cache=dict), "cache is a dict"),
    "reading into other rows": (read(cache=lambda: cache_of(3, 8, seq2seq())), "holds 3 sequences"),
    "reading an id too large": (read(IDS + 296), "ids_BS holds 300"),
    "writing floats": (write(IDS.float()), "ids_BS has dtype"),
    "writing an id too large": (write(IDS + 296), "ids_BS holds 300"),
    "writing other rows": (write(IDS[:1]), "cache holds 2 sequences and ids_BS has 1"),
    "writing a short mask": (write(mask=MASK[:, 1:]), "token_mask_BS has shape"),
    "writing without a source": (write(cache=lambda: cache_of(2, 8, seq2seq())), "cache has no source"),
    "writing without room": (write(cache=lambda: memory(max_len=3)), "the cache holds 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQ2SEQ_CALLS)
def test_an_encoder_decoder_refuses_in_one_line(name):
    assert_refused(*SEQ2SEQ_CALLS[name])


@torch.no_grad()
def test_rotary_sources_may_be_padded_on_the_left():
    """Scores depend on distances only; untied positions count from the first column, and are refused above."""
    model, right = copy.deepcopy(seq2seq()).double(), LEFT.flip(1)
    source = torch.where(right, IDS, 0)
    found = model(source.roll(1, 1), IDS, source_mask_BS=LEFT).logits_NV
    expected = model(source, IDS, source_mask_BS=right).logits_NV
    assert_close_fp64(found[4:], expected[4:], what="logits")


def test_a_source_is_read_into_an_empty_cache():
    cache = memory()
    seq2seq().next_logits(IDS, token_mask_BS=None, cache=cache)
    with pytest.raises(ConfigError, match="cache holds 4 tokens already"):
        seq2seq().encode(IDS, token_mask_BS=None, cache=cache)


MADE = {
    "a Seq2Seq of a dict": (making(Seq2Seq, {}), "config is a dict; it must be a Seq2SeqConfig"),
    "a Seq2Seq of integers": (lambda: Seq2Seq(seq2seq().config, dtype=INT), "dtype=torch.int64"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_made_is_refused_in_one_line(name):
    assert_refused(*MADE[name])


def test_what_fits_is_taken():
    assert torch.equal(seq2seq()(IDS, IDS, target_mask_BS=MASK).logits_NV, seq2seq()(IDS, IDS).logits_NV)


# PyTorch's own compiler makes the object that PyTorch's own warning says nobody should make.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_checks_break_no_graph():
    more = {"source_mask_BS": MASK, "target_places_N": torch.tensor([0, 3])}
    assert_breaks_no_graph(seq2seq(), (IDS, IDS), more)
