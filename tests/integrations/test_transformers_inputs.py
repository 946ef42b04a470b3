"""What our model in transformers is given and cannot take: one line each, and the cache is as it was."""

import functools

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers import ExpertMeshConfig, ExpertMeshForCausalLM
from expertmesh.models.gpt.config import ModelConfig

IDS = torch.arange(8).view(2, 4) + 3
ONES = torch.ones(2, 4, dtype=torch.int64)


@functools.cache
def model(**options):
    small = {"vocab_size": 300, "max_seq_len": 16, "dim": 16, "num_layers": 2, "num_heads": 2}
    gpt = ModelConfig(**(small | options), ffn_hidden_dim=16, moe={"hidden_dim": 8})
    return ExpertMeshForCausalLM(ExpertMeshConfig(gpt=gpt)).eval()


def past(rows=2, **options):
    """A cache with four tokens."""
    return model(**options)(IDS[:rows], use_cache=True).past_key_values


NEXT = IDS[:, :1]
CALLS = {
    "nothing": ((), {}, "input_ids=None: this model reads token ids"),
    "embeddings": ((), {"inputs_embeds": torch.ones(2, 4, 16)}, "inputs_embeds: is no argument"),
    "ids as a list": (([[1]],), {}, "input_ids is a list"),
    "ids of one axis": ((IDS[0],), {}, "input_ids has shape"),
    "ids of floats": ((IDS.float(),), {}, "dtype torch.float32"),
    "an id too large": ((IDS + 296,), {}, "input_ids holds 300"),
    "ids elsewhere": ((IDS.to("meta"),), {}, "is on meta and the model on cpu"),
    "a mask of 4 axes": ((IDS,), {"attention_mask": torch.ones(2, 1, 4, 4)}, "packed documents"),
    "a mask of 3 axes": ((IDS,), {"attention_mask": torch.ones(2, 4, 4)}, r"shape \(2, 4, 4\)"),
    "a short mask": ((IDS,), {"attention_mask": ONES[:, 1:]}, r"\(2, 3\); it must be \(2, 4\)"),
    "a long mask": ((IDS,), {"attention_mask": torch.ones(2, 6)}, r"\(2, 6\); it must be \(2, 4\)"),
    "a mask of one row": ((IDS,), {"attention_mask": ONES[:1]}, r"\(1, 4\); it must be"),
    "a mask as a list": ((IDS,), {"attention_mask": [[1] * 4] * 2}, "attention_mask is a list"),
    "a mask to be added": ((IDS,), {"attention_mask": (1 - ONES) * -1e9 - 1}, "holds -1;"),
    "a mask elsewhere": ((IDS,), {"attention_mask": ONES.to("meta")}, "attention_mask is on meta"),
    "positions": ((IDS,), {"position_ids": IDS}, "position_ids: is no argument"),
    "labels of one axis": ((IDS,), {"labels": IDS[0]}, r"labels has shape \(4,\)"),
    "short labels": ((IDS,), {"labels": IDS[:, 1:]}, r"labels has shape \(2, 3\)"),
    "labels of floats": ((IDS,), {"labels": IDS.float()}, "labels has dtype torch.float32"),
    "labels as a list": ((IDS,), {"labels": IDS.tolist()}, "labels is a list"),
    "a label too large": ((IDS,), {"labels": IDS + 296}, "labels holds 300; it must be from 0 to 299, or -100"),
    "a negative label": ((IDS,), {"labels": IDS - 4}, "labels holds -1"),
    "labels elsewhere": ((IDS,), {"labels": IDS.to("meta")}, "labels is on meta"),
    "labels without logits": ((IDS,), {"labels": IDS, "logits_to_keep": 1}, "leave one of the two"),
    "no items": ((IDS,), {"labels": IDS, "num_items_in_batch": 0}, "num_items_in_batch=0"),
    "items of rows": ((IDS,), {"labels": IDS, "num_items_in_batch": ONES[0]}, "must be one number"),
    "items of text": ((IDS,), {"labels": IDS, "num_items_in_batch": "8"}, "num_items_in_batch='8'"),
    "fewer than no logits": ((IDS,), {"logits_to_keep": -1}, "logits_to_keep=-1"),
    "logits at places": ((IDS,), {"logits_to_keep": torch.tensor([1])}, "logits_to_keep=a Tensor"),
    "true logits": ((IDS,), {"logits_to_keep": True}, "logits_to_keep=True"),
    "a cache by name": ((IDS,), {"use_cache": "dynamic"}, "use_cache=dynamic: must be one of True, False, None"),
    "tuples": ((IDS,), {"return_dict": False}, "returns no tuples"),
    "attentions": ((IDS,), {"output_attentions": True}, "output_attentions: is no argument"),
    "a capacity below none": ((IDS,), {"capacity_factor": -1.0}, "capacity_factor=-1.0"),
    "tuples of keys": ((NEXT,), {"past_key_values": ((IDS, IDS),)}, "past_key_values is a tuple"),
    "a cache of two sides": (
        (NEXT,), {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}, "is an EncoderDecoderCache"),
    "a fixed cache": (
        (NEXT,), {"past_key_values": lambda: StaticCache(model().config, max_cache_len=8)}, "fixed size"),
    "other sequences": ((NEXT,), {"past_key_values": lambda: past(1)}, "holds 1 sequences and input_ids has 2"),
    "another model's": ((NEXT,), {"past_key_values": lambda: past(num_layers=1)}, "1 layers of 2 heads of 8"),
    "another model's heads": ((NEXT,), {"past_key_values": lambda: past(num_heads=1)}, "1 heads of 16"),
    "a mask of the new": ((NEXT,), {"past_key_values": past, "attention_mask": ONES[:, :1]}, r"shape \(2, 1\); it must be \(2, 5\), .*4 tokens in the cache"),  # noqa: E501
    "a mask of too many": ((NEXT,), {"past_key_values": past, "attention_mask": torch.ones(2, 6)}, r"shape \(2, 6\); it must be \(2, 5\), .*4 tokens in the cache"),  # noqa: E501
    "no room": ((torch.ones(2, 13, dtype=torch.int64),), {"past_key_values": past}, "17 tokens, 4 of them in the cache"),  # noqa: E501
    "a wrong factor after": ((NEXT,), {"past_key_values": past, "capacity_factor": 0}, "capacity_factor=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_it_refuses_in_one_line_and_leaves_the_cache(name):
    args, more, match = CALLS[name]
    more = {key: value() if callable(value) else value for key, value in more.items()}
    cache = more.get("past_key_values")
    before = cache.get_seq_length() if isinstance(cache, DynamicCache) else None
    with pytest.raises(ConfigError, match=match) as caught:
        model()(*args, **more)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    assert before is None or cache.get_seq_length() == before


def test_what_fits_is_taken():
    for more in (
        {"attention_mask": ONES.bool()},
        {"attention_mask": ONES.float(), "labels": IDS.int()},
        {"labels": torch.full_like(IDS, -100), "num_items_in_batch": torch.tensor(8.0)},
        {"logits_to_keep": 9, "use_cache": False},
        {"past_key_values": DynamicCache(), "attention_mask": ONES},
        {"position_ids": None, "output_attentions": False, "return_dict": True},
    ):
        assert model()(IDS, **more).logits.shape == (2, 4, 300)


# PyTorch's own compiler makes the object that PyTorch's own warning says nobody should make.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_checks_break_no_graph():
    torch._dynamo.reset()
    compiled = torch.compile(model(), fullgraph=True, backend="eager")
    assert compiled(IDS, labels=IDS).loss.isfinite()
