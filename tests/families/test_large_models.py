"""Sizes that no memory holds are named by every family."""

import pytest
from tests.moe.test_large_sizes import HUGE, assert_named

from expertmesh_families.seq2seq.config import Seq2SeqConfig
from expertmesh_families.seq2seq.model import Seq2Seq
from expertmesh_families.swin.config import SwinConfig
from expertmesh_families.swin.model import Swin

MODELS = {
    "seq2seq: dim": (lambda device: Seq2Seq(Seq2SeqConfig(dim=HUGE, num_heads=4), device=device), "model.dim=1000000000"),  # noqa: E501
    "swin: dim": (lambda device: Swin(SwinConfig(dim=3 * HUGE), device=device), "model.dim=3000000000"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_size_that_no_memory_holds_is_named(name):
    assert_named(*MODELS[name])
