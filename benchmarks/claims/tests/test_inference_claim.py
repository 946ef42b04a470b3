"""What generating costs: the compared decoder is right, bytes are those of the experts that are used, dense models match."""

import pytest
import torch
from benchmarks.claims.einsum_gpt import EinsumGPT
from benchmarks.claims.inference import (
    FAMILIES,
    break_even,
    bytes_read,
    check_same,
    dense_of,
    planned,
    shapes,
)

import expertmesh as em
from expertmesh.models.gpt.flops import forward_flops


@pytest.mark.parametrize("claim", FAMILIES)
def test_plain_pytorch_computes_what_the_model_does(claim):
    name = FAMILIES[claim][0]
    check_same(em.GPT(shapes(claim, 1)[name], seed=0).eval())


def test_a_wrong_decoder_is_seen(monkeypatch):
    model = em.GPT(shapes("moe", 1)["MoE"], seed=0).eval()
    monkeypatch.setattr(EinsumGPT, "logits", lambda self, ids: torch.zeros(len(ids), 512))
    with pytest.raises(AssertionError, match="logits differ"):
        check_same(model)


@pytest.mark.parametrize("claim", FAMILIES)
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


@pytest.mark.parametrize(("own", "found"), [(1.0, "< 1.00"), (4.0, "2.00"), (9.0, "> 4.0")])
def test_break_even_lies_on_the_line_of_logarithms(own, found):
    assert break_even(own, [(1.0, 2.0), (4.0, 8.0)]) == found


def test_the_planner_has_rows_for_both_published_pairs():
    assert {row["model"] for row in planned()} == {
        "6.7B dense", "52B mixture", "27B PR-MoE student", "175B dense", "1T mixture"
    }  # fmt: skip
