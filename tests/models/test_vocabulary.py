"""More tokens and fewer for trained models: what was there stays to the bit, what is new is the mean, and nothing is
left of a refusal."""

import copy

import pytest
import torch
from tests.oracle import numerics
from tests.support.known_rows import known
from tokenizers import Tokenizer
from torch import nn

import expertmesh as em
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.vocabulary import resize_vocabulary
from expertmesh.text.tokenizer import train_tokenizer

SMALL = {"vocab_size": 300, "max_seq_len": 16, "dim": 16, "num_heads": 2, "ffn_hidden_dim": 16}
MOE = {"hidden_dim": 8, "num_experts": (3,)}


def gpt(**options):
    return GPT(ModelConfig(**SMALL, num_layers=1, moe=MOE, **options), seed=0)


def seq2seq(**options):
    from expertmesh_families.seq2seq.config import Seq2SeqConfig
    from expertmesh_families.seq2seq.model import Seq2Seq

    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "moe_every": 1}
    return Seq2Seq(Seq2SeqConfig(**SMALL, **layers, moe=MOE, **options), seed=0)


def tokenizer():
    return train_tokenizer(["some text to learn from " * 9], vocab_size=300)


def run(model, ids):
    model.eval()
    return model(ids).logits_BSV if isinstance(model, GPT) else model(ids, ids).logits_NV


@pytest.mark.parametrize("size", [260, 300, 311])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("make", known([gpt, seq2seq]))
def test_old_tokens_keep_their_rows_and_new_ones_are_the_mean(make, tied, size):
    model = make(tie_embeddings=tied)
    model.embedding.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.zeros(2, 5, dtype=torch.int64) + torch.arange(5) % size
    old = run(model, ids)
    resize_vocabulary(model, size)
    assert model.config.vocab_size == model.vocab_size == model.embedding.num_embeddings == size
    for name, parameter in model.named_parameters():
        kept = min(size, 300)
        if name in ("embedding.weight", "output.weight"):
            assert torch.equal(parameter[:kept], before[name][:kept])
            mean = before[name].mean(0).expand(size - kept, -1)
            assert torch.equal(parameter[kept:], mean)
        else:
            assert torch.equal(parameter, before[name]), name
        assert parameter.requires_grad is (name != "embedding.weight")
    new = run(model, ids)
    assert new.shape[-1] == size
    oracle = run(make(tie_embeddings=tied).double(), ids)[..., : min(size, 300)]
    numerics.assert_two_times(new[..., : min(size, 300)], old[..., : min(size, 300)], oracle, what="logits")
    again = type(model)(model.config, seed=1)
    again.load_state_dict(model.state_dict())
    assert torch.equal(run(again, ids), new)


def test_rows_that_are_drawn_are_of_the_models_deviation():
    model = gpt(tie_embeddings=False, init_std=0.5)
    resize_vocabulary(model, 4300, from_mean=False)
    for module in (model.embedding, model.output):
        new = module.weight[300:]
        assert 0.45 < new.std() < 0.55 and len(new.unique(dim=0)) == 4000


@pytest.mark.parametrize("special", [True, False], ids=["marks", "words"])
@pytest.mark.parametrize("make", known([gpt, seq2seq]))
def test_tokens_are_added_and_learned(make, special):
    """To a tokenizer with fewer tokens than the model: rows that nobody used are used first."""
    model, words = make(), tokenizer()
    size = words.get_vocab_size()
    room = model.vocab_size - size
    tokens = [f"<{i}>" for i in range(room + 2)]
    mean = model.embedding.weight[:size].mean(0)
    assert em.add_tokens(model, words, [*tokens, tokens[0], "<|endoftext|>"], special=special) == len(tokens)
    assert words.get_vocab_size() == model.vocab_size == 302
    assert [words.token_to_id(t) for t in tokens] == list(range(size, 302))
    assert torch.equal(model.embedding.weight[size:], mean.expand(len(tokens), -1))
    ids = words.encode(f"some {tokens[-1]} text").ids
    assert (301 in ids) is not special
    assert em.add_tokens(model, words, tokens) == 0 and model.vocab_size == 302
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.embedding.weight[301].detach().clone()
    target = torch.full((1, 4), 301)
    model.train()
    losses = []
    for _ in range(5):
        output = model(target) if isinstance(model, GPT) else model(target, target)
        logits = output.logits_BSV[0] if isinstance(model, GPT) else output.logits_NV
        loss = nn.functional.cross_entropy(logits, target[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not torch.equal(model.embedding.weight[301], before)


def wrapped(model):
    model.embedding = nn.utils.parametrizations.weight_norm(model.embedding)
    return model


REFUSED = {
    "no model": (lambda: nn.Linear(2, 2), ["<a>"], "model is a Linear; it must be a GPT or an"),
    "wrapped": (lambda: wrapped(gpt()), ["<a>"] * 400, "that something else wraps"),
    "one text": (gpt, "<a>", "tokens is a str; it must be a list"),
    "bytes": (gpt, [b"<a>"], "is no text, or empty"),
    "nothing": (gpt, ["<a>", ""], "is no text, or empty"),
    "blanks": (gpt, ["<a>", "  "], "is no text, or empty"),
    "a number": (gpt, ["<a>", 3], "3 is no text"),
    "no list": (gpt, {"<a>"}, "tokens is a set"),
}


def state_of(model, words):
    return (
        {name: t.clone() for name, t in model.state_dict().items()},
        getattr(model, "config", None),
        [(name, type(m), m.training) for name, m in model.named_modules()],
        [(name, p.requires_grad) for name, p in model.named_parameters()],
        words.to_str(),
    )


def assert_same(a, b):
    assert a[0].keys() == b[0].keys() and a[1:] == b[1:]
    for name, tensor in a[0].items():
        assert torch.equal(tensor, b[0][name]), name


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_left_of_a_refusal(name):
    make, tokens, match = REFUSED[name]
    model, words = make(), tokenizer()
    before = state_of(model, words)
    with pytest.raises(ConfigError, match=match):
        em.add_tokens(model, words, tokens)
    assert_same(before, state_of(model, words))


@pytest.mark.parametrize(
    ("size", "match"),
    [
        (0, "vocab_size=0"),
        (-1, "vocab_size=-1"),
        ("310", "vocab_size='310'"),
        (True, "vocab_size=True"),
        (2**31, "vocab_size"),
        (298, "end_ids"),
    ],
)
def test_a_size_that_breaks_a_rule_changes_nothing(size, match):
    model, words = gpt(end_ids=(299,)), tokenizer()
    before = state_of(model, words)
    with pytest.raises(ConfigError, match=match):
        resize_vocabulary(model, size)
    assert_same(before, state_of(model, words))


def test_a_spread_model_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole, words = gpt(), tokenizer()
        em.parallelize(model := copy.deepcopy(whole), em.RunConfig().parallel)
        text = words.to_str()
        with pytest.raises(ConfigError, match="embedding is spread over ranks already"):
            em.add_tokens(model, words, [f"<{i}>" for i in range(400)])
        assert words.to_str() == text and model.config == whole.config
        assert model.embedding.weight.shape == whole.embedding.weight.shape
    finally:
        torch.distributed.destroy_process_group()


def test_the_tokenizer_is_one_of_tokenizers():
    with pytest.raises(ConfigError, match="tokenizer is a dict; it must be a tokenizers.Tokenizer"):
        em.add_tokens(gpt(), {}, ["<a>"])
    assert isinstance(tokenizer(), Tokenizer)
