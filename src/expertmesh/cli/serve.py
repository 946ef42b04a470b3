"""`expertmesh serve DIR`: serve a model with OpenAI's API, and a page that shows its experts."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from expertmesh.cli.decoding import check_several, load_adapter, say_precision
from expertmesh.cli.parse import parsed
from expertmesh.cli.terminal_progress import loading, silence_output, told_of_data
from expertmesh.cli.torchrun import once_by_rank_0, once_per_host
from expertmesh.config.base import KEY_VARIABLE, expanded, key_of_environment
from expertmesh.config.engine import EngineConfig
from expertmesh.config.fields import Flat, ModelFolder, Operation
from expertmesh.config.launched import launched_rank
from expertmesh.config.run import ParallelConfig, ServingDegrees
from expertmesh.config.server import ServerConfig
from expertmesh.data.encoding import NotTextError, decoded
from expertmesh.errors import ConfigError, named

if TYPE_CHECKING:
    from expertmesh.engine.engine import Engine
    from expertmesh.runs.precision import Precision

_log = logging.getLogger("expertmesh.serve")
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_ROWS = 8
"""Sequences at a time for which the number of threads is chosen."""
MOST_KEY_BYTES = 2**20
_SWITCH_S = 0.001
"""Interval after which the engine's thread yields to the event loop (Python's default of 5 ms would delay every
event)."""


class ServeVerb(Operation):
    """Serves a model with an OpenAI-compatible API (/v1/completions, /v1/chat/completions), and a web page at /.

    examples:
      expertmesh serve runs/gpt-moe-demo   # the page: http://127.0.0.1:8000
      expertmesh serve models/Qwen3-30B-A3B --port 8001 --dtype bfloat16 --max-sequences 128
      expertmesh serve runs/chat --host 0.0.0.0 --api-key-file keys.txt
      expertmesh serve models/Qwen3-30B-A3B --adapter poems=adapters/poems   # requests name it: "model": "poems"
      torchrun --nproc-per-node 4 -m expertmesh serve models/Qwen3-30B-A3B --parallel.tp-degree 2   # over 4 GPUs
      curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "import os"}'
    """

    run: ModelFolder
    """run directory, or a Hugging Face model folder"""
    server: Annotated[ServerConfig, Flat] = ServerConfig()
    engine: Annotated[EngineConfig, Flat] = EngineConfig()
    parallel: ServingDegrees = ServingDegrees()


def run(argv: list[str]) -> int:
    """Serve until a signal, and return 0, or 128 plus the second signal."""
    with once_per_host():
        options = parsed(ServeVerb, argv)
        server, engine_config, given = options.server, options.engine, options.parallel.given()
        check_several(given)
        parallel = ParallelConfig(**given) if launched_rank()[1] > 1 else None
        if any(find_spec(name) is None for name in _NEEDED):
            raise ConfigError("serve: needs fastapi and uvicorn; install them with: pip install 'expertmesh[serve]'")
        from expertmesh.text.answer_formats import format_of

        format_of("calls", "", server.tool_call_parser)
        format_of("thoughts", "", server.reasoning_parser)
        keys = keys_of(server.api_key_file)
    if launched_rank()[0] > 0:
        assert parallel is not None
        return _follow(options.run, engine_config, parallel)
    logging.raiseExceptions = False  # a full disk for the log must not end the server
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    name = server.model_name or Path(expanded(options.run)).resolve().name
    if name in server.adapters:
        raise ConfigError(
            "adapter",
            name,
            "is the name of the model itself",
            f"choose another, or set {named('model_name')}",
        )
    with told_of_data(), loading():
        from expertmesh import __version__
        from expertmesh.serve.app import ServerApp
        from expertmesh.serve.server import bind, serve

        place = bind(server)  # before the weights are read, so that a taken port is reported at once
        stack = ExitStack()
        try:
            engine = stack.enter_context(_open_engine(options.run, engine_config, parallel))
            for adapter, folder in server.adapters.items():
                load_adapter(engine, adapter, folder, typed=f"{adapter}={folder}")
            num_threads = None if parallel is not None else num_threads_of(engine)
            say_precision(precision_of(engine, options.run), engine.captured)
        except BaseException:
            stack.close()
            place.close()
            raise
    sys.setswitchinterval(_SWITCH_S)
    app = ServerApp(engine, server, model_name=name, keys=keys, version=__version__, num_threads=num_threads)

    with stack:
        told = partial(say_address, name, can_chat=app.reader.text.can_chat)
        code = serve(app, place, told)
        engine.close()
        engine.check_ranks()
    return code


@contextmanager
def _open_engine(run: str, config: EngineConfig, parallel: ParallelConfig | None) -> "Iterator[Engine]":
    """Engine of this process, or this rank's part of it."""
    from expertmesh.engine.engine import Engine
    from expertmesh.parallel.huge_pages import in_huge_pages

    if parallel is None:
        with in_huge_pages():
            engine = Engine(run, config=config)
        yield engine
        return
    from expertmesh.parallel.ranks import open_ranks
    from expertmesh.runs.open import device_of
    from expertmesh.runs.run_dir import find_model

    with once_per_host():
        device = device_of(find_model(run), config.device)
    ranks = open_ranks(device_type=device.type, timeout_s=parallel.timeout_s, on_host=True)
    with ranks, once_by_rank_0():
        with in_huge_pages():
            engine = Engine(run, config=config, parallel=parallel)
        with closing(engine):
            yield engine


