"""Tuning results on disk: measured links of a topology, and the dispatch plans found on it. Unreadable files are
ignored."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expertmesh.config.base import parse_json, user_cache_dir
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.config.output_file import write_whole
from expertmesh.costs.communication import Link, Network

VERSION = 1
_log = logging.getLogger("expertmesh.parallel.experts.tuner")


@dataclass(frozen=True)
class Topology:
    """Ranks and nodes that a measurement is valid for."""

    device: str  # device type of the tensors, with the device's name
    ranks_per_node: tuple[int, ...]  # number of ranks of each node, in the order of the nodes

    @staticmethod
    def of(device: str, nodes: Sequence[int]) -> "Topology":
        """Topology from the node of each rank."""
        return Topology(device, tuple(nodes.count(node) for node in dict.fromkeys(nodes)))

    @property
    def name(self) -> str:
        """Text that is valid in a file name."""
        nodes = "+".join(map(str, self.ranks_per_node))
        return f"{''.join(c if c.isalnum() else '-' for c in self.device)}-{nodes}"


def network_path(topology: Topology) -> Path:
    """Path of the measured links of a topology."""
    return user_cache_dir() / "comm" / f"{topology.name}.json"


def plans_path(topology: Topology, model: str) -> Path:
    """Path of the plans of a model on a topology; `model` is any text that identifies its layer shapes."""
    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    return user_cache_dir() / "plans" / f"{topology.name}-{digest}.json"


def save_network(path: Path, network: Network, points: Sequence[Mapping[str, Any]]) -> None:
    """Write measured links, with the points that they were fitted to."""
    _write(path, {"network": asdict(network), "points": list(points)})


def load_network(path: Path) -> Network | None:
    """Measured links; None: no usable file. An unusable file is logged in one line."""
    values = _read(path)
    try:
        return None if values is None else network_of(values["network"])
    except (KeyError, TypeError, ValueError) as error:
        _ignored(path, error)
        return None


def network_of(values: Mapping[str, Any]) -> Network:
    """Links from their JSON."""
    links = [Link(**values[name]) for name in ("inside", "across")]
    if not all(v > 0 for link in links for v in asdict(link).values()):
        raise ValueError("a latency or bandwidth is not above 0")
    return Network(*links)


def save_plans(path: Path, plans: Mapping[str, DispatchOptions], model: str) -> None:
    """Write settled plans by bucket."""
    _write(path, {"model": model, "plans": {key: asdict(dispatch) for key, dispatch in plans.items()}})


def plan_keeper(path: Path, model: str) -> Callable[[Mapping[str, DispatchOptions]], None]:
    """Callback that writes plans whenever a new one is settled; a write error is logged once, and later calls do
    nothing."""
    can_write = True

    def keep(plans: Mapping[str, DispatchOptions]) -> None:
        nonlocal can_write
        try:
            if can_write:
                save_plans(path, plans, model)
        except OSError as error:
            can_write = False
            _log.warning("%s: the plans that were found are not kept: %s", path, error.strerror)

    return keep


def load_plans(path: Path, model: str) -> dict[str, DispatchOptions]:
    """Settled plans by bucket; empty if the file is missing or unusable. An unusable file is logged in one line."""
    values = _read(path)
    try:
        if values is None:
            return {}
        if values["model"] != model:
            raise ValueError("it is of another model")
        return {key: _checked(DispatchOptions(**dispatch)) for key, dispatch in values["plans"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _ignored(path, error)
        return {}


def known() -> list[tuple[Path, Network | None, dict[str, DispatchOptions]]]:
    """All files of the cache: measured links, then plans."""
    links: list[tuple[Path, Network | None, dict[str, DispatchOptions]]] = [
        (p, load_network(p), {}) for p in sorted((user_cache_dir() / "comm").glob("*.json"))
    ]
    plans: list[tuple[Path, Network | None, dict[str, DispatchOptions]]] = []
    for path in sorted((user_cache_dir() / "plans").glob("*.json")):
        values = _read(path)
        if values is not None:
            plans.append((path, None, load_plans(path, str(values.get("model")))))
    return [*links, *plans]


def _checked(dispatch: DispatchOptions) -> DispatchOptions:
    least = {"route_degree": 1, "overlap_degree": 1, "replicated_experts": 0}
    if dispatch.all_to_all not in ("flat", "hierarchical") or not all(
        type(n := getattr(dispatch, name)) is int and n >= smallest for name, smallest in least.items()
    ):
        raise ValueError("a plan is not whole")
    return dispatch


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"version": VERSION, **values}, indent=1))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        if not path.exists():
            return None
        values = parse_json(path.read_text())
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']} is not {VERSION}")
        return dict(values)
    except (OSError, KeyError, TypeError, ValueError) as error:
        _ignored(path, error)
        return None


def _ignored(path: Path, error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    _log.warning("%s is ignored: %s; delete it to be rid of this line", path, reason)
