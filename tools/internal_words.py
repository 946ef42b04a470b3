"""Count lines of docstrings and comments of internals beyond the first: `python tools/internal_words.py [ROOT]`.

Internal are functions and classes outside the public names; a comment is a run of whole lines.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PUBLIC = "tests/repo/public_names.txt"


def internals(node: ast.AST, public: set[str], *, is_top: bool = True) -> Iterator[ast.AST]:
    """Functions and classes outside the public ones, and all that is inside them."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from internals(child, public, is_top=is_top)
        elif not (is_top and child.name in public):
            yield child
            yield from internals(child, public, is_top=False)


def lines_beyond_the_first(path: Path, public: set[str]) -> int:
    """Lines of a file's docstrings and comments of internals that follow the first of each."""
    text = path.read_text()
    of_docstrings = 0
    for node in internals(ast.parse(text), public):
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            of_docstrings += docstring.end_lineno - docstring.lineno
    is_comment = [line.lstrip().startswith("#") for line in text.splitlines()]
    return of_docstrings + sum(above and own for above, own in zip(is_comment, is_comment[1:], strict=False))


def counts(root: Path) -> Counter[str]:
    """Lines by file."""
    public = {name.rpartition(".")[2] for name in (root / PUBLIC).read_text().split()}
    paths = sorted((root / "src").rglob("*.py"))
    return Counter({str(path.relative_to(root)): lines_beyond_the_first(path, public) for path in paths})


def main() -> None:
    """Print the files with most lines, the folders, and the sum."""
    by_file = counts(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
    by_folder: Counter[str] = Counter()
    for name, lines in by_file.items():
        by_folder["/".join(name.split("/")[:3])] += lines
    for rows in (by_file.most_common(25), by_folder.most_common()):
        print(*(f"{lines:6,} {name}" for name, lines in rows), "", sep="\n")
    print(f"{by_file.total():6,} in all")


if __name__ == "__main__":
    main()
