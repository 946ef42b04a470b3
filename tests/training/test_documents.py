"""Documents in one window do not see one another: packed, each has the losses and gradients that it has alone."""

import json
import shutil

import numpy as np
import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_differs
from tests.support.runs import losses_of, train_quietly

from expertmesh.config.text import TextConfig
from expertmesh.data.shards import prepare_tokens
from expertmesh.data.text import TextData
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.task import Part
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.text.tokenizer import END_OF_TEXT_ID, load_tokenizer, train_tokenizer


@pytest.fixture
def short_documents(tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"{i * i} short")
    return {
        "data.path": str(folder),
        "data.document_mask": True,
        "data.validation_fraction": 0.4,
        "train.dtype": "float64",
        "model.moe.aux_loss_weight": 0.0,
    }


def loss_and_gradients(task, model, batch):
    model.zero_grad()
    total = task.loss(model, batch, Part(0, slice(0, len(batch[0])), Ranks())).total
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("heads", [None, 1], ids=["as many keys", "grouped keys"])
def test_a_packed_window_is_its_documents_alone(tiny, short_documents, heads):
    task = GPTTask(tiny(**short_documents, **{"model.num_kv_heads": heads, "model.init_std": 0.2}))
    data = task.prepare()
    model = task.builder.build(device="cpu", dtype=torch.float64)
    batch = data.batch(0, 2)
    ids_BS, targets_BS, more = batch
    document_BS = more["document"]
    starts = ids_BS == END_OF_TEXT_ID
    assert torch.equal(document_BS[:, 1:] - document_BS[:, :-1], starts[:, 1:].long())
    assert int(starts.sum()) > 4, "windows of several documents"
    packed, gradients = loss_and_gradients(task, model, batch)
    alone = torch.zeros(())
    summed = {name: torch.zeros_like(g) for name, g in gradients.items()}
    for ids_S, targets_S, document_S in zip(ids_BS, targets_BS, document_BS, strict=True):
        for number in document_S.unique():
            one = document_S == number
            total, found = loss_and_gradients(task, model, (ids_S[one][None], targets_S[one][None]))
            alone = alone + total
            for name, gradient in found.items():
                summed[name] += gradient
    assert_close_fp64(packed, alone, what="loss")
    for name, gradient in gradients.items():
        assert_close_fp64(gradient, summed[name], what=name)
    crossing, _ = loss_and_gradients(task, model, (ids_BS, targets_BS))
    assert_differs(packed, crossing, what="the loss where documents see one another")
    *measured, more = next(data.validation(2, 2))
    with torch.no_grad():
        nats = task.measure(model.eval(), (*measured, more), Part(0, slice(0, 2), Ranks()))["nats"]
    expected, _ = loss_and_gradients(task, model, (*measured[:2], more))
    assert_close_fp64(nats, expected, what="nats of an evaluation")


def losses_of_run(values):
    config = GPTRunConfig.model_validate_json(values)
    train_quietly(config)
    return losses_of(config)


def test_ranks_that_share_windows_tell_documents_apart(tiny, short_documents, two_ranks, tmp_path):
    config = tiny(**short_documents, **{"train.steps": 2})
    changes = {"parallel.tp_degree": 2, "train.run_dir": str(tmp_path / "two")}
    one = losses_of_run(config.model_dump_json())
    two = two_ranks.run(losses_of_run, config.updated(changes).model_dump_json())[0]
    assert_close_fp64(np.array(two), np.array(one), what="losses")


def test_a_run_keeps_to_its_mask(tiny, short_documents, run_quietly):
    config = tiny(**short_documents, **{"train.steps": 2})
    run_quietly(config)
    changes = {"data.document_mask": False, "train.steps": 4, "train.resume": "auto"}
    with pytest.raises(ConfigError, match="data.document_mask=False: the run in .* has True"):
        run_quietly(config.updated(changes))
    with pytest.raises(ConfigError, match="data.document_mask=True: conflicts with model.batch"):
        config.updated({"model.batch_invariant": True})


def test_documents_are_told_apart_in_whole_windows_only(tiny, short_documents):
    task = GPTTask(tiny(**short_documents))
    model = task.builder.build(device="cpu", dtype=torch.float64)
    ids_BS = torch.ones(1, 4, dtype=torch.int64)
    cache = model.new_cache(batch_size=1, max_len=4)
    context = cache.begin(ids_BS, token_mask_BS=None)
    with pytest.raises(ConfigError, match="document_BS with a context"):
        model(ids_BS, document_BS=ids_BS, context=context)


