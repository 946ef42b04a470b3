"""Reads `peers.toml`: the peers, their versions, and what their authors published. No torch."""

import importlib.metadata
import importlib.util
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("peers.toml")


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        name: in tables.
        package: at the package index.
        module: that is imported.
        version: that the adapter was written for.
        what: one line.
        wheel: whether a plain wheel can be carried to a machine without a network.
        needs: further requirements to carry with it.
    """

    name: str
    package: str
    module: str
    version: str
    what: str
    wheel: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """TFLOP/s that a peer's authors published for one of our shapes; None: not published."""

    peer: str
    shape: str
    gpu: str
    source: str
    forward: float | None = None
    backward: float | None = None
    both: float | None = None


@cache
def listed() -> tuple[tuple[Peer, ...], tuple[Published, ...]]:
    """All peers, and all published figures."""
    found = tomllib.loads(FILE.read_text())
    peers = tuple(Peer(**row | {"needs": tuple(row.get("needs", ()))}) for row in found["peer"])
    return peers, tuple(Published(**row) for row in found["published"])


def wheels() -> list[str]:
    """Requirements of the peers that can be carried as wheels."""
    return [
        requirement
        for peer in listed()[0]
        if peer.wheel
        for requirement in (f"{peer.package}=={peer.version}", *peer.needs)
    ]


def versions() -> dict[str, str]:
    """The versions of the peers that are installed, and of Triton."""
    found = {}
    packages = {peer.package: peer.module for peer in listed()[0]} | {"triton": "triton"}
    for package, module in packages.items():
        if importlib.util.find_spec(module) is not None:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:  # a folder on the path
                found[package] = "of unknown version"
    return found


if __name__ == "__main__":
    print(" ".join(wheels()))
