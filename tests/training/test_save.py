"""A changed model becomes a run: it is loaded, trained on and written for the hub with its new tokens; refusals leave
no folder."""

import copy
import json
from pathlib import Path

import pytest
import torch
from tests.oracle import numerics
from tests.support.hub_models import tiny_model
from tests.support.serving import make_run

import expertmesh as em
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert
from expertmesh.text.tokenizer import load_tokenizer, train_tokenizer

NEW = ["<plan>", "</plan>"]
TEXT = "a <plan> of some words </plan>"


@pytest.fixture(scope="module")
def hub_run(tmp_path_factory):
    """A run that came from the hub, with files beside its tokenizer."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model("mixtral", num_experts=2, top_k=1, vocab_size=300).save_pretrained(folder / "theirs")
    tokenizer = train_tokenizer(["a few words of some text " * 9], vocab_size=300)
    tokenizer.save(str(folder / "theirs" / "tokenizer.json"))
    (folder / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    return convert(folder / "theirs", folder / "run").path


def test_a_model_with_more_tokens_is_a_run(hub_run, tmp_path, corpus_folder, cache_folder):
    model, tokenizer = em.load(hub_run)
    size = tokenizer.get_vocab_size()
    assert em.add_tokens(model, tokenizer, [*NEW, *(f"<{i}>" for i in range(60))]) == 62
    path = em.save(model, tokenizer, tmp_path / "more", like=hub_run)
    again, its_tokenizer = em.load(path)
    assert its_tokenizer.to_str() == tokenizer.to_str()
    assert its_tokenizer.encode(TEXT).ids.count(size) == 1
    before, after = model.state_dict(), again.state_dict()
    assert again.config == model.config and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    options = {"max_tokens": 5, "temperature": 0}
    assert em.generate(again, its_tokenizer, TEXT, **options) == em.generate(model, tokenizer, TEXT, **options)
    assert (path / "hub" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (path / "hub" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    out = convert(path, tmp_path / "out").path
    assert load_tokenizer(out / "tokenizer.json").to_str() == tokenizer.to_str()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == model.vocab_size
    changes = {"data.path": str(corpus_folder), "data.cache_dir": str(cache_folder), "data.max_bytes": None, "data.seq_len": 16,  # noqa: E501
               "train.init_from": str(path), "train.run_dir": str(tmp_path / "on"), "train.steps": 2, "optim.warmup_steps": 1,  # noqa: E501
               "train.batch_size": 2, "train.device": "cpu", "train.tensorboard": False}  # fmt: skip
    result = em.train(em.recipe("gpt-moe-test", changes), quiet=True)
    assert result.step == 2
    trained, last = em.load(tmp_path / "on")
    assert trained.vocab_size == model.vocab_size and last.token_to_id(NEW[0]) == size


OF_TINY = {"data.cache_dir": "CACHE", "data.path": "TEXTS", "train.steps": 2, "optim.warmup_steps": 1, "train.device": "cpu",  # noqa: E501
           "train.tensorboard": False, "data.max_bytes": None}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.seq_len": 128}, None),
        ({"data.seq_len": 256, "train.batch_size": 2}, None),
        ({"data.seq_len": 257}, "data.seq_len=257: must be at most model.max_seq_len, 256"),
        ({"parallel.ep_degree": (1, 1, 1)}, "parallel.ep_degree=.*one per MoE layer"),
    ],
)
def test_options_of_the_other_run_hold_before_those_of_the_recipe(
    tmp_path, corpus_folder, cache_folder, changes, words
):
    """The recipe has room for 64 positions, the run that is begun with for 256."""
    run = make_run(tmp_path / "run", **{"model.max_seq_len": 256})
    places = {"CACHE": str(cache_folder), "TEXTS": str(corpus_folder)}
    given = {name: places.get(value, value) for name, value in OF_TINY.items()} | changes
    given |= {"train.init_from": str(run), "train.run_dir": str(tmp_path / "on")}
    if words is None:
        assert em.train(em.recipe("gpt-moe-test", given), quiet=True).step == 2
        assert em.load(tmp_path / "on").model.config.max_seq_len == 256
        return
    with pytest.raises(ConfigError, match=words):
        em.train(em.recipe("gpt-moe-test", given), quiet=True)
    assert not (tmp_path / "on").exists()


def spoiled_tokenizer(model, tokenizer):
    tokenizer.add_tokens([f"<{i}>" for i in range(400)])


REFUSED = {
    "too many tokens": (spoiled_tokenizer, "more tokens than the model's 300"),
    "adapters": (lambda model, tokenizer: em.lora.add(model, rank=2), "has adapters; merge them first"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_no_folder(name, hub_run, tmp_path):
    change, words = REFUSED[name]
    model, tokenizer = em.load(hub_run)
    change(model, tokenizer)
    with pytest.raises(ConfigError, match=words):
        em.save(model, tokenizer, tmp_path / "more", like=hub_run)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(hub_run):
    with pytest.raises(ConfigError, match="exists already"):
        em.save(*em.load(hub_run), hub_run, like=hub_run)
    with pytest.raises(ConfigError, match="model is a Linear"):
        em.save(torch.nn.Linear(2, 2), em.load(hub_run).tokenizer, Path("none"), like=hub_run)


def spread_with_tokens(run):
    """Logits of a spread model with new tokens, and its size."""
    model, tokenizer = em.load(run, spread=True)
    em.add_tokens(model, tokenizer, [f"<{i}>" for i in range(70)])
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode("a <3> few <69>").ids])).logits_BSV
    with pytest.raises(ConfigError, match="spread over ranks; save it on one process"):
        em.save(model, tokenizer, run.parent / "spread", like=run)
    return logits, model.vocab_size, tokenizer.to_str()


def test_a_model_that_is_loaded_over_ranks_gets_tokens(hub_run, two_ranks):
    model, tokenizer = em.load(hub_run)
    em.add_tokens(model, tokenizer, [f"<{i}>" for i in range(70)])
    ids = torch.tensor([tokenizer.encode("a <3> few <69>").ids])
    with torch.no_grad():
        expected = model(ids).logits_BSV
    (one, size, words), (other, *_) = two_ranks.run(spread_with_tokens, hub_run)
    assert torch.equal(one, other) and size == model.vocab_size and words == tokenizer.to_str()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).logits_BSV
    numerics.assert_two_times(one, expected, exact, what="logits")
    assert not (hub_run.parent / "spread").exists()