def precision_of(engine: "Engine", run: str) -> "Precision":
    """Type in which an engine computes, and why: its weights' own, also where a run's training computed in another."""
    from expertmesh.runs.precision import plain_precision, trained_precision
    from expertmesh.runs.run_dir import find_model

    weight = engine.model.embedding.weight
    if engine.config.dtype is not None:
        return plain_precision(weight.dtype, weight.device, "as asked for")
    reason = "the type of its files"
    if engine.config.implementation != "transformers" and not (found := find_model(run)).is_hub:
        known = trained_precision(found.arithmetic, found.config.train, weight.device)
        if known is not None and known.compute_dtype != weight.dtype:
            name = known.arithmetic.dtype
            reason += f"; its training computed in {name}, which --dtype {name} would be"
    return plain_precision(weight.dtype, weight.device, reason)


def say_address(name: str, address: str, *, can_chat: bool = True) -> None:
    """Print where a server answers, or log it if standard output cannot be written: the server goes on."""
    text = f"serving {name} at {address} (the page), {address}/v1 (OpenAI's interface)"
    if not can_chat:
        text += "; completions only: no chat template"
    try:
        print(text, flush=True)
    except OSError as error:
        silence_output()
        _log.warning("%s (standard output cannot be written: %s)", text, error.strerror)


def num_threads_of(engine: "Engine") -> int | None:
    """Number of CPU threads for the steps of an engine of this process; None: torch's, on a GPU and without weights of
    ours."""
    import torch

    from expertmesh.runs.precision import plain_precision
    from expertmesh.training.threads import threads_of_calls

    model = engine.model
    if not isinstance(model, torch.nn.Module):
        return None
    weight = model.get_parameter("embedding.weight")
    if weight.device.type != "cpu":
        return None
    precision = plain_precision(weight.dtype, weight.device)
    rows = min(_ROWS, engine.config.max_sequences)
    with threads_of_calls(model, precision, num_rows=rows) as threads:
        return None if threads is None else threads.count


def _follow(run: str, config: EngineConfig, parallel: ParallelConfig) -> int:
    """Run rank 0's engine steps on another rank until rank 0 ends; signals are handled by rank 0 only."""
    with _open_engine(run, config, parallel) as engine:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        engine.follow()
    return 0


def keys_of(path: str | None) -> tuple[str, ...]:
    """API keys of a file, one per line, and of the environment."""
    given = key_of_environment()
    if given == "":
        raise ConfigError(f"{KEY_VARIABLE}: is blank; write a key into it, or unset it")
    own = () if given is None else (given,)
    if path is None:
        return own
    try:
        with expanded(path).open("rb") as file:
            lines = decoded(file.read(MOST_KEY_BYTES)).split("\n")
    except (OSError, NotTextError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ConfigError(
            "api_key_file",
            path,
            f"cannot be read ({reason})",
            "name a file with a key on each line",
        ) from None
    keys = tuple(filter(None, (line.strip() for line in lines)))
    if not keys:
        raise ConfigError("api_key_file", path, "has no key", "write one on each line")
    return (*keys, *own)
