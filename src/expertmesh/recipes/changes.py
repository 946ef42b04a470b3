"""A configuration with some values changed, as Python's users write them."""

from collections.abc import Mapping
from typing import Any

from expertmesh.config.base import flat_changes, shown
from expertmesh.config.run import RunConfig, with_fitting_warmup
from expertmesh.errors import ConfigError


def changed(default: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A validated copy of a configuration.

    Args:
        default: what is not changed.
        changes: new values by dotted name, or in sections; of a section that is named, all other values stay.

    Raises:
        ConfigError: the changes are no mapping, a name is unknown, or a value breaks a rule.
    """
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes={shown(changes)}: must be options and their values; for example {{'train.steps': 20}}"
        )
    flat = flat_changes(default, changes)
    return default.updated(with_fitting_warmup(default, flat))
