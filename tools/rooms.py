"""Draw the table of rooms in docs/map.md from the imports: `python tools/rooms.py` (part of `make format`).

A room is one or more folders or modules of src/expertmesh with one subject. A module that no room names is an error.
"""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "expertmesh"
PAGE = ROOT / "docs" / "map.md"
BEGIN, END = "<!-- rooms: drawn by tools/rooms.py -->", "<!-- end of rooms -->"


class Room(NamedTuple):
    """Parts of the package with one subject, and the sentence that says it."""

    name: str
    parts: tuple[str, ...]
    subject: str


ROOMS = (
    Room("config", ("config", "spec", "errors"), "Options, sizes of models and errors; no torch."),
    Room("compute", ("kernels", "ops", "cpu"), "Operators, their references, and kernels in Triton and C."),
    Room("layer", ("moe", "functional"), "The mixture-of-experts layer: route, dispatch, experts, combine."),
    Room("ranks", ("comm", "parallel"), "Collectives, meshes, and the parallelism of tokens and weights."),
    Room("models", ("models", "lora"), "Model families, their registry, and low-rank adapters."),
    Room("files", ("checkpoints", "runs"), "Checkpoints, hub folders, run folders, and the opening of models."),
    Room("text", ("text", "data"), "Tokenizers, chat formats, documents, and samples in a fixed order."),
    Room("train", ("training", "objectives", "rl"), "The training loop, optimizers, preferences, rewards."),
    Room("serve", ("engine", "serve"), "The inference engine and its HTTP server."),
    Room("plan", ("costs", "planner"), "Parameters, memory, time and price of a model on a cluster; no torch."),
    Room("integrations", ("integrations",), "Tutel, DeepSpeed, fairseq, transformers, peft, lm-evaluation-harness."),
    Room("interface", ("cli", "reporting", "api", "__main__"), "Command line, report pages, the Python API."),
)  # fmt: skip


def paths_of(part: str) -> list[Path]:
    """Files of a folder or a module."""
    return sorted((SOURCE / part).rglob("*.py")) or [SOURCE / f"{part}.py"]


def parts_that_it_imports(path: Path) -> set[str]:
    """Folders and modules below `expertmesh` that a file imports anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found.update(name.split(".")[1] for name in names if name.startswith("expertmesh."))
    return found


def drawn() -> tuple[list[str], dict[str, int]]:
    """Rows of the table with `{size}` in the place of each size, and lines of code by room.

    Raises:
        SystemExit: a part of the package is in no room.
    """
    room_of = {part: room.name for room in ROOMS for part in room.parts}
    there = {path.name.removesuffix(".py") for path in SOURCE.iterdir()} & {
        *(path.stem for path in SOURCE.glob("*.py")),
        *(path.parent.name for path in SOURCE.glob("*/__init__.py")),
    }
    if missing := there - {*room_of, "__init__"}:
        raise SystemExit(f"parts without a room: {sorted(missing)}; add them to ROOMS in tools/rooms.py")
    rows, sizes = [], {}
    for room in ROOMS:
        paths = [path for part in room.parts for path in paths_of(part) if path.exists()]
        sizes[room.name] = sum(len(path.read_text().splitlines()) for path in paths)
        imported = {room_of[part] for path in paths for part in parts_that_it_imports(path) & {*room_of}}
        names = ", ".join(r.name for r in ROOMS if r.name in imported - {room.name}) or "nothing"
        parts = ", ".join(f"`{part}/`" if (SOURCE / part).is_dir() else f"`{part}.py`" for part in room.parts)
        rows.append(f"| **{room.name}** | {parts} | {room.subject} | {{size}} | {names} |")
    return rows, sizes


def main() -> None:
    """Write the table into the page."""
    rows, sizes = drawn()
    table = [row.format(size=f"{round(sizes[room.name], -3):,}") for row, room in zip(rows, ROOMS, strict=True)]
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    columns = "| Room | Folders and modules | Subject | Lines | Imports |\n|---|---|---|---|---|"
    PAGE.write_text("\n".join([f"{head}{BEGIN}", "", columns, *table, "", f"{END}{tail}"]))


if __name__ == "__main__":
    main()