def test_a_window_is_of_the_place_that_it_begins_in(tmp_path):
    places = [tmp_path / letter for letter in "ab"]
    for place in places:
        place.mkdir()
        for i in range(20):
            (place / f"{i}.txt").write_text(place.name * (3 + i))
    config = TextConfig(path=tuple(map(str, places)), cache_dir=str(tmp_path / "cache"), seq_len=4)
    data = TextData(config, vocab_size=257, seed=0)
    ids_BS, _, more = data.batch(0, data.windows.num_windows)
    assert data.labels == tuple(map(str, places))
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    letters = [tokenizer.decode([first]) for first in ids_BS[:, 0].tolist()]
    pairs = [(a, "ab"[i]) for a, i in zip(letters, more["label"].tolist(), strict=True) if a]
    assert {a for a, _ in pairs} == {"a", "b"} and all(a == b for a, b in pairs)


def windows_by_label(config):
    """Labels, and the letters of the windows of each (the first token's, which may end a text)."""
    data = TextData(config, vocab_size=257, seed=0)
    ids_BS, _, more = data.batch(0, data.windows.num_windows)
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    found = {label: set() for label in data.labels}
    for ids_S, label in zip(ids_BS.tolist(), more["label"].tolist(), strict=True):
        found[data.labels[label]] |= set(tokenizer.decode(ids_S[:1]))
    return found


def test_a_label_is_an_entry_of_the_path(tmp_path, caplog):
    """A pattern is one entry, the same folder twice are two, and more than 64 are said to be too many."""
    for name in ("a0", "a1", "b"):
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(name[0] * (30 + i))
    pattern, b = str(tmp_path / "a*"), str(tmp_path / "b")
    common = {"cache_dir": str(tmp_path / "cache"), "seq_len": 4}
    found = windows_by_label(TextConfig(path=(pattern, f"{b}:2", b), **common))
    assert found == {pattern: {"a"}, b: {"b"}, f"{b} (2)": {"b"}}
    alone = TextData(TextConfig(path=pattern, **common), vocab_size=257, seed=0)
    assert alone.labels == () and "entries" not in caplog.text
    many = TextData(TextConfig(path=(b,) * 65, **common), vocab_size=257, seed=0)
    assert many.labels == () and "has 65 entries of data.path" in caplog.text


def save_with_end(folder, end, *, special=True):
    """A tokenizer of bytes whose token 0 has another name."""
    model = json.loads(train_tokenizer(["ab"], vocab_size=257).to_str())
    token = {"id": 0, "content": end, "special": special, "single_word": False}
    model["added_tokens"] = [token | {"lstrip": False, "rstrip": False, "normalized": False}]
    vocabulary = model["model"]["vocab"]
    model["model"]["vocab"] = {(end if token == "<|endoftext|>" else token): n for token, n in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(model))


def test_the_end_of_a_text_is_the_one_that_is_named_beside_the_tokenizer(tiny, run_quietly, tmp_path):
    """It is no token that is known by its name; the run keeps what names it, and goes on from its folder alone."""
    place = tmp_path / "given"
    place.mkdir()
    save_with_end(place, "[END]")
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} " * 40)
    (tmp_path / "talks.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": r, "content": f"{i}"} for r in ("user", "assistant")]}) + "\n"
            for i in range(40)
        )
    )
    options = {
        "data.encode_with": str(place / "tokenizer.json"),
        "model.vocab_size": 300,
        "data.seq_len": 32,
        "model.max_seq_len": 32,
    }
    for path in ("texts", "talks.jsonl"):
        config = tiny(
            **options,
            **{"data.path": str(tmp_path / path), "train.run_dir": str(tmp_path / path[:4])},
        )
        (place / "tokenizer_config.json").unlink(missing_ok=True)
        with pytest.raises(ConfigError, match=r"has no token.*name it as eos_token in the tokenizer_c"):
            run_quietly(config)
        eos = "[END]" if path == "texts" else {"content": "[END]", "special": True}
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        run_quietly(config)
    moved = tmp_path / "moved"
    (tmp_path / "text").rename(moved)
    shutil.rmtree(place)
    opened = open_model(moved)
    assert opened.text.end_ids == (0,) and opened.text.start_ids == (0,)


def test_texts_that_quote_an_end_that_is_no_special_token_keep_their_labels(tmp_path):
    """Their tokens have more ends than there are documents."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(name * 9 + "</s>" * 9 + name * (9 + i))
    save_with_end(tmp_path, "</s>", special=False)
    config = TextConfig(
        path=(str(tmp_path / "a"), str(tmp_path / "b")),
        cache_dir=str(tmp_path / "cache"),
        seq_len=4,
        encode_with=str(tmp_path / "tokenizer.json"),
    )
    tokens = prepare_tokens(config, vocab_size=257).training
    assert (tokens.tokens_N == 0).sum() == 10 * tokens.num_documents
    assert (tokens.tokens_N[tokens.ends - 1] == 0).all() and tokens.ends[-1] == len(tokens.tokens_N)
    found = windows_by_label(config)
    assert [letters & set("ab") for letters in found.values()] == [{"a"}, {"b"}]
