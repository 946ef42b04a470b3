"""One HTML page that holds all it needs, and works from disk without a network."""

import html
import importlib.util
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from expertmesh.config.base import expanded
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.reporting.read import read_run
from expertmesh.reporting.sample import sample_of_run

PAGE_NAME = "report.html"


def report(*runs: str | Path, page: str | Path | None = None) -> Path:
    """Write a page about one run, or several side by side: curves, the use of experts, a sample, the configuration.

    It needs neither a checkpoint (there is no sample then) nor the run's data, so interrupted and diverged runs have one, too.

    Args:
        runs: run directories.
        page: the file; None: report.html in the first run's directory.

    Returns:
        The file that was written: a few MB, with all that it needs inside.

    Raises:
        ConfigError: a run does not exist, or the package plotly is missing.
        OSError: the file cannot be written.

    Example:
        >>> page = em.report("runs/text")
        >>> page.name
        'report.html'
    """
    if not runs:
        raise ConfigError("report(): needs a run directory; name at least one")
    find_plotly()
    from plotly.offline import get_plotlyjs

    given = None if page is None else _target(expanded(page))
    found = [{**read_run(run), **_sample(run)} for run in runs]
    target = _target(expanded(runs[0]) / PAGE_NAME) if given is None else given
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(_filled(found, get_plotlyjs()), encoding="utf-8")
    partial.rename(target)
    return target


def _target(page: Path) -> Path:
    """A place where a page can be written.

    Raises:
        ConfigError: it is something else than a file, or in no folder.
    """
    if page.is_dir() or (page.exists() and not page.is_file()):
        raise ConfigError(f"page={page}: is no regular file; name a file that may be replaced")
    if not page.parent.is_dir():
        raise ConfigError(f"page={page}: there is no folder {page.parent}; make it first")
    return page


def find_plotly() -> None:
    """Whether a page can be written.

    Raises:
        ConfigError: the package that draws is missing.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("the page needs the package plotly; install it with: pip install plotly")


def _sample(run: str | Path) -> dict[str, Any]:
    """A sample, or why there is none."""
    try:
        return {"sample": sample_of_run(str(run)), "no_sample": ""}
    except (ConfigError, CheckpointError) as error:
        return {"sample": [], "no_sample": str(error)}


def _filled(runs: Sequence[dict[str, Any]], plotly: str) -> str:
    title = ", ".join(run["name"] for run in runs)
    # What could end a script element, or begin a comment in one, is escaped.
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
