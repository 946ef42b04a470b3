"""Translations of ranks, and a rank that has no row of a batch."""

import copy

import torch
from tests.models.test_no_rows import IDS, SMALL
from tests.support.ranks import world_of

from expertmesh.parallel.inference import spread_for_inference
from expertmesh_families.seq2seq.beam import beam_search
from expertmesh_families.seq2seq.config import Seq2SeqConfig
from expertmesh_families.seq2seq.model import Seq2Seq
from expertmesh_families.seq2seq.recipes import translate_test


def test_no_rows():
    config = Seq2SeqConfig(**SMALL | {"vocab_size": 300})
    logits = Seq2Seq(config, seed=0)(IDS, IDS).logits_NV
    assert logits.shape == (0, 300)


def translations():
    config = translate_test().updated({"model.init_std": 0.3}).model
    whole = Seq2Seq(config, dtype=torch.float64, seed=2)
    spread = copy.deepcopy(whole)
    spread_for_inference(spread, world_of())
    sources = [[5, 6, 7], [8, 9]]
    return [beam_search(model, sources, start=[1], end_id=2, num_beams=3, max_tokens=9) for model in (whole, spread)]


def test_translates_what_one_process_does(two_ranks):
    for whole, spread in two_ranks.run(translations):
        assert [one.ids for one in whole] == [one.ids for one in spread]
