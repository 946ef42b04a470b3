"""What generating costs: the compared decoder is right, bytes are those of the experts that are used, dense models match."""

import pytest
import torch
from benchmarks.claims.einsum_gpt import EinsumGPT
from benchmarks.claims.inference import (
    FAMILIES,
    NEW_TOKENS,
    break_even,
    bytes_read,
    bytes_translated,
    check_same,
    dense_of,
    planned,
    shapes,
)

import expertmesh as em
from expertmesh.models.gpt.flops import forward_flops
from expertmesh_families.seq2seq.model import Seq2Seq


GPTS = [claim for claim in FAMILIES if claim != "languages"]


@pytest.mark.parametrize("claim", GPTS)
def test_plain_pytorch_computes_what_the_model_does(claim):
    name = FAMILIES[claim][0]
    check_same(em.GPT(shapes(claim, 1)[name], seed=0).eval())


def test_a_wrong_decoder_is_seen(monkeypatch):
    model = em.GPT(shapes("moe", 1)["MoE"], seed=0).eval()
    monkeypatch.setattr(EinsumGPT, "logits", lambda self, ids: torch.zeros(len(ids), 512))
    with pytest.raises(AssertionError, match="logits differ"):
        check_same(model)


@pytest.mark.parametrize("claim", GPTS)
def test_a_dense_model_has_as_many_operations_and_a_little_more(claim):
    config = shapes(claim, 1)[FAMILIES[claim][0]]
    ours = forward_flops(config, seq_len=64).total_flops
    assert 1 <= forward_flops(dense_of(config), seq_len=64).total_flops / ours < 1.06


def test_bytes_are_those_of_the_experts_that_tokens_choose():
    model = em.GPT(shapes("moe", 1)["MoE"], seed=0).eval()
    everything = 4 * sum(p.numel() for p in model.parameters())
    assert bytes_read(model, 1, all_experts=True) == everything
    moe = model.layers[0].moe
    idle = 3 * (64 - 2) * (moe.experts.w_in[0].numel() + moe.experts.w_out[0].numel())
    assert bytes_read(model, 1, all_experts=False) == everything - 4 * idle
    assert bytes_read(model, 16, all_experts=False) > everything - 4 * idle


def test_a_translation_reads_each_expert_that_its_tokens_choose_once_a_call():
    configs = shapes("languages", 1)
    dense = Seq2Seq(configs["dense, 1 x"], seed=0).eval()
    encoder = sum(p.numel() for p in (*dense.encoder.parameters(), dense.encoder_norm.weight))
    memories = sum(layer.cross_attention.kv.weight.numel() for layer in dense.decoder)
    everything = sum(p.numel() for p in dense.parameters())
    per_token = everything - encoder - memories
    assert bytes_translated(dense, 1) == 4 * (per_token + (encoder + memories) / NEW_TOKENS)
    mixture = Seq2Seq(configs["MoE-32, denoising"], seed=0).eval()
    few, many = (bytes_translated(mixture, batch) for batch in (1, 16))
    one = mixture.decoder[1].moe.experts
    expert = one.w_in[0].numel() + one.w_out[0].numel()
    # the decoder's one layer of experts reads at most one more per token for each more of the batch
    assert few < many <= few + 4 * expert * (15 + 2 * 32 / NEW_TOKENS)


@pytest.mark.parametrize(("own", "found"), [(1.0, "< 1.00"), (4.0, "2.00"), (9.0, "> 4.0")])
def test_break_even_lies_on_the_line_of_logarithms(own, found):
    assert break_even(own, [(1.0, 2.0), (4.0, 8.0)]) == found


def test_the_planner_has_rows_for_both_published_pairs():
    assert {row["model"] for row in planned()} == {
        "6.7B dense", "52B mixture", "27B PR-MoE student", "175B dense", "1T mixture"
    }  # fmt: skip
