"""What generates the text of a run, for the verbs that write text: in this process, or on the ranks that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expertmesh.cli.flags import OptionParser
from expertmesh.cli.launched import said_once
from expertmesh.cli.news import loading
from expertmesh.config.base import launched_rank
from expertmesh.errors import CheckpointError, ConfigError, PeerError, text_of

if TYPE_CHECKING:
    from expertmesh.parallel.ranks import Ranks

_PATIENCE_S = 7 * 86_400.0
"""That of ranks which wait for what somebody types."""


def add_place(parser: OptionParser) -> None:
    """The options of where a model decodes."""
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (that of the training)")
    parser.add_argument(
        "--es-degree",
        type=int,
        metavar="N",
        help="under torchrun: slices of each expert over the processes (as many as these, where they fit)",
    )


class Decoder(NamedTuple):
    """What generates the text of a run.

    Attributes:
        task: of the run.
        model: as `Task.decoder` gives it.
        tokenizer: of the run.
        precision: what it computes in.
        ranks: that have parts of its experts, and all decode the same; only the first one speaks.
    """

    task: Any
    model: Any
    tokenizer: Any
    precision: Any
    ranks: "Ranks"


@contextmanager
def open_decoder(options: Any, *, num_rows: int = 1, is_asked: bool = False) -> Iterator[Decoder]:
    """The decoder of a run, on the ranks that torchrun started, or in this process alone.

    Args:
        options: of the verb: run, device and es_degree.
        num_rows: texts that are continued at a time, for which the number of threads is measured.
        is_asked: whether somebody types what to do, and may think for long.

    Raises:
        ConfigError: there is no such run or device, models of its family generate no text, or an option needs several ranks.
        CheckpointError: the run has no usable checkpoint or tokenizer.
        PeerError: another rank failed, or failed alike and says so.
    """
    is_alone = launched_rank()[1] == 1
    if is_alone and options.es_degree is not None:
        raise ConfigError(
            f"--es-degree {options.es_degree}: cuts experts over several processes, and this is one; leave it out, or start"
            " with torchrun --nproc-per-node N -m expertmesh"
        )
    with ExitStack() as stack:
        with loading():
            from expertmesh.parallel.ranks import Ranks, open_ranks
            from expertmesh.runs.run_dir import load_run
            from expertmesh.training.threads import threads_of_calls

            with said_once():
                found = load_run(options.run)
                precision = precision_of(found, options.device)
            ranks = Ranks()
            if not is_alone:
                timeout_s = _PATIENCE_S if is_asked else found.config.parallel.timeout_s
                ranks = stack.enter_context(
                    open_ranks(device_type=precision.device.type, timeout_s=timeout_s)
                )
            place = {"ranks": ranks, "es_degree": options.es_degree}
            opened = ranks.each(lambda: _opened(found, precision, **place))
            _, model, _, precision = opened
            stack.enter_context(threads_of_calls(model, precision, num_rows=num_rows, ranks=ranks))
        if ranks.is_leader:
            yield Decoder(*opened, ranks)
            return
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield Decoder(*opened, ranks)
        except (ConfigError, CheckpointError) as error:
            raise PeerError(text_of(error)) from error


def load_decoder(run_dir: str, device: str | None) -> tuple[Any, Any, Any, Any]:
    """The first four of a `Decoder`, in this process alone.

    Args:
        run_dir: of the run, with a checkpoint.
        device: that of the command line; None: that of the training.

    Raises:
        ConfigError: there is no such run or device, or models of its family generate no text.
        CheckpointError: the run has no usable checkpoint or tokenizer.
    """
    from expertmesh.runs.run_dir import load_run

    found = load_run(run_dir)
    return _opened(found, precision_of(found, device))


def _opened(found: Any, precision: Any, **spread: Any) -> tuple[Any, Any, Any, Any]:
    """A run's task, decoder, tokenizer and precision; spread as `open_trained` has it."""
    from expertmesh.runs.open import open_trained
    from expertmesh.runs.run_dir import TOKENIZER

    tokenizer = found.load_tokenizer() if TOKENIZER in found.family.files else None
    task, model, precision = open_trained(found, precision=precision, for_autocast=True, **spread)
    decoder = task.decoder(model)  # a family that writes no text says so here
    return task, decoder, tokenizer or found.load_tokenizer(), precision


def precision_of(found: Any, device: str | None) -> Any:
    """The precision of a run, on the device that was asked for."""
    from expertmesh.runs.precision import resolve_precision

    config = found.config if device is None else found.config.updated({"train.device": device})
    return resolve_precision(config.train, record=found.arithmetic)
