"""`expertmesh serve DIR`: a model behind OpenAI's interface, and a page that shows its experts."""

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from expertmesh.cli.flags import OptionParser, listed
from expertmesh.cli.news import loading, told_of_data
from expertmesh.config.base import expanded
from expertmesh.config.engine import EngineConfig
from expertmesh.config.server import ServerConfig
from expertmesh.errors import ConfigError

_EXAMPLES = """\
examples:
  expertmesh serve runs/gpt-moe-demo                  # then open http://127.0.0.1:8000
  expertmesh serve models/Qwen3-30B-A3B --port 8001 --dtype bfloat16 --max-sequences 128
  expertmesh serve runs/chat --host 0.0.0.0 --api-key-file keys.txt
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "import os", "max_tokens": 20}'
"""
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
MOST_KEY_BYTES = 2**20
_SWITCH_S = 0.001
"""The engine's thread gives way to the event loop after so long (Python's default is 5 ms, which every event waits for)."""


def run(argv: list[str]) -> int:
    """Serves until a signal ends it, and returns 0, or 128 and the second signal.

    Args:
        argv: words after `serve`.

    Raises:
        ConfigError: a value breaks a rule, the model is no decoder, or the extra is not installed.
        CheckpointError: the folder has no usable weights or tokenizer.
    """
    options = _parser().parse_args(argv)
    server = ServerConfig(**options_of(ServerConfig, options))
    engine_config = EngineConfig(**options_of(EngineConfig, options))
    if any(find_spec(name) is None for name in _NEEDED):
        raise ConfigError(
            "serve: needs fastapi and uvicorn; install them with: pip install 'expertmesh[serve]'"
        )
    keys = keys_of(server.api_key_file)
    logging.raiseExceptions = False  # a disk that is full for the log is no reason to fail
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    with told_of_data(), loading():
        from expertmesh import __version__
        from expertmesh.engine.engine import Engine
        from expertmesh.serve.app import ServerApp
        from expertmesh.serve.server import bind, serve

        place = bind(server)  # before the weights are read: a port that is taken is said at once
        try:
            engine = Engine(options.run, config=engine_config)
        except BaseException:
            place.close()
            raise
    sys.setswitchinterval(_SWITCH_S)
    name = server.model_name or Path(expanded(options.run)).resolve().name
    app = ServerApp(engine, server, model_name=name, keys=keys, version=__version__)

    def told(address: str) -> None:
        print(
            f"serving {name} at {address} (the page), {address}/v1 (OpenAI's interface)", flush=True
        )

    return serve(app, place, told)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh serve",
        description="Serves a model by OpenAI's interface: /v1/completions, /v1/chat/completions; a page at /.",
        epilog=_EXAMPLES,
    )
    parser.add_run(what="run directory, or a folder of the hub")
    for config in (ServerConfig, EngineConfig):
        add_options(parser, config)
    return parser


def add_options(parser: OptionParser, config: type[BaseModel]) -> None:
    """An option for each field, with its help."""
    for name, field in config.model_fields.items():
        kind, default = field.annotation, field.default
        text = (field.description or "").rstrip(".")
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            spelled = f"--no-{flag[2:]}" if default else flag
            action = "store_false" if default else "store_true"
            shown = f"not: {text}" if default else text
            parser.add_argument(spelled, dest=name, default=None, help=shown, action=action)
        elif get_origin(kind) is tuple:
            parser.add_argument(
                flag, dest=name, nargs="+", action="extend", metavar="TEXT", help=text
            )
        else:
            types = [one for one in (get_args(kind) or (kind,)) if one is not NoneType]
            metavar = {int: "N", float: "X"}.get(types[0], "TEXT")
            shown = "" if default is None else f" ({default})"
            parser.add_argument(
                flag, dest=name, metavar=metavar, help=text.replace("%", "%%") + shown
            )


def options_of(kind: type[BaseModel], options: Any) -> dict[str, Any]:
    """The fields of a group that were given."""
    given = {name: getattr(options, name) for name in kind.model_fields}
    values = {name: value for name, value in given.items() if value is not None}
    return {n: tuple(listed(v)) if isinstance(v, list) else v for n, v in values.items()}


def keys_of(path: str | None) -> tuple[str, ...]:
    """The keys of a file, one on each line.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    if path is None:
        return ()
    try:
        with expanded(path).open("rb") as file:
            lines = file.read(MOST_KEY_BYTES).decode().split("\n")
    except (OSError, UnicodeError) as error:
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
    return keys
