"""Every cell of the notebooks in docs/ runs, one after the other in one namespace, and what was saved with it is what
it shows."""

import ast
import contextlib
import io
import json

import pytest
from tests.support.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells_of(path):
    return [
        ("".join(cell["source"]), cell["outputs"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def run(source, names):
    """What a cell prints, and the value of its last line if that is an expression, as Jupyter shows it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = last and eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return said.getvalue(), value


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_and_show_what_was_saved(path, tmp_path, monkeypatch):
    """Numbers, and so what is drawn, differ between processors: compared is which cells print, and which show a
    picture."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for source, outputs in cells_of(path):
        said, value = run(source, names)
        assert bool(said) == any(one["output_type"] == "stream" for one in outputs), source
        saved = [one for one in outputs if one["output_type"] == "execute_result"]
        assert len(saved) == (value is not None), source
        assert all("image/png" in one["data"] for one in saved), source


def test_there_are_two_and_each_has_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["engine_and_routed_experts", "layer_and_report"]
    for path in NOTEBOOKS:
        assert sum(bool(outputs) for _, outputs in cells_of(path)) >= 5
