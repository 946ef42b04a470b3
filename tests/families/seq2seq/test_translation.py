"""Parallel files become samples: drawn by a temperature, in epochs, resumable at any sample; mistakes are one line."""

import gzip
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from tests.support.calls import calls_of

from expertmesh.data.noise import Draws, add_noise, poisson
from expertmesh.errors import ConfigError
from expertmesh.text.tokenizer import load_tokenizer, train_tokenizer
from expertmesh_families.seq2seq.config import ParallelTextConfig
from expertmesh_families.seq2seq.data import (
    CHUNK,
    Examples,
    Mixture,
    TranslationData,
    probabilities,
)
from expertmesh_families.seq2seq.parallel_text import (
    MASK_ID,
    in_turn,
    languages_of,
    prepare_parallel,
    read_lines,
    tag_id,
)

LINES = 60
PACKED = {"en": (".gz", gzip.compress), "fr": (".zst", zstandard.compress)}


def write(folder, *, languages=("de", "en", "fr"), lines=LINES, splits=("train", "val")):
    """Line i: i words of each language; French lacks two thirds of its lines."""
    folder.mkdir(exist_ok=True)
    for split in splits:
        for code in languages:
            rows = [
                "" if code == "fr" and i % 3 else " ".join(f"{code}{i}.{j}" for j in range(1 + i % 7))
                for i in range(lines)
            ]
            text = "".join(f"{row}\n" for row in rows).encode()
            ending, packed = PACKED.get(code, ("", lambda raw: raw))
            (folder / f"{split}.{code}{ending}").write_bytes(packed(text))
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    return write(folder / "corpus"), str(folder / "cache")


def data_of(corpus, *, seed=0, source_len=64, target_len=64, **options):
    path, cache = corpus
    config = ParallelTextConfig(path=(path,), cache_dir=cache, neighbours=8, **options)
    return TranslationData(config, vocab_size=330, max_source_len=source_len, max_target_len=target_len, seed=seed)


def rows(batch):
    sources, source_lengths, targets, target_lengths, tasks = batch
    return [
        (s[:n].tolist(), t[:m].tolist(), int(task))
        for s, n, t, m, task in zip(sources, source_lengths, targets, target_lengths, tasks, strict=True)
    ]


def test_samples_are_the_same_in_batches_of_any_size(corpus):
    options = {"denoising": 0.4, "temperature": 3.0}
    data = data_of(corpus, **options)
    whole = rows(data.batch(CHUNK - 20, 40))  # over the end of a chunk
    again = data_of(corpus, **options)
    parts = [again.batch(CHUNK - 20 + start, 8) for start in (32, 0, 8, 24, 16)]
    parts = [parts[i] for i in (1, 2, 4, 3, 0)]
    assert [row for part in parts for row in rows(part)] == whole
    other = rows(data_of(corpus, seed=1, **options).batch(CHUNK - 20, 40))
    assert other != whole
    assert len({data_of(corpus, **o).key for o in ({}, options, {"pairs": ("en-de",)})}) == 3
    for batch in (data.batch(0, 64),):
        assert not batch[0][torch.arange(batch[0].shape[1]) >= batch[1][:, None]].any()


def test_a_sample_is_a_line_and_its_translation(corpus):
    data = data_of(corpus)
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    assert languages_of(tokenizer) == data.languages == ("de", "en", "fr")
    seen = set()
    for source, target, _ in rows(data.batch(0, 400)):
        assert source[-1] == target[-1] == 0
        words, others = (tokenizer.decode(ids[:-1]).split() for ids in (source[1:], target))
        code, to = words[0][:2], others[0][:2]
        assert source[0] == tag_id(data.languages, to) and code != to
        assert [word[2:] for word in words] == [word[2:] for word in others]
        seen.add((code, to))
    assert len(seen) == 6
    # <|de|> in a text is text
    assert min(tokenizer.encode("<|de|>", add_special_tokens=False).ids) > MASK_ID + 3


def test_what_is_too_long_is_counted(corpus, caplog):
    whole = data_of(corpus)
    assert not caplog.records
    part = data_of(corpus, target_len=20)
    before, after = (
        [int(word.replace(",", "")) for word in data.description.split() if word[0].isdigit()] for data in (whole, part)
    )
    (record,) = caplog.records
    assert (
        f"{before[1] - after[1]:,} training and {before[2] - after[2]:,} validation examples are left out: "
        "longer than model.max_source_len=64 or model.max_seq_len=20" in record.message
    ), record.message


