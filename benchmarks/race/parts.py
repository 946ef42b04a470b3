"""The parts of a call: each in a process of its own that is killed at its limit, its results written as they come.

A part is a function `f(keep, **arguments)`. `keep(result)` writes what there is so far; what it returns is the result.
A part that hangs, raises or crashes costs itself only: the record says so with what it kept, and the next part begins.
One that is allowed a second attempt finds in `keep.before` what the first one kept, so that it can go past what it died
of.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.race.budget import Budget

_POLL_S = 0.05
_LEAST_S = 5.0
"""With less time left no part is begun."""
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One thing to do in a call.

    Attributes:
        name: in the record.
        run: "module:function".
        limit_s: it is killed after so many seconds.
        arguments: of the function, beside `keep`.
        attempts: how often it may be begun, if it was killed or crashed.
        fresh: in a new interpreter instead of a fork of this one, which has imported what it needs already.
    """

    name: str
    run: str
    limit_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    attempts: int = 1
    fresh: bool = False


class Keep:
    """Writes a part's results to a file, at once and as a whole.

    Attributes:
        file: where.
        before: what an attempt before this one kept, or None.
    """

    def __init__(self, file: Path, before: Any = None) -> None:
        self.file, self.before = file, before

    def __call__(self, result: Any, state: str = "running", error: str | None = None) -> None:
        """Replace what was kept so far."""
        found = {"state": state, "result": result} | ({"error": error} if error else {})
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(found))
        beside.replace(self.file)

    def found(self) -> Outcome:
        """What was kept last."""
        if self.file.exists():
            return json.loads(self.file.read_text())
        return {"state": "running", "result": None}


def run_part(part: Part, *, limit_s: float, file: Path, log: Path, before: Any = None) -> Outcome:
    """Run a part in a process group of its own, for at most limit_s seconds.

    A fork of a process that has touched a GPU cannot use it; where an import has, the part gets a fresh interpreter.

    Args:
        part: what to run.
        limit_s: seconds, at most.
        file: for its results while it runs; removed at the end.
        log: its output is appended here.
        before: what an earlier attempt kept.

    Returns:
        {"state": "done", "failed", "killed" or "crashed", "seconds", "result", "error"}.
    """
    file.unlink(missing_ok=True)
    keep = Keep(file, before)
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _child(part, keep, log)
    try:
        status = _wait(process, began + limit_s)
    finally:
        _end(process)
    outcome = keep.found()
    if status is None:
        outcome |= {"state": "killed", "error": f"killed after {limit_s:.0f} s"}
    elif outcome["state"] == "running":
        code = os.waitstatus_to_exitcode(status)
        outcome |= {"state": "crashed", "error": f"ended with exit code {code}"}
    file.unlink(missing_ok=True)
    return outcome | {"seconds": round(time.monotonic() - began, 2)}


def _child(part: Part, keep: Keep, log: Path) -> NoReturn:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if part.fresh or _touched_a_gpu():
        given = json.dumps([asdict(replace(part, fresh=False)), str(keep.file), keep.before])
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.race.parts", given])
    _run(part, keep)


def _touched_a_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _run(part: Part, keep: Keep) -> NoReturn:
    """Run the part's function in this process and end it."""
    code = 1
    try:
        print(f"=== {part.name}", flush=True)
        module, function = part.run.split(":")
        result = getattr(importlib.import_module(module), function)(keep, **part.arguments)
        keep(result, "done")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        keep(keep.found()["result"], "failed", f"{type(error).__name__}: {str(error)[:500]}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(process: int, until: float) -> int | None:
    """The exit status, or None if the process still runs at that time."""
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)


def _end(process: int) -> None:
    """Kill what is left of a part's process group, and its process."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(process, 0)
    except ChildProcessError:
        return


def run_call(
    parts: Sequence[Part],
    *,
    name: str,
    out: Path,
    budget: Budget,
    changed: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """Run parts one after another within a budget; the record is written after each.

    Args:
        parts: in the order in which they say most.
        name: of the files in `out`: name.json, name.log.
        out: folder.
        budget: seconds for all, of which some may be gone.
        changed: called with the record after every part, when it has been written.

    Returns:
        {"call", "budget_s", "parts": {name: outcome}}; a part for which there was no time has the state "left out".
    """
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"call": name, "budget_s": budget.seconds, "parts": {}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{name}: ended from outside"))
    for part in parts:
        record["parts"][part.name] = outcome = _attempts(part, budget, out, name)
        record["seconds"] = round(budget.spent_s, 1)
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        changed(record)
        print(
            f"{part.name}: {outcome['state']}, {outcome['seconds']:.0f} s"
            + (f" ({outcome['error']})" if "error" in outcome else "")
            + f"; {budget.left_s:.0f} s left",
            flush=True,
        )
    return record


def _attempts(part: Part, budget: Budget, out: Path, name: str) -> Outcome:
    outcome: Outcome = {"state": "left out", "seconds": 0.0, "result": None}
    for number in range(part.attempts):
        if not budget.allows(min(_LEAST_S, part.limit_s)):
            break
        earlier = outcome
        outcome = run_part(
            part,
            limit_s=min(part.limit_s, budget.left_s),
            file=out / f"{name}.part.json",
            log=out / f"{name}.log",
            before=earlier["result"],
        )
        if outcome["result"] is None:  # it got nowhere: what an earlier attempt kept stands
            outcome["result"] = earlier["result"]
        if number:
            outcome["attempts"] = number + 1
        if outcome["state"] in ("done", "failed"):
            break
    return outcome


if __name__ == "__main__":
    _given, _file, _before = json.loads(sys.argv[1])
    _run(Part(**_given), Keep(Path(_file), _before))
