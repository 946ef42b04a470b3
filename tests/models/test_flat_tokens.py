"""Flat tokens of several sequences in one call, each at its own position, through a context of one's own."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_close_fp64

from expertmesh.config.moe import MoEConfig
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

VOCAB = 31
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    max_seq_len=16,
    dim=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qk_norm=True,
    moe=MoEConfig(num_experts=(4,), hidden_dim=10),
)


class Ragged:
    """Keys and values in a list per layer and sequence: the shortest `AttentionContext` there is."""

    def __init__(self, sequences, positions):
        self.sequences, self.positions, self.memory = sequences, positions, {}

    def step(self, sequences, positions):
        self.sequences, self.positions = sequences, positions
        return self

    def attend(self, layer_index, q_THd, k_Thd, v_Thd, *, arithmetic):
        rows = []
        for q, k, v, name in zip(q_THd, k_Thd, v_Thd, self.sequences, strict=True):
            kept = self.memory.setdefault((layer_index, name), [])
            kept.append((k, v))
            keys, values = (torch.stack(t, 1) for t in zip(*kept, strict=True))
            y = F.scaled_dot_product_attention(q[:, None], keys, values, enable_gqa=True)
            rows.append(y.flatten())
        return torch.stack(rows)


@torch.no_grad()
def test_flat_tokens_get_the_logits_of_their_own_sequences():
    gpt = GPT(CONFIG, dtype=torch.float64, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    ids = {name: torch.randint(VOCAB, (n,), generator=generator) for name, n in (("a", 9), ("b", 5))}
    # a prompt of each, of unlike lengths and mixed, then tokens of a alone, then of both
    steps = [[("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2)], [("a", 3)], [("b", 2), ("a", 4)]]
    expected = {name: gpt(one[None]).logits_BSV[0] for name, one in ids.items()}
    context = Ragged([], None)
    for step in steps:
        names, places = zip(*step, strict=True)
        flat = torch.stack([ids[name][place] for name, place in step])
        context.step(names, torch.tensor(places))
        found = gpt(flat, context=context).logits_BSV
        whole = torch.stack([expected[name][place] for name, place in step])
        assert_close_fp64(found, whole, what=f"logits of {step}")


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0], [4, 1], []])
def test_chosen_rows_alone_get_logits(rows):
    gpt = GPT(CONFIG, dtype=torch.float64, seed=0).eval()
    ids = torch.arange(6).view(2, 3)
    chosen = torch.tensor(rows, dtype=torch.int64)
    found = gpt(ids, logit_rows_R=chosen).logits_BSV
    assert found.shape == (len(rows), VOCAB)
    assert_close_fp64(found, gpt(ids).logits_BSV.flatten(0, 1)[chosen], what="chosen rows")
