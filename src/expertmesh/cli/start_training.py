"""How every verb that trains begins: the words parsed, what another run fixes taken over, the process made ready."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from expertmesh.cli.flags import ParsedRun, parse_run_config
from expertmesh.cli.heap import keep_freed_memory
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.cli.torchrun import once_per_host
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, named


def parse_and_begin(argv: Sequence[str]) -> ParsedRun:
    """Read the words of a verb that trains; a run that begins with another's weights has what these fix.

    Args:
        argv: those of `parse_run_config`.

    Raises:
        ConfigError: the words, or what they ask for, break a rule.
        CheckpointError: the run to begin with has no usable checkpoint, or a file is missing.
        PeerError: on the other processes of a host, in its place.
        SystemExit: with code 0 after `--help`.
    """
    with once_per_host():
        parsed = parse_run_config(argv)
        if parsed.config.train.init_from is None:
            return parsed
        from expertmesh.training.init_from import with_init_from

        config = with_init_from(parsed.config, parsed.family)
        for name in sorted(parsed.from_words):
            ours, theirs = attrgetter(name)(parsed.config), attrgetter(name)(config)
            if name.startswith("model.") and ours != theirs:
                raise ConfigError(
                    name,
                    ours,
                    f"{named('train.init_from', config.train.init_from)} brings its model, which has {theirs}",
                    "leave it out",
                )
        return parsed._replace(config=config)


@contextmanager
def ready_to_train(config: RunConfig, *, verbose: bool = False) -> Iterator[None]:
    """Load what training needs and tell of the data; on a CPU freed memory stays with the process.

    Args:
        config: of the run.
        verbose: name every text that is left out.

    Raises:
        ConfigError: there is no such device.
        PeerError: on the other processes of a host, in its place.
    """
    with told_of_data(verbose=verbose):
        with loading():
            import expertmesh.training.loop  # noqa: F401
            from expertmesh.runs.precision import resolve_device
        with once_per_host():
            device = resolve_device(config.train.device)
        if device.type == "cpu":
            keep_freed_memory()
        yield
