"""Tokenizer, shards and the cache."""

import logging
import threading

import numpy as np
import pytest

from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus, texts
from expertmesh.data.shards import prepare_tokens
from expertmesh.errors import ConfigError
from expertmesh.text.tokenizer import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    load_tokenizer,
    token_num_bytes,
    train_tokenizer,
)

ODD_TEXT = f"tabs\t\r\n  caf\u00e9 \U0001f600 {END_OF_TEXT} quoted\n\n\n    x = 'y'\n"


def test_any_text_survives_encoding_and_the_special_token_in_a_text_is_text():
    tokenizer = train_tokenizer(["some text about nothing\n" * 50], vocab_size=300)
    ids = tokenizer.encode(ODD_TEXT, add_special_tokens=False).ids
    assert END_OF_TEXT_ID not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == ODD_TEXT
    sizes = token_num_bytes(tokenizer, 300)
    assert sizes[ids].sum() == len(ODD_TEXT.encode()) and sizes[END_OF_TEXT_ID] == 0
    tokenizer.add_tokens(["    "])  # text that is no mark, as in OLMoE's tokenizer
    ids = tokenizer.encode(ODD_TEXT, add_special_tokens=False).ids
    assert token_num_bytes(tokenizer, 301)[ids].sum() == len(ODD_TEXT.encode())


def test_a_tokenizer_that_was_saved_after_a_use_with_a_length_cuts_and_fills_nothing(tmp_path):
    tokenizer = train_tokenizer(["some text about nothing\n" * 50], vocab_size=300)
    whole = tokenizer.encode(ODD_TEXT).ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "t.json"))
    found = load_tokenizer(tmp_path / "t.json").encode_batch_fast([ODD_TEXT, "a"])
    assert [len(encoding.ids) for encoding in found] == [len(whole), 1]


@pytest.mark.parametrize("vocab_size, dtype", [(300, np.uint16), (70_000, np.uint32)])
def test_documents_are_packed_with_an_end_each(corpus_folder, tmp_path, vocab_size, dtype):
    config = TextConfig(path=str(corpus_folder), cache_dir=str(tmp_path), seq_len=16)
    data = prepare_tokens(config, vocab_size=vocab_size)
    tokenizer = load_tokenizer(data.tokenizer_path)
    corpus = load_corpus(config)
    for shard, documents in (
        (data.training, corpus.training),
        (data.validation, corpus.validation),
    ):
        tokens = np.asarray(shard.tokens_N)
        assert tokens.dtype == dtype
        ends = np.flatnonzero(tokens == END_OF_TEXT_ID)
        assert len(ends) == len(documents) == shard.num_documents
        assert ends[-1] == len(tokens) - 1
        pieces = np.split(tokens, ends + 1)[:-1]
        decoded = [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]
        assert decoded == list(texts(documents))
        sizes = token_num_bytes(tokenizer, vocab_size)
        assert sizes[tokens].sum() == shard.num_bytes


def test_the_tokenizer_learns_from_the_training_split_only(corpus_folder, tmp_path):
    config = TextConfig(path=str(corpus_folder), cache_dir=str(tmp_path), seq_len=16)
    data = prepare_tokens(config, vocab_size=300)
    training, validation = (list(texts(s)) for s in (data.corpus.training, data.corpus.validation))
    assert not set(training) & set(validation)
    alone, all_texts = (train_tokenizer(t, vocab_size=300) for t in (training, training + validation))
    assert load_tokenizer(data.tokenizer_path).to_str() == alone.to_str() != all_texts.to_str()


def test_the_cache_is_used_and_depends_on_text_and_vocabulary(make_corpus, tmp_path):
    folder = make_corpus(tmp_path / "texts", documents=20)
    config = TextConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), seq_len=16)

    def prepare(vocab_size=300):
        data = prepare_tokens(config, vocab_size=vocab_size)
        return data.key, data.tokenizer_path.with_name("training.bin").stat().st_mtime_ns

    first = prepare()
    assert prepare() == first
    larger = prepare(vocab_size=310)
    with (folder / "file003.txt").open("a") as file:
        file.write("more")
    assert len({first[0], larger[0], prepare()[0]}) == 3


def test_many_threads_share_the_cache_and_build_once(corpus_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "expertmesh.data")
    config = TextConfig(path=str(corpus_folder), cache_dir=str(tmp_path), seq_len=16)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare_tokens(config, vocab_size=300))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("learning a tokenizer" in message for message in caplog.messages) == 1
    assert len({data.key for data in results}) == 1 and len(results) == 4
    assert not list(tmp_path.glob("*.partial-*"))


def test_too_little_text_for_one_sequence_is_one_line(corpus_folder, tmp_path):
    config = TextConfig(path=str(corpus_folder), cache_dir=str(tmp_path), seq_len=10**6)
    with pytest.raises(ConfigError, match=r"data\.seq_len=1000000: the training split has only"):
        prepare_tokens(config, vocab_size=300)
