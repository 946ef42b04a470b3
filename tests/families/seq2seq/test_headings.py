"""From a text in one language to its heading in another: a model that translates is trained further on a language
without a tag."""

import shutil

import pytest
from tests.support.runs import train_quietly

from expertmesh.cli.main import main
from expertmesh.errors import ConfigError
from expertmesh.runs.run_dir import load_run
from expertmesh.text.tokenizer import load_tokenizer
from expertmesh_families.seq2seq.config import ParallelTextConfig
from expertmesh_families.seq2seq.data import TranslationData
from expertmesh_families.seq2seq.family import SEQ2SEQ
from expertmesh_families.seq2seq.parallel_text import languages_of, tag_id
from expertmesh_families.seq2seq.recipes import translate_test


def write(folder, **texts):
    folder.mkdir()
    for split, count in (("train", 24), ("val", 6)):
        for code, words in texts.items():
            lines = "".join(f"{words} {i % 5}\n" for i in range(count))
            (folder / f"{split}.{code}").write_text(lines)
    return str(folder)


def config_of(place, path, name, **changes):
    values = {
        "model.dim": 16,
        "data.path": (path,),
        "data.cache_dir": str(place / "cache"),
        "train.steps": 3,
        "train.batch_size": 4,
        "train.eval_every": 3,
        "train.checkpoint_every": 3,
        "train.dtype": "float32",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.run_dir": str(place / name),
        "optim.warmup_steps": 1,
    }
    return translate_test().updated(values | changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("headings")
    path = write(place / "lines", de="ein Hund", en="a dog")
    train_quietly(config_of(place, path, "run"))
    write(place / "pages", en_body="many words of a dog", de="Hund")
    return place


def data_of(place, **options):
    config = ParallelTextConfig(
        path=(str(place / "pages"),),
        cache_dir=str(place / "cache"),
        encode_with=str(place / "run" / "tokenizer.json"),
        **options,
    )
    return TranslationData(config, vocab_size=320, max_source_len=64, max_target_len=64, seed=0)


def test_a_language_without_a_tag_is_read_and_never_written(place):
    data = data_of(place)
    assert data.languages == ("de", "en") and data.directions == ("en_body-de",)
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    assert languages_of(tokenizer) == ("de", "en")
    sources, lengths, targets, *_ = data.batch(0, 24)
    for source, length, target in zip(sources.tolist(), lengths.tolist(), targets, strict=True):
        assert source[0] == tag_id(("de", "en"), "de")
        assert tokenizer.decode(source[1 : length - 1]).startswith("many words of a dog")
        assert tokenizer.decode(target.tolist()).startswith("Hund")
    with pytest.raises(ConfigError, match="the language en_body is not there; known here: de, en"):
        data_of(place, pairs=("de-en_body",))
    with pytest.raises(ConfigError, match="the language en is not there; known here: de, en_body"):
        data_of(place, pairs=("en-de",))
    assert data_of(place, denoising=0.5).batch(0, 8), "what is repaired has a tag"


def test_from_a_body_to_a_heading(place, capsys):
    changes = {"train.init_from": str(place / "run"), "model.max_source_len": 48}
    path = str(place / "pages")
    result = train_quietly(config_of(place, path, "tuned", **changes))
    assert result.step == 3
    begin, tuned = load_run(place / "run"), load_run(place / "tuned")
    assert tuned.config.model == begin.config.model.updated({"max_source_len": 48})
    for name in SEQ2SEQ.files:
        assert (tuned.path / name).read_bytes() == (begin.path / name).read_bytes()
    shutil.copytree(place / "tuned", place / "further")
    (place / "run").rename(place / "away")
    config = tuned.config.updated({"train.run_dir": str(place / "further"), "train.resume": "auto", "train.steps": 4})
    assert train_quietly(config).resumed_from == 3
    config = load_run(place / "further").config
    assert train_quietly(config.updated({"train.steps": 5})).resumed_from == 4
    assert config.model == tuned.config.model
    (place / "away").rename(place / "run")
    other = {"data.encode_with": str(place / "nowhere.json")}
    with pytest.raises(ConfigError, match=r"encode_with=.*nowhere.*: train.init_from=.* leave it out"):
        train_quietly(config_of(place, path, "other", **changes, **other))
    words = ["--input", f"{path}/val.en_body", "--reference", f"{path}/val.de"]
    assert main(["translate", "--run", str(place / "tuned"), "--to", "de", *words]) == 0
    assert "chrF2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, words",
    [
        ("nowhere.json", "data.encode_with=.*nowhere.json: is no file"),
        ("lines/train.en", "data.encode_with=.*is not a readable tokenizer"),
    ],
)
def test_another_tokenizer_is_one_line(place, name, words):
    config = ParallelTextConfig(
        path=(str(place / "pages"),),
        cache_dir=str(place / "cache"),
        encode_with=str(place / name),
    )
    with pytest.raises(ConfigError, match=words) as error:
        TranslationData(config, vocab_size=320, max_source_len=64, max_target_len=64, seed=0)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="tokens and the model 260"):
        TranslationData(
            config.model_copy(update={"encode_with": str(place / "run" / "tokenizer.json")}),
            vocab_size=260, max_source_len=64, max_target_len=64, seed=0,
        )  # fmt: skip
