"""How every verb that trains begins: the words parsed, what another run fixes taken over, the process made ready."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from expertmesh.cli.flags import ParsedRun, parse_run_config
from expertmesh.cli.heap import keep_freed_memory
from expertmesh.cli.launched import said_once
from expertmesh.cli.news import loading, told_of_data
from expertmesh.config.family import FAMILIES, Family
from expertmesh.config.run import RunConfig


def parse_and_begin(argv: Sequence[str]) -> ParsedRun:
    """Read the words of a verb that trains; a run that begins with another's weights has what these fix.

    Args:
        argv: those of `parse_run_config`.

    Raises:
        ConfigError: the words, or what they ask for, break a rule.
        PeerError: on the other processes of a host, in its place.
        SystemExit: with code 0 after `--help`.
    """
    with said_once():
        parsed = parse_run_config(argv)
        return parsed._replace(config=begun_from_another(parsed.config, parsed.family))


def begun_from_another(config: RunConfig, family: Family) -> RunConfig:
    """The configuration with what the weights of the run that it begins with fix, if there is one.

    Raises:
        ConfigError: that is no run, or of a family that is not this one's.
    """
    if config.train.init_from is None:
        return config
    from expertmesh.training.run_dir import load_run

    known = family.name in FAMILIES
    begin = load_run(config.train.init_from, None if known else family)
    return family.begun_with(config, begin.config, where=config.train.init_from)


@contextmanager
def ready_to_train(config: RunConfig) -> Iterator[None]:
    """Load what training needs and tell of the data; on a CPU freed memory stays with the process.

    Raises:
        ConfigError: there is no such device.
        PeerError: on the other processes of a host, in its place.
    """
    with told_of_data():
        with loading():
            import expertmesh.training.loop  # noqa: F401
            from expertmesh.training.precision import resolve_device
        with said_once():
            device = resolve_device(config.train.device)
        if device.type == "cpu":
            keep_freed_memory()
        yield
