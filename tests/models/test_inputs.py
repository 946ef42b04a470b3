"""What the models are given and cannot take: one line for each argument's shape, type, device and range, before anything is computed."""

import copy
import functools

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh_families.seq2seq.config import Seq2SeqConfig
from expertmesh_families.seq2seq.model import Seq2Seq
from expertmesh_families.swin.config import SwinConfig
from expertmesh_families.swin.model import Swin

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


@functools.cache
def seq2seq(positions="rotary"):
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "max_source_len": 8}
    config = Seq2SeqConfig(**SMALL, **layers, moe=MOE, positions=positions)
    return Seq2Seq(config, seed=0).eval()


@functools.cache
def swin():
    config = SwinConfig(
        image_size=16, patch_size=2, window_size=4, dim=8, depths=(1, 2), num_heads=(1, 2), moe_stages=(2,),
        moe={"num_experts": (3,), "top_k": 1}, num_classes=5,
    )  # fmt: skip
    return Swin(config, seed=0).eval()


def cache_of(rows=2, max_len=8, model=None, **options):
    model = gpt() if model is None else model
    if options:
        return type(model.new_cache(batch_size=1, max_len=1))(
            model.config, batch_size=rows, max_len=max_len, **options
        )
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
    "no options": (IDS, {"dispatch": 2}, "dispatch=2: must be"),
    "replicated experts on one process": (IDS, {"dispatch": DispatchOptions(replicated_experts=1)}, "replicated_experts=1"),
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
    "a Seq2Seq of a dict": (making(Seq2Seq, {}), "config is a dict; it must be a Seq2SeqConfig"),
    "a Swin of a dict": (making(Swin, {}), "config is a dict; it must be a SwinConfig"),
    "a GPT of integers": (lambda: GPT(gpt().config, dtype=torch.int32), "dtype=torch.int32"),
    "a Seq2Seq of integers": (lambda: Seq2Seq(seq2seq().config, dtype=INT), "dtype=torch.int64"),
    "a Swin of integers": (lambda: Swin(swin().config, dtype=INT), "dtype=torch.int64"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_made_is_refused_in_one_line(name):
    make, match = MADE[name]
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
        lambda: seq2seq("untied")(IDS, IDS, source_mask_BS=LEFT), "source_mask_BS has padding before a token; sources with untied"),
    "reading padding before untied sources": (read(mask=LEFT, positions="untied"), "token_mask_BS has padding before a token"),
    "a source without tokens": (forward(IDS, IDS, source_mask_BS=EMPTY), "row without a token"),
    "indices of rows": (forward(IDS, IDS, source_index_T=torch.arange(2)), "source_index_T has shape"),
    "indices of floats": (forward(IDS, IDS, target_index_T=torch.ones(8)), "target_index_T has dtype"),
    "places in a square": (forward(IDS, IDS, target_places_N=IDS), "target_places_N has shape"),
    "places of bytes": (forward(IDS, IDS, target_places_N=IDS[0].to(torch.uint8)), "target_places_N has dtype torch.uint8"),
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
    call, match = SEQ2SEQ_CALLS[name]
    with pytest.raises(ConfigError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


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


IMAGES = torch.ones(2, 3, 16, 16)
SWIN_CALLS = {
    "images of a list": ([1.0], {}, "images_BCHW is a list"),
    "one image": (
        IMAGES[0],
        {},
        r"images_BCHW has shape \(3, 16, 16\); it must be \(B, 3, 16, 16\), .*image\[None\]",
    ),
    "images of another size": (IMAGES[..., 1:], {}, r"images_BCHW has shape \(2, 3, 16, 15\)"),
    "images of bytes": (IMAGES.to(torch.uint8), {}, "images_BCHW has dtype torch.uint8"),
    "images elsewhere": (IMAGES.to(META), {}, "images_BCHW is on meta and the model on cpu"),
    "indices of others": (IMAGES, {"image_index_B": torch.arange(3)}, "image_index_B has shape"),
    "indices of floats": (IMAGES, {"image_index_B": torch.ones(2)}, "image_index_B has dtype"),
    "indices as a list": (IMAGES, {"image_index_B": [0, 1]}, "image_index_B is a list"),
}


@pytest.mark.parametrize("name", SWIN_CALLS)
def test_a_swin_refuses_in_one_line(name):
    images, more, match = SWIN_CALLS[name]
    with pytest.raises(ConfigError, match=match) as caught:
        swin()(images, **more)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


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
    assert torch.equal(
        seq2seq()(IDS, IDS, target_mask_BS=MASK).logits_NV, seq2seq()(IDS, IDS).logits_NV
    )
    assert swin()(IMAGES, image_index_B=torch.arange(2)).logits_BC.shape == (2, 5)


# PyTorch's own compiler makes the object that PyTorch's own warning says nobody should make.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_checks_break_no_graph():
    for model, args, more in (
        (gpt(), (IDS,), {"token_mask_BS": MASK, "num_logits": 2, "top_k": 1}),
        (gpt(), (IDS,), {"document_BS": IDS}),
        (seq2seq(), (IDS, IDS), {"source_mask_BS": MASK, "target_places_N": torch.tensor([0, 3])}),
        (swin(), (IMAGES,), {"image_index_B": torch.arange(2)}),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        (found, *_), (expected, *_) = (
            torch.utils._pytree.tree_leaves(one(*args, **more)) for one in (compiled, model)
        )
        assert found.shape == expected.shape and found.isfinite().all()
