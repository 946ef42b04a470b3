"""What the models are given and cannot take: one line for each argument's shape, type, device and range, before
anything is computed."""

import functools

import pytest
import torch

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

SMALL = {"vocab_size": 300, "max_seq_len": 16, "dim": 16, "num_heads": 2, "ffn_hidden_dim": 16}
MOE = {"hidden_dim": 8, "num_experts": (3,)}
IDS = torch.arange(8).view(2, 4) + 3
MASK = torch.ones(2, 4, dtype=torch.bool)
META = torch.device("meta")
INT = torch.int64


@functools.cache
def gpt(**options):
    return GPT(ModelConfig(**SMALL, num_layers=2, moe={**MOE, **options}), seed=0).eval()


@functools.cache
def dense():
    return GPT(ModelConfig(**SMALL, num_layers=1, moe={"num_experts": ()}), seed=0).eval()


def cache_of(rows=2, max_len=8, model=None, **options):
    model = gpt() if model is None else model
    if options:
        return type(model.new_cache(batch_size=1, max_len=1))(model.config, batch_size=rows, max_len=max_len, **options)
    return model.new_cache(batch_size=rows, max_len=max_len)


GPT_CALLS = {
    "ids are a list": ([[1, 2]], {}, "ids_BS is a list"),
    "ids of one axis": (IDS[0], {}, r"ids_BS has shape \(4,\); it must be \(B, S\)"),
    "ids of three axes": (IDS[None], {}, r"shape \(1, 2, 4\)"),
    "ids of floats": (IDS.float(), {}, "dtype torch.float32"),
    "ids of bools": (MASK, {}, "dtype torch.bool"),
    "ids of bytes": (IDS.to(torch.uint8), {}, "dtype torch.uint8"),
    "sparse ids": (IDS.to_sparse(), {}, "is a sparse_coo tensor"),
    "ids elsewhere": (IDS.to(META), {}, "ids_BS is on meta and the model on cpu"),
    "an id too large": (IDS + 296, {}, "ids_BS holds 300; it must be from 0 to 299"),
    "a negative id": (IDS - 4, {}, "ids_BS holds -1"),
    "no tokens": (IDS[:, :0], {}, r"ids_BS has shape \(2, 0\)"),
    "too many ids": (torch.ones(1, 17, dtype=torch.int64), {}, "17 tokens: must be at most"),
    "a short mask": (IDS, {"token_mask_BS": MASK[:, 1:]}, r"token_mask_BS has shape \(2, 3\)"),
    "a long mask": (IDS, {"token_mask_BS": torch.ones(2, 6) > 0}, r"it must be \(2, 4\)"),
    "a mask of one row": (IDS, {"token_mask_BS": MASK[:1]}, r"shape \(1, 4\)"),
    "a square mask": (IDS, {"token_mask_BS": torch.ones(2, 1, 4, 4) > 0}, r"\(2, 1, 4, 4\)"),
    "a mask of numbers": (IDS, {"token_mask_BS": MASK.long()}, "dtype torch.int64; it must be bool"),
    "a mask as a list": (IDS, {"token_mask_BS": [[1] * 4] * 2}, "token_mask_BS is a list"),
    "a mask elsewhere": (IDS, {"token_mask_BS": MASK.to(META)}, "token_mask_BS is on meta"),
    "short documents": (IDS, {"document_BS": IDS[:, :2]}, r"document_BS has shape \(2, 2\)"),
    "documents of one axis": (IDS, {"document_BS": IDS[0]}, r"document_BS has shape \(4,\)"),
    "documents of floats": (IDS, {"document_BS": IDS.float()}, "document_BS has dtype"),
    "documents of bools": (IDS, {"document_BS": MASK}, "document_BS has dtype torch.bool"),
    "documents elsewhere": (IDS, {"document_BS": IDS.to(META)}, "document_BS is on meta"),
    "indices of rows": (IDS, {"token_index": torch.arange(2)}, r"token_index has shape \(2,\)"),
    "indices of floats": (IDS, {"token_index": torch.ones(8)}, "token_index has dtype"),
    "indices as a range": (IDS, {"token_index": range(8)}, "token_index is a range"),
    "no logits": (IDS, {"num_logits": 0}, "num_logits=0: must be a whole number of at least 1"),
    "fewer than no logits": (IDS, {"num_logits": -1}, "num_logits=-1"),
    "half a logit": (IDS, {"num_logits": 1.5}, "num_logits=1.5"),
    "true logits": (IDS, {"num_logits": True}, "num_logits=True"),
    "logits at places": (IDS, {"num_logits": torch.tensor([1])}, "num_logits=a Tensor"),
    "rows of logits in a square": (IDS, {"logit_rows_R": IDS}, "logit_rows_R has shape"),
    "rows of floats": (IDS, {"logit_rows_R": torch.ones(2)}, "logit_rows_R has dtype"),
    "rows of bytes": (IDS, {"logit_rows_R": torch.zeros(2, dtype=torch.uint8)}, "logit_rows_R has dtype torch.uint8"),
    "a row that is none": (IDS, {"logit_rows_R": torch.tensor([8])}, "logit_rows_R holds 8"),
    "rows and a number": (IDS, {"logit_rows_R": IDS[0], "num_logits": 1}, "leave one of the two out"),
    "no experts": (IDS, {"top_k": 0}, "top_k=0: must be a whole number from 1 to num_experts=3"),
    "too many experts": (IDS, {"top_k": 4}, "num_experts=3"),
    "a negative capacity": (IDS, {"capacity_factor": -1}, "capacity_factor=-1"),
    "a capacity of text": (IDS, {"capacity_factor": "2"}, "capacity_factor='2'"),
    "ranks that are not there": (IDS, {"dispatch": DispatchOptions(route_degree=2)}, "route_degree=2"),
    "a way of no name": (IDS, {"dispatch": DispatchOptions(all_to_all="fast")}, "all_to_all='fast'"),
    "half a part": (IDS, {"dispatch": DispatchOptions(overlap_degree=1.0)}, "overlap_degree=1.0"),
    "no options": (IDS, {"dispatch": 2}, "dispatch is an int; it must be a DispatchOptions"),
    "replicated experts on one process": (IDS, {"dispatch": DispatchOptions(replicated_experts=1)}, "replicated_experts=1"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("name", GPT_CALLS)
def test_a_gpt_refuses_in_one_line(name):
    ids, more, match = GPT_CALLS[name]
    with pytest.raises(ConfigError, match=match) as caught:
        gpt()(ids, **more)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


CACHES = {
    "none": (IDS, dict, "cache is a dict"),
    "other rows": (IDS, lambda: cache_of(3), "cache holds 3 sequences and ids_BS has 2"),
    "no room": (IDS, lambda: cache_of(max_len=3), "the cache holds 3"),
    "another model": (IDS, lambda: cache_of(model=dense()), "cache has 1 layers of 2 heads of 8"),
    "another type": (IDS, lambda: cache_of(dtype=torch.float64), "cache has dtype torch.float64"),
    "elsewhere": (IDS, lambda: cache_of(device=META), "cache is on meta"),
    "ids of floats": (IDS.float(), cache_of, "ids_BS has dtype"),
    "an id too large": (IDS + 296, cache_of, "ids_BS holds 300"),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_as_it_was_where_a_token_is_refused(name):
    ids, make, match = CACHES[name]
    cache = make()
    with pytest.raises(ConfigError, match=match) as caught:
        gpt().next_logits(ids, token_mask_BS=None, cache=cache)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    assert getattr(cache, "length", 0) == 0


ROWS = {
    "a mask": (torch.tensor([True, False]), "rows_B has dtype torch.bool"),
    "of floats": (torch.ones(2), "dtype torch.float32"),
    "of two axes": (torch.tensor([[0, 1]]), r"shape \(1, 2\)"),
    "a list": ([0, 1], "rows_B is a list"),
    "from the end": (torch.tensor([0, -1]), "rows_B holds -1; it must be from 0 to 1"),
    "behind the last": (torch.tensor([0, 2]), "rows_B holds 2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_cache_is_as_it_was_where_rows_are_refused(name):
    rows, match = ROWS[name]
    caches = cache_of(), cache_of()
    for cache in caches:
        gpt().next_logits(IDS, token_mask_BS=MASK, cache=cache)
    with pytest.raises(ConfigError, match=match) as caught:
        caches[0].select(rows)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    found, expected = (gpt().next_logits(IDS, token_mask_BS=MASK, cache=one) for one in caches)
    assert torch.equal(found, expected)


def making(kind, config, **options):
    return lambda: kind(config, seed=0, **options)


MADE = {
    "fewer rows than none": (
        lambda: cache_of(-1),
        "batch_size=-1: must be a whole number of at least 0",
    ),
    "half a row": (lambda: cache_of(1.5), "batch_size=1.5"),
    "fewer tokens than none": (lambda: cache_of(max_len=-3), "max_len=-3"),
    "tokens in words": (lambda: cache_of(max_len="8"), "max_len='8'"),
    "a GPT of a dict": (making(GPT, {}), "config is a dict; it must be a ModelConfig"),
    "a GPT of integers": (lambda: GPT(gpt().config, dtype=torch.int32), "dtype=torch.int32"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_made_is_refused_in_one_line(name):
    assert_refused(*MADE[name])


def assert_refused(make, match):
    with pytest.raises(ConfigError, match=match) as caught:
        make()
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (dict, "context is a dict"),
        (
            lambda: cache_of().begin(IDS[:, :1], token_mask_BS=None),
            "is of 1 tokens and ids_BS of 4",
        ),
        (lambda: cache_of(1).begin(IDS[:1], token_mask_BS=None), "is of 1 sequences and ids_BS of"),
        (lambda: cache_of(model=dense()).begin(IDS, token_mask_BS=None), "cache has 1 layers"),
    ],
    ids=["none", "other tokens", "other sequences", "another model"],
)
def test_a_context_is_of_these_tokens_and_this_model(make, match):
    with pytest.raises(ConfigError, match=match):
        gpt()(IDS, context=make())


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"top_k": 1}, "top_k=1: has no effect in a dense model"),
        ({"capacity_factor": 1.0}, "capacity_factor=1.0: has no effect in a dense model"),
        ({"dispatch": DispatchOptions(route_degree=2)}, "route_degree=2"),
        ({"token_index": torch.arange(2)}, "token_index has shape"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_a_dense_gpt_refuses_what_a_layer_with_experts_would(more, match):
    with pytest.raises(ConfigError, match=match):
        dense()(IDS, **more)


def test_what_fits_is_taken():
    """Other integers, indices of two axes, more logits than there are, and autocast's cache."""
    found = gpt()(IDS).logits_BSV
    index = torch.arange(8)
    for ids, more in (
        (IDS.int(), {}),
        (IDS, {"token_index": index.view(2, 4)}),
        (IDS, {"token_index": index.int(), "num_logits": 9}),
        (IDS, {"document_BS": torch.zeros(2, 4, dtype=torch.int16)}),
        (IDS, {"token_mask_BS": MASK, "context": cache_of().begin(IDS, token_mask_BS=MASK)}),
        (IDS, {"dispatch": DispatchOptions(1, 1, "flat"), "capacity_factor": float("inf")}),
    ):
        assert gpt()(ids, **more).logits_BSV.shape == found.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert gpt().next_logits(IDS, token_mask_BS=None, cache=cache_of()).shape == (2, 300)


# PyTorch's own compiler makes the object that PyTorch's own warning says nobody should make.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_checks_break_no_graph():
    for model, args, more in (
        (gpt(), (IDS,), {"token_mask_BS": MASK, "num_logits": 2, "top_k": 1}),
        (gpt(), (IDS,), {"document_BS": IDS}),
    ):
        assert_breaks_no_graph(model, args, more)


def assert_breaks_no_graph(model, args, more):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    (found, *_), (expected, *_) = (torch.utils._pytree.tree_leaves(one(*args, **more)) for one in (compiled, model))
    assert found.shape == expected.shape and found.isfinite().all()
