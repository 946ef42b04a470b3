"""Start of all verbs that train: parse the words, apply `train.init_from`, prepare the process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from expertmesh.cli.flags import ParsedRun, TrainVerb, parse_run_config
from expertmesh.cli.prog_name import Flags
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.cli.torchrun import once_per_host
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, named, spelling
from expertmesh.training.heap import keep_freed_memory


def parse_and_begin(argv: Sequence[str], kind: type[TrainVerb] = TrainVerb) -> ParsedRun:
    """Parse the words of a verb that trains; with `train.init_from` the other run's model options are applied."""
    with once_per_host():
        parsed = parse_run_config(argv, kind=kind)
        if parsed.config.train.init_from is None:
            return parsed
        from expertmesh.training.init_from import with_init_from

        config = with_init_from(_with_length(parsed), parsed.family)
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


_LONGEST = 2048
"""Tokens of a sequence in fine-tuning, where the model takes as many and no other number is given."""


def _with_length(parsed: ParsedRun) -> RunConfig:
    """Configuration of a fine-tune with sequences as long as its model takes, up to a limit, unless a length is
    given."""
    config, name = parsed.config, "data.seq_len"
    begin = config.train.init_from
    if begin is None or parsed.recipe != begin:
        return config
    data: Any = config.data
    if data.path is None and data.dataset is None and not parsed.dry_run:
        raise ConfigError(
            "data.path",
            None,
            f"{begin} has nothing to learn from",
            "name conversations or texts, for example chats.jsonl",
        )
    if name in parsed.from_words | parsed.from_file:
        return config
    from expertmesh.runs.run_dir import find_model

    longest = getattr(find_model(begin).config.model, "max_seq_len", _LONGEST)
    return config.updated({name: min(longest, _LONGEST)})


@contextmanager
def ready_to_train(config: RunConfig, *, verbose: bool = False) -> Iterator[None]:
    """Context of a training: libraries are loaded, data preparation is reported, and on a CPU freed memory is kept."""
    with told_of_data(verbose=verbose), spelling(Flags("train")):
        with loading():
            import expertmesh.training.loop  # noqa: F401
            from expertmesh.runs.precision import resolve_device
        with once_per_host():
            device = resolve_device(config.train.device)
        if device.type == "cpu":
            keep_freed_memory()
        yield
