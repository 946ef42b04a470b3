"""Known devices, and clusters by a short name (`h100x64`) or from a user's TOML file."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from expertmesh.config.base import FieldError, expanded, is_there
from expertmesh.config.cluster import Cluster, Device, HostLink, LinkSpeed
from expertmesh.config.values import shown
from expertmesh.costs.communication import Link, Network
from expertmesh.errors import ConfigError, named

_OF_CLUSTER = ("ranks_per_node", "inside", "across", "host")
_RAIL = 64
"""Devices used of the 72 of an NVL72 rack where the cluster's number is no multiple of 72, as in all published runs."""


@cache
def known_devices() -> Mapping[str, Mapping[str, Any]]:
    """The table of hardware.toml: options of each device and of a cluster with it."""
    return tomllib.loads(files("expertmesh.costs").joinpath("hardware.toml").read_text("utf-8"))


def find_cluster(name: str, *, num_gpus: int | None = None) -> Cluster:
    """A cluster by its short name, or from a TOML file.

    Args:
        name: DEVICExNUMBER, for example "h100x64", or a file's path. A file has the fields of `Cluster`; its `device`
            is a name or a table, and what it leaves out is taken from the known device.
        num_gpus: number of devices; None: as the name or file says.

    Example:
        >>> from expertmesh.costs.hardware import find_cluster
        >>> find_cluster("gb200x256").ranks_per_node
        64
    """
    where = named("cluster", shown(name))
    short = re.fullmatch(r"([a-z0-9-]+?)x([0-9]{1,18})", name.lower())
    if short and not is_there(name):
        # mi300x64 are 64 of mi300x, whose own x is easily left out
        is_short = short[1] not in known_devices() and f"{short[1]}x" in known_devices()
        device = f"{short[1]}x" if is_short else short[1]
        values: dict[str, Any] = {"device": device, "num_gpus": int(short[2]), "name": name}
    elif name.lower() in known_devices() and not is_there(name):
        values = {"device": name.lower(), "num_gpus": num_gpus or 1, "name": name}
    else:
        values = _read(name, where)
    if num_gpus is not None:
        values["num_gpus"] = num_gpus
    try:
        return Cluster(**_whole(values, where))
    except FieldError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read(name: str, where: str) -> dict[str, Any]:
    path = expanded(name)
    if not name.strip():
        raise ConfigError("cluster", "''", "must not be empty", "give DEVICExNUMBER, for example h100x64")
    try:
        found = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        hint = f"give DEVICExNUMBER of {', '.join(known_devices())}, or a file"
        near = _near(name.lower().rpartition("x")[0])
        hint = f"did you mean {'x... or '.join(near)}x...?" if near else hint
        raise ConfigError(f"{where}: unknown device, and no such file; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(f"{where}: cannot be read ({reason}); give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: is no TOML ({error}); correct it") from None
    return {"name": path.stem, **found}


def _near(name: str) -> list[str]:
    """Known devices that a name may mean: those that it begins, in their memory or their family, else the most
    alike."""
    plain = name.replace("_", "-").replace(" ", "-")
    begun = [known for known in known_devices() if plain and known.startswith(f"{plain}-")]
    squeezed = [known for known in known_devices() if known.replace("-", "") == plain.replace("-", "")]
    return begun or squeezed or difflib.get_close_matches(plain, known_devices(), n=1)


def _whole(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values of a cluster, its device's name replaced by the known device's values."""
    device = values.get("device")
    if isinstance(device, str):
        known = known_devices().get(device.lower())
        if known is None:
            near = _near(device.lower())
            known_ones = f"use one of {', '.join(known_devices())}"
            hint = f"did you mean {' or '.join(near)}?" if near else known_ones
            raise ConfigError(f"{where}: unknown device {shown(device)}; {hint}")
        of_cluster = {key: known[key] for key in _OF_CLUSTER}
        own = {key: value for key, value in known.items() if key not in _OF_CLUSTER}
        number, per_node = values.get("num_gpus"), of_cluster["ranks_per_node"]
        if per_node > _RAIL and isinstance(number, int) and number > per_node and number % per_node:
            of_cluster["ranks_per_node"] = _RAIL
        values = {**of_cluster, **values, "device": own}
    return values


def network_of(cluster: Cluster) -> Network:
    """A cluster's links for `costs.communication`, where a node's devices share its link to the others."""
    inside, across = cluster.inside, cluster.across
    return Network(
        Link(inside.latency_s, inside.bytes_per_s),
        Link(across.latency_s, across.bytes_per_s * cluster.node_size),
    )


__all__ = [
    "Cluster",
    "Device",
    "HostLink",
    "LinkSpeed",
    "find_cluster",
    "known_devices",
    "network_of",
]
