"""Stands for `tutel.launcher.run`, which started ranks under mpiexec: it says what to call instead."""

from expertmesh.config.no_counterpart import line
from expertmesh.errors import ConfigError

WAY_OUT = line(
    "tutel.launcher.run",
    "start the script with torchrun --nproc-per-node N [--nnodes M --node-rank R --master-addr HOST]",
)


def main() -> None:
    """Raise ConfigError, which names torchrun."""
    raise ConfigError(WAY_OUT)


if __name__ == "__main__":
    raise SystemExit(f"error: {WAY_OUT}")