def test_every_direction_goes_through_its_lines_before_one_comes_again(corpus):
    data = data_of(corpus, pairs=("en-de", "fr-en"))
    whole = Counter()
    for task, example, _ in data.mixture.samples(0, CHUNK):
        whole[task, example] += 1
    for task in (0, 1):
        times = [count for (t, _), count in whole.items() if t == task]
        assert max(times) - min(times) <= 1, "within a chunk an example is used as often as any other"


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_directions_are_drawn_by_their_temperature(temperature):
    """p proportional to n^(1/T), each chunk to the nearest whole sample."""
    counts = [5, 90, 1000]
    weights = np.array([n ** (1 / temperature) for n in counts])
    shares = probabilities(counts, temperature=temperature)
    assert np.allclose(shares, weights / weights.sum(), rtol=1e-12)
    tasks = [Examples(f"l{i}", "x", np.zeros((n, 2), dtype=int), np.arange(n) % 9) for i, n in enumerate(counts)]
    mixture = Mixture(tasks, shares, seed=0, neighbours=16)
    for chunks in (1, 3):
        found = Counter(task for task, _, _ in mixture.samples(0, chunks * CHUNK))
        for task, share in enumerate(shares):
            assert abs(found[task] - chunks * CHUNK * share) <= 1
    both = probabilities([7, 7, 9], temperature=temperature, kinds=[0, 0, 1], shares=(0.5, 0.5))
    assert np.allclose(both, [0.25, 0.25, 0.5], rtol=1e-12)


def test_neighbours_have_about_one_length(corpus):
    batch = data_of(corpus).batch(0, 512)
    lengths = (batch[1] + batch[3]).view(-1, 8)
    spread = (lengths.amax(1) - lengths.amin(1)).double().mean()
    assert spread < 0.2 * lengths.double().std() * 8**0.5


def test_what_is_left_out_of_training_is_evaluated(corpus):
    data = data_of(corpus, without_pairs=("en-fr",))
    assert "en-fr" in data.directions and len(data.directions) == 6
    tag = tag_id(data.languages, "fr")
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    for source, _, _ in rows(data.batch(0, 300)):
        assert source[0] != tag or tokenizer.decode(source[1:-1]).startswith("de")
    lines = [row for batch in data.validation(None, 7) for row in rows(batch)]
    assert Counter(task for _, _, task in lines) == {
        i: 60 if "fr" not in name else 20 for i, name in enumerate(data.directions)
    }
    assert len([row for batch in data.validation(11, 4) for row in rows(batch)]) == 11


def test_not_every_direction_is_left_out(corpus):
    with pytest.raises(ConfigError, match="without_pairs=en-fr: leaves no direction to train of"):
        data_of(corpus, pairs=("en-fr",), without_pairs=("en-fr",))


def test_long_lines_are_left_out(corpus):
    short = data_of(corpus, source_len=20, target_len=12)
    batch = short.batch(0, 200)
    assert batch[0].shape[1] <= 20 and batch[2].shape[1] <= 12
    assert len(short.mixture._tasks[0].where) < LINES


def test_denoising_repairs_the_text_of_one_language(corpus):
    data = data_of(corpus, denoising=0.5, noise_fraction=0.4, permute_sentences=False)
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    found = rows(data.batch(0, 400))
    repaired = [(s, t) for s, t, task in found if task >= 6]
    drawn = [task >= 6 for task, _, _ in data.mixture.samples(0, CHUNK)]
    assert abs(sum(drawn) - CHUNK / 2) <= 3, "three tasks, each to the nearest sample"
    for source, target in repaired:
        kept = [i for i in source[1:-1] if i != MASK_ID]
        rest = iter(target)
        assert all(i in rest for i in kept), "what is left is in its order"
        assert len(target) - 1 - len(kept) == min(round(0.4 * (len(target) - 1)), len(target) - 2)
        code = tokenizer.decode(target[:-1]).strip()[:2]
        assert source[0] == tag_id(data.languages, code)
    assert any(source.count(MASK_ID) > 1 for source, _ in repaired)


