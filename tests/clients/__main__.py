"""`make test-clients`: libraries that people use with OpenAI's interface, against the server: text, streams, JSON,
rounds of a tool.

It trains a tiny model that calls a tool (`tool_model.py`), installs the libraries into environments of their own,
starts the server on a free port, and prints a line for each client and case. All of it is kept in runs/clients, so that
a second run begins at once.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clients.tool_model import GREETING, SOURCES, train
from tests.support.serving import served

PLACE = Path(__file__).parents[2] / "runs" / "clients"
PYTHON, JS = (Path(__file__).parent / name for name in ("python", "js"))
LIMIT_S = 300


class MissingError(Exception):
    """What a gate needs and is not there, in one line."""


@dataclass(frozen=True)
class Gate:
    """The cases of a client.

    Attributes:
        client: name in the table.
        script: that asks, in `PYTHON` or `JS`.
    """

    client: str
    script: Path

    def command(self) -> list[str]:
        """Command before the script's arguments, when its environment has been made."""
        if self.script.suffix == ".py":
            return [str(python_environment() / "bin" / "python"), "-E", str(self.script)]
        return ["node", str(js_environment() / self.script.name)]


GATES = (
    Gate("openai (Python)", PYTHON / "openai_sdk.py"),
    Gate("openai (npm)", JS / "openai_sdk.mjs"),
    Gate("LangGraph", PYTHON / "langgraph_agents.py"),
    Gate("LiteLLM", PYTHON / "litellm_library.py"),
    Gate("pydantic-ai", PYTHON / "pydantic_ai_agents.py"),
    Gate("AI SDK (npm)", JS / "ai_sdk.mjs"),
)


def kept(kind: str, sources: tuple[Path, ...], make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills from the contents of files; made once for the same contents."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    folder = PLACE / f"{kind}-{digest}"
    if not (folder / ".made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{kind}: made in {os.path.relpath(folder)}", flush=True)
        make(folder)
        (folder / ".made").touch()
    return folder


def install(command: list[str], **options) -> None:
    """Runs an installer; its last line is the reason where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except FileNotFoundError:
        raise MissingError(f"{command[0]} is not installed") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        told = next((line for line in lines if "ERR" in line.upper()), lines[-1])
        raise MissingError(f"{' '.join(command[-3:])} failed, without a network perhaps: {told[:200]}")


def python_environment() -> Path:
    """The environment of the Python clients."""
    wanted = PYTHON / "requirements.txt"

    def make(folder: Path) -> None:
        install([sys.executable, "-m", "venv", str(folder)])
        install([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-r", str(wanted)])

    return kept("python", (wanted,), make)


def js_environment() -> Path:
    """A folder with the packages of npm and the scripts beside them."""
    wanted = tuple(JS / name for name in ("package.json", "package-lock.json"))

    def make(folder: Path) -> None:
        for path in wanted:
            shutil.copy(path, folder)
        install(["npm", "ci", "--silent", "--no-fund", "--no-audit"], cwd=folder)

    folder = kept("js", wanted, make)
    for path in JS.glob("*.mjs"):
        shutil.copy(path, folder)
    return folder


def results(gate: Gate, address: str, log: Path) -> Iterator[tuple[str, str | None]]:
    """Names of a gate's cases with None, or with what went wrong."""
    try:
        command = gate.command()
    except MissingError as missing:
        yield "not run", str(missing)
        return
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI_")}
    try:
        with log.open("w") as errors:
            done = subprocess.run(
                [*command, address, "tool-model", GREETING],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                timeout=LIMIT_S,
                check=False,
            )
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        said, code = (late.stdout or b"").decode(), f"no end after {LIMIT_S} s"
    except FileNotFoundError:
        yield "not run", f"{command[0]} is not installed"
        return
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"case"')]
    yield from ((one["case"], one["error"]) for one in found)
    if code or not found:
        yield "whole script", f"ended with {code}; see {os.path.relpath(log)}"


def main() -> int:
    """Exit code: 0 where every case has passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a client's name")
    options = parser.parse_args()
    gates = [gate for gate in GATES if options.only.lower() in gate.client.lower()]
    if not gates:
        parser.error(f"--only {options.only}: is in no name of {', '.join(g.client for g in GATES)}")
    model = kept("model", SOURCES, train) / "run"
    logs = PLACE / "logs"
    logs.mkdir(exist_ok=True)
    num_cases, failed = 0, 0
    with served(model, "--model-name", "tool-model", log=logs / "server", is_forked=False) as server:
        for gate in gates:
            for case, error in results(gate, server.address, logs / gate.script.stem):
                num_cases, failed = num_cases + 1, failed + (error is not None)
                print(f"{gate.client:<16} {case:<24} {'ok' if error is None else error}", flush=True)
    print(f"{num_cases} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
