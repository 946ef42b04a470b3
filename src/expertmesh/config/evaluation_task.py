"""Checks of a task file for lm-evaluation-harness: one YAML mapping, whose data are local files."""

from pathlib import Path

import yaml

from expertmesh.errors import ConfigError

_LOCAL = ("json", "csv", "text", "parquet", "arrow")
"""Builders of `datasets` that read files."""


def check_task(path: Path) -> None:
    """Refuses a file that defines no task with local data; does not need lm-evaluation-harness."""
    if not path.is_file():
        raise ConfigError("tasks", path, "is no file", "give a YAML file of a task")
    try:
        # a task may name functions and other files, which lm-evaluation-harness reads itself
        events = yaml.compose(path.read_text(encoding="utf-8"))
        node = {} if events is None else {key.value: value for key, value in events.value}
        names = {key: getattr(value, "value", None) for key, value in node.items()}
        files = yaml.serialize(node["dataset_kwargs"]) if "dataset_kwargs" in node else ""
    except (yaml.YAMLError, UnicodeError, AttributeError, TypeError, ValueError):
        raise ConfigError("tasks", path, "is no YAML mapping", "give a task of lm-evaluation-harness") from None
    source = names.get("dataset_path")
    if "task" not in names or (source is None and "custom_dataset" not in names):
        raise ConfigError(
            "tasks",
            path,
            "has no task or no dataset_path",
            "give a task of lm-evaluation-harness, its name and data in this file",
        )
    is_local = source is None or source in _LOCAL or Path(str(source)).is_dir()
    if not is_local or "://" in files:
        what = "dataset_kwargs" if is_local else f"dataset_path={source}"
        raise ConfigError(
            "tasks",
            path,
            f"{what} would be downloaded",
            f"save the data as files, and use {', '.join(_LOCAL)} with dataset_kwargs.data_files",
        )