def test_noise_permutes_whole_sentences_and_draws_poisson_numbers():
    ends = np.zeros(100, dtype=bool)
    ends[9] = True
    text = np.array([11, 12, 9, 21, 9, 31, 32, 33, 9])
    orders = set()
    for number in range(40):
        found = add_noise(text, Draws(0, number), fraction=1e-9, mean_span=3, mask_id=1, sentence_ends=ends)
        orders.add(tuple(found))
        assert sorted(found) == sorted(text)
        assert sorted(map(tuple, np.split(found, np.flatnonzero(found[:-1] == 9) + 1))) == [
            (11, 12, 9), (21, 9), (31, 32, 33, 9),
        ]  # fmt: skip
    assert len(orders) == 6
    draws = [poisson(u, 3.0) for u in Draws(0, "poisson").uniform(4000)]
    # mean and variance are 3; six standard deviations of the mean
    assert abs(np.mean(draws) - 3) < 6 * (3 / 4000) ** 0.5
    assert 2.5 < np.var(draws) < 3.5


def test_the_cache_is_filled_once(corpus):
    path, cache = corpus
    config = ParallelTextConfig(path=(path,), cache_dir=cache)
    first = prepare_parallel(config, vocab_size=330)
    with calls_of(train_tokenizer) as calls:
        assert prepare_parallel(config, vocab_size=330).key == first.key
    assert not calls


