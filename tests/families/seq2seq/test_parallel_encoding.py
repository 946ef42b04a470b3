"""The rule of encoding holds for parallel text."""

import pytest
from tests.data.test_encoding import NAMES, NO_ENCODING

import expertmesh as em
from expertmesh_families.seq2seq.config import ParallelTextConfig
from expertmesh_families.seq2seq.parallel_text import prepare_parallel, read_lines


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-32"])
def test_lines_know_the_mark(tmp_path, codec):
    (tmp_path / "lines").write_bytes("é\r\nà\n".encode(codec))
    assert read_lines(tmp_path / "lines") == ["é", "à"]


@pytest.mark.parametrize(("codec", "encoding"), [("utf-16", None), ("latin-1", "latin-1"), ("utf-16-be", "utf-16-be")])
def test_parallel_text(tmp_path, codec, encoding):
    """Its tokens are those of UTF-8; U+0A20, whose bytes are a line's end and a blank, stays."""
    letter = "\u0a20" if codec.startswith("utf") else "é"
    keys = []
    for folder, used in (("plain", "utf-8"), ("other", codec)):
        (tmp_path / folder).mkdir()
        for split in ("train", "val"):
            for code in ("en", "de"):
                text = "".join(f"{code} {letter}{letter} {i}\n \n" for i in range(30))
                (tmp_path / folder / f"{split}.{code}").write_bytes(text.encode(used))
        config = ParallelTextConfig(
            path=(str(tmp_path / folder),),
            cache_dir=str(tmp_path / "cache"),
            encoding=None if used == "utf-8" else encoding,
        )
        keys.append(prepare_parallel(config, vocab_size=330).key)
    assert keys[0] == keys[1]
    if encoding is not None:
        with pytest.raises(em.ConfigError, match=f"name its encoding, data.encoding={encoding}"):
            prepare_parallel(config.model_copy(update={"encoding": None}), vocab_size=330)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_no_encoding(name):
    with pytest.raises(em.ConfigError, match=NO_ENCODING):
        ParallelTextConfig(path=("a",), encoding=name)
