"""Opening of a model for verbs that generate text, in this process or on the ranks that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.terminal_progress import loading, tell
from expertmesh.cli.torchrun import once_per_host
from expertmesh.config.fields import Device, Operation, WeightDtype
from expertmesh.config.launched import launched_rank
from expertmesh.config.output_file import Growing, growing
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import CheckpointError, ConfigError, PeerError, text_of

if TYPE_CHECKING:
    from expertmesh.engine.engine import Engine
    from expertmesh.runs.open import LoadedModel
    from expertmesh.runs.precision import Precision

_PATIENCE_S = 7 * 86_400.0
"""Timeout of collectives while a user may be typing a prompt: one week."""


class OnDevice(Operation):
    """Verb that opens a model on a device."""

    device: Device | None = None
    """device: auto, cpu, cuda or cuda:N (default: as in training)"""
    dtype: WeightDtype | None = None
    """dtype of weights and computation (default: as in training; of Hugging Face models: as in the files)"""


def place_of(options: OnDevice) -> dict[str, Any]:
    """Device and type of a verb, as arguments of `open_model`; imports torch."""
    import torch

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return {"device": options.device, "dtype": dtype}


def say_precision(precision: "Precision", *more: str) -> None:
    """Write to standard error in which type a model computes, and why, and more; once nothing can be refused, before
    its first result."""
    tell("; ".join((f"computing in {precision.description}", *filter(None, more))))


def check_several(given: dict[str, Any]) -> None:
    """Raise ConfigError if an option for several processes is given to a single one."""
    if launched_rank()[1] > 1:
        return
    for name, value in given.items():
        shown = value[0] if isinstance(value, tuple) else value
        raise ConfigError(
            f"parallel.{name}",
            shown,
            "is about several processes, and this is one",
            "leave it out, or start with torchrun --nproc-per-node N -m expertmesh",
        )


def load_adapter(engine: "Engine", name: str, folder: str, *, typed: str | None = None) -> None:
    """Load an adapter of the option --adapter, which errors name. `typed`: value of the option; None: the folder."""
    try:
        engine.load_adapter(name, folder)
    except (ConfigError, CheckpointError) as error:
        text = text_of(error).removeprefix(f"{folder}: ")
        raise type(error)(f"--adapter {folder if typed is None else typed}: {text}") from None


@contextmanager
def kept(path: Path, *, total: int, unit: str) -> Iterator[Growing]:
    """File of answers that is written as they come; on a failure a line says where the finished answers are.

    SIGTERM, with which torchrun, SLURM and Kubernetes end a process, and SIGHUP of a closed terminal are such failures
    in here: SystemExit with 143 or 129.
    """
    file: Growing | None = None
    with ended_by_exit():
        try:
            with growing(path) as file:
                yield file
        except BaseException:
            if file is not None and file.rest is not None:
                tell(f"note: the first {file.count:,} of {total:,} {unit} are in {file.rest}")
            raise


@contextmanager
def open_decoder(options: Any, *, num_rows: int = 1, is_asked: bool = False) -> "Iterator[LoadedModel]":
    """Model that generates text, on the ranks that torchrun started or in this process; only rank 0 prints.

    Args:
        num_rows: number of texts in a batch, for which the number of threads is chosen.
        is_asked: whether a user types prompts, which may take long.
    """
    is_alone = launched_rank()[1] == 1
    given = options.parallel.given()
    check_several(given)
    with ExitStack() as stack:
        with loading():
            from expertmesh.parallel.ranks import Ranks, open_ranks
            from expertmesh.runs.open import Slots, device_of, open_model
            from expertmesh.runs.run_dir import find_model
            from expertmesh.training.threads import threads_of_calls

            with once_per_host():
                found = find_model(options.run)
                device = device_of(found, options.device)
                count = getattr(getattr(options, "engine", None), "expert_slots", None)
                # options that only an engine over ranks supports
                adapter = getattr(options, "adapter", None)
                is_engines = not is_alone and (found.is_quantized or count is not None or adapter is not None)
                is_shared = is_engines or given.keys() - {"es_degree"}
                timeout_s = found.config.parallel.timeout_s
                shares = ParallelConfig(**{"timeout_s": timeout_s, **given}) if is_shared else None
            ranks = Ranks()
            if not is_alone:
                if shares is not None:
                    timeout_s = shares.timeout_s
                elif is_asked:
                    timeout_s = _PATIENCE_S
                ranks = stack.enter_context(
                    open_ranks(device_type=device.type, timeout_s=timeout_s, on_host=shares is not None)
                )
            place: dict[str, Any] = {
                "ranks": ranks,
                "slots": None if count is None else Slots(count),
            }
            place |= {**place_of(options), "for_autocast": True}
            if shares is not None:
                from expertmesh.engine.parallel import open_shared

                opened = open_shared(found, shares, **place)
            else:
                opened = open_model(found, es_degree=options.parallel.es_degree, **place)
            ranks.on_all(lambda: opened.decoder)  # raises for a family that generates no text
            if shares is None:
                threads = threads_of_calls(opened.model, opened.precision, num_rows=num_rows, ranks=ranks)
                stack.enter_context(threads)
        if ranks.is_leader:
            yield opened
            return
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield opened
        except (ConfigError, CheckpointError) as error:
            raise PeerError(text_of(error)) from error