def test_a_vocabulary_is_learned_from_every_folder_by_its_share():
    counts = {"large": 600, "small": 60}
    corpora = [{code: [f"{name} {code}"] * n for code in ("de", "en")} for name, n in counts.items()]
    found = list(in_turn(corpora))
    assert len(found) == 2 * 660
    for part in (found[:132], found[-132:]):
        for name, n in counts.items():
            assert all(abs(part.count(f"{name} {code}") - n // 10) <= 1 for code in ("de", "en"))


def test_a_language_is_the_same_in_names_of_files_and_in_options(tmp_path, caplog):
    codes = ("EN", "es_419", "zh_Hans_CN")
    path = write(tmp_path / "corpus", languages=codes, lines=20)
    options = {"path": (path,), "cache_dir": str(tmp_path / "cache")}
    pairs = ("EN-zh_Hans_CN", "es_419-EN")
    given = ParallelTextConfig(languages=codes, pairs=pairs, **options)
    data = TranslationData(given, vocab_size=330, max_source_len=64, max_target_len=64, seed=0)
    assert data.languages == codes and data.tasks == pairs and not caplog.messages
    for name in ("train.pt-br", "train.EN~", "train.txt", "train.bak"):
        (tmp_path / "corpus" / name).write_text("a line\n")
    assert prepare_parallel(ParallelTextConfig(**options), vocab_size=330).languages == codes
    assert "left out: 4 files have endings" in caplog.text and "train.EN~" in caplog.text
    caplog.clear()
    prepare_parallel(given, vocab_size=330)
    assert not caplog.messages, "who names the languages wants no others"


def test_a_damaged_cache_is_made_anew(tmp_path):
    path = write(tmp_path / "corpus", lines=20)
    (tmp_path / "corpus" / "train.en~").write_text("what an editor keeps\n")
    (tmp_path / "corpus" / "train.it").mkdir()
    config = ParallelTextConfig(path=(path,), cache_dir=str(tmp_path / "cache"))
    first = prepare_parallel(config, vocab_size=330)
    assert first.languages == ("de", "en", "fr")
    whole = {code: lines.tokens_N.copy() for code, lines in first.training[0].items()}
    for file in tmp_path.glob("cache/*/training.0.*.tokens.npy"):
        file.write_bytes(file.read_bytes()[:-20])
    again = prepare_parallel(config, vocab_size=330)
    assert all(np.array_equal(again.training[0][code].tokens_N, whole[code]) for code in whole)


def test_a_folder_without_training_text_is_refused(tmp_path):
    first, second = write(tmp_path / "first"), write(tmp_path / "second", splits=("val",))
    config = ParallelTextConfig(path=(first, second), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="second: has no train file of de, en, fr; leave"):
        prepare_parallel(config, vocab_size=330)


def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\xe2\x80\xa8two\x0c\n")
    assert read_lines(tmp_path / "a") == ["one", "\u2028two\x0c"]


def test_a_line_of_blanks_is_not_translated(tmp_path):
    keys = []
    for blank in ("", " \t", "\u3000\u00a0"):
        path = Path(write(tmp_path / "corpus", lines=20))
        lines = (path / "train.de").read_text().splitlines()
        text = "\r\n".join([blank, *lines[1:6], blank, blank, *lines[8:], ""])
        (path / "train.de").write_bytes(text.encode())
        data = data_of((str(path), str(tmp_path / "cache")), pairs=("de-en",))
        assert data.description.startswith(f"{path}: 3 languages, 17 training")
        keys.append(data.key)
    assert len(set(keys)) == 1, "they are the same text"


def test_a_given_tokenizer_is_the_same_wherever_it_lies(corpus, tmp_path):
    known = data_of(corpus)
    (tmp_path / "moved").mkdir()
    keys = set()
    for folder in (tmp_path, tmp_path / "moved"):
        shutil.copy(known.files["tokenizer.json"], folder)
        keys.add(data_of(corpus, encode_with=str(folder / "tokenizer.json")).key)
    assert len(keys) == 1 and keys != {known.key}
    others = write(tmp_path / "others", languages=("it", "pt_BR"), lines=20), corpus[1]
    with pytest.raises(ConfigError, match="data.languages=it pt_BR: none .* which writes de, en, fr"):
        data_of(others, encode_with=str(tmp_path / "tokenizer.json"))


def spoil(folder, name, text):
    (folder / name).write_bytes(text)


@pytest.mark.parametrize(
    "change, options, words",
    [
        (lambda f: spoil(f, "train.de", b"one\n"), {}, r"has 60 lines and train.de has 1; parallel"),
        (lambda f: spoil(f, "train.de", b"\xff\n"), {}, "train.de: is not UTF-8 text"),
        (lambda f: spoil(f, "train.de.gz", gzip.compress(b"one\n")), {}, "train.de.gz: there is train.de beside it, for the same"),  # noqa: E501
        (lambda f: spoil(f, "val.de.gz", gzip.compress(b"one\n")), {"languages": ("de", "en")}, "val.de.gz: there is val.de beside it"),  # noqa: E501
        (lambda f: spoil(f, "train.en.gz", b"text"), {}, "train.en.gz: is damaged, or was not packed"),
        (lambda f: spoil(f, "train.fr.zst", b"text"), {}, "train.fr.zst: is damaged, or was not packed"),
        (lambda f: [p.unlink() or spoil(f, p.name[:8], b"") for p in f.glob("train.*")], {}, "no line has two languages"),  # noqa: E501
        (lambda f: [p.unlink() or spoil(f, p.name[:6], b"very " * 90 + b"long\n") for p in f.glob("val.*")], {}, "val: has no line in two .* within model.max_source_len=64"),  # noqa: E501
        (lambda f: (f / "train.de").unlink(), {"languages": ("de", "en")}, "data.languages=de: no folder"),
        (lambda f: [p.unlink() for p in f.glob("train.*")], {}, "has train files of 0 languages"),
        (None, {"languages": ("de",)}, "data.languages=de: is one language, .*name another"),
        (lambda f: [p.unlink() for p in f.glob("val.*")], {}, "data.validation_split=val: no folder"),
        (None, {"pairs": ("en-xx",)}, "data.pairs=en-xx: the language xx is not there; known here: de, en, fr"),
        (None, {"pairs": ("ende",)}, "pairs=ende: must be two different languages with a dash"),
        (None, {"pairs": ("pt-br-en",)}, "pairs=pt-br-en: must be two different languages with a dash"),
        (None, {"languages": ("german",)}, "languages=german: must be codes"),
        (None, {"path": ()}, "data.path=none: translation needs parallel text"),
        (None, {"path": ("nowhere",)}, "data.path=nowhere: there is no such folder .*train.en and train.de"),
        (None, {"mean_span": 2.0}, "mean_span=2.0: has no effect without denoising"),
        (None, {"mean_span": 900, "denoising": 0.5}, "mean_span=900"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, change, options, words):
    path = write(tmp_path / "corpus")
    if change is not None:
        change(tmp_path / "corpus")
    with pytest.raises(ConfigError, match=words) as error:
        config = ParallelTextConfig(**({"path": (path,), "cache_dir": str(tmp_path / "cache")} | options))
        TranslationData(config, vocab_size=330, max_source_len=64, max_target_len=64, seed=0)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("cache/*partial*"))
