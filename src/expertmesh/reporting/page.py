"""Self-contained HTML page about runs, which works from disk without a network."""

import html
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from expertmesh.config.base import expanded
from expertmesh.config.output_file import output_file, write_whole
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.reporting.read import read_run
from expertmesh.reporting.sample import sample_of_run
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import load_run

PAGE_NAME = "report.html"


Tokens = list[dict[str, Any]]
"""Sample text: text and experts of each token."""


def report(*runs: str | Path, page: str | Path | None = None) -> Path:
    """Write a page about one run, or several side by side: curves, use of experts, a sample, the configuration.

    It needs neither a checkpoint (without one there is no sample) nor the run's data, so it works for interrupted and
    diverged runs too.

    Args:
        runs: run directories.
        page: the file; None: report.html in the first run's directory.

    Returns:
        Path of the written file, self-contained, a few MB.

    Raises:
        ConfigError: a run does not exist, or the package plotly is missing.
        OSError: the file cannot be written.

    Example:
        >>> page = em.report("runs/text")
        >>> page.name
        'report.html'
    """
    return write_page(runs, page, sample=_sample_of)


def write_page(
    runs: Sequence[str | Path],  # see `report`
    page: str | Path | None,  # see `report`
    *,
    sample: Callable[[str | Path], Tokens],
) -> Path:
    """Write the page of `report`, with samples from a given function.

    Args:
        sample: returns the sample of a run; ConfigError and CheckpointError say why there is none.
    """
    if not runs:
        raise ConfigError("report(): needs a run directory; name at least one")
    find_plotly()
    from plotly.offline import get_plotlyjs

    target = expanded(runs[0]) / PAGE_NAME if page is None else expanded(page)
    if page is not None or target.parent.is_dir():
        output_file("page", target)
    found = [{**read_run(run), **_sampled(run, sample)} for run in runs]
    names = [run["name"] for run in found]
    for run, path in zip(found, runs, strict=True):
        if names.count(run["name"]) > 1:  # the path tells equal names apart
            run["name"] = os.fsencode(path).decode(errors="replace")
    write_whole(target, _filled(found, get_plotlyjs()))
    return target


def find_plotly() -> None:
    """Check that plotly is installed."""
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("the page needs the package plotly; install it with: pip install plotly")


def _sample_of(run: str | Path) -> Tokens:
    found = load_run(run)
    return sample_of_run(open_model(found)) if found.family.generates_text else []


def _sampled(run: str | Path, sample: Callable[[str | Path], Tokens]) -> dict[str, Any]:
    """Sample of a run, or the reason why there is none."""
    try:
        return {"sample": sample(run), "no_sample": ""}
    except (ConfigError, CheckpointError) as error:
        return {"sample": [], "no_sample": str(error)}


def _filled(runs: Sequence[dict[str, Any]], plotly: str) -> str:
    title = ", ".join(run["name"] for run in runs)
    # "<" is escaped, because it could end a script element or begin a comment in one.
    data = json.dumps(list(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _part("page.css"),
        "PLOTLY": plotly,
        "DATA": data,
        "CODE": _part("page.js"),
    }
    text = _part("page.html")
    for name, value in parts.items():
        text = text.replace(f"<!--{name}-->", value, 1)
    return text


def _part(name: str) -> str:
    return files("expertmesh.reporting").joinpath(name).read_text(encoding="utf-8")
