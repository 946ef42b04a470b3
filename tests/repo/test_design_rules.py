"""The rules of the code base that no linter checks: sizes, names, what is imported when."""

import ast
import contextlib
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.config.base import option_names
from expertmesh.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 100
LONGEST_LINE_OF_C = 120
MOST_KERNEL_LINES = 150
MOST_PATCHES = 51
WAYS_TO_PATCH = ("monkeypatch.setattr", "mock.patch", "mock.patch.object", "patch", "patch.object")
LAST_WORDS_OF_PATCHES = {way.rpartition(".")[2] for way in WAYS_TO_PATCH}
CATCH_ALL_NAMES = re.compile(r"(utils?|common|helpers?|misc|shared|stuff)(_.*)?|.*_(utils?|helpers?)")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".cfg", ".json", ""}


class Facts(NamedTuple):
    """What the rules look at in a file; its tree is not kept, or every later collection of garbage would look through
    it."""

    functions: list[tuple[str, int]]
    """Names and numbers of lines."""
    imports: set[str]
    """Modules, and `module.name` of what is imported from one."""
    patches: int
    """Calls that replace an attribute."""
    shapes: set[tuple[str, str]]
    """Names that end in a shape, and the shape."""


@functools.cache
def facts_of(path):
    tree = ast.parse(path.read_text())
    facts = Facts([], set(), 0, set())
    patches = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            facts.functions.append((node.name, lines))
        elif isinstance(node, ast.Import):
            facts.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            facts.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if last in LAST_WORDS_OF_PATCHES:
                patches += ast.unparse(node.func) in WAYS_TO_PATCH
        name = getattr(node, "arg", None) or getattr(node, "id", None)
        stem, _, shape = (name or "").rpartition("_")
        if stem and not stem.isupper() and re.fullmatch(r"[0-9]*[A-Z][A-Za-z0-9]*", shape):
            facts.shapes.add((name, shape))
    return facts._replace(patches=patches)


CLAIMS = ROOT / "benchmarks" / "claims"
"""Experiments as they ran: not read here; tests/benchmarks/test_claims.py starts each."""


@functools.cache
def python_files():
    roots = [SOURCE, ROOT / "tests", ROOT / "benchmarks", ROOT / "tools"]
    found = (path for root in roots if root.is_dir() for path in root.rglob("*.py"))
    return sorted(path for path in found if CLAIMS not in path.parents)


def project_text_files():
    """Not what is made beside the project's files: runs, packages, and all in hidden folders but .ci."""
    made = re.compile(r"\.git$|(\.(?!ci/)[^/]+|runs|build|dist|src/[^/]+\.egg-info)/")
    for path in sorted(ROOT.rglob("*")):
        is_text = path.suffix in TEXT_SUFFIXES and path.is_file() and CLAIMS not in path.parents
        if is_text and not made.match(relative(path)):
            yield path


def relative(path):
    return str(path.relative_to(ROOT))


def test_files_are_short():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in python_files()}
    assert lengths, "no file found: the test looks in the wrong place"
    assert {name: n for name, n in lengths.items() if n > MOST_FILE_LINES} == {}


def test_lines_of_the_kernels_in_c_are_short():
    files = [*SOURCE.rglob("*.[ch]")]
    assert files, "no file found: the test looks in the wrong place"
    lines = {path: path.read_text().splitlines() for path in files}
    assert [relative(path) for path, own in lines.items() if max(map(len, own)) > LONGEST_LINE_OF_C] == []


def test_functions_are_short():
    too_long = {}
    for path in python_files():
        most = MOST_KERNEL_LINES if "kernels" in path.parts else MOST_FUNCTION_LINES
        for name, lines in facts_of(path).functions:
            if lines > most:
                too_long[f"{relative(path)}:{name}"] = lines
    assert too_long == {}


def test_no_catch_all_modules():
    names = [path for path in SOURCE.rglob("*") if path.suffix == ".py" or path.is_dir()]
    assert [relative(path) for path in names if CATCH_ALL_NAMES.fullmatch(path.stem)] == []


def test_only_families_know_their_models():
    """Trainer, engine and command line know a model by its family."""
    core = SOURCE / "expertmesh"
    families = "|".join(p.parent.name for p in (core / "models").glob("*/model.py"))
    named = re.compile(rf"expertmesh\.models(\.| import )({families})\b")
    paths = [p for name in ("training", "engine", "cli") for p in (core / name).glob("*.py")]
    assert families and len(paths) > 50
    assert {relative(path) for path in paths if named.search(path.read_text())} == set()


def test_few_tests_replace_what_they_test():
    """Seams, arguments and fakes that are passed in say more than attributes that are replaced behind the code's
    back."""
    paths = (ROOT / "tests").rglob("*.py")
    assert 0 < sum(facts_of(path).patches for path in paths) <= MOST_PATCHES


def test_test_files_have_unique_names_in_their_folder_tree():
    folders = (ROOT / "tests", ROOT / "tests" / "oracle", ROOT / "tests" / "support")
    packages = [folder / "__init__.py" for folder in folders]
    assert sorted((ROOT / "tests").rglob("__init__.py")) == packages


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)


TORCH_FREE = """
import sys
{action}
heavy = sorted({{"torch", "triton", "transformers", "numpy"}} & set(sys.modules))
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "module",
    ["expertmesh", "expertmesh.config.run", "expertmesh.costs", "expertmesh.models.registry"],
)
def test_import_without_torch(module):
    done = run_python(TORCH_FREE.format(action=f"import {module}"))
    assert done.returncode == 0, done.stderr


def test_public_names_are_frozen():
    """A new public name is a promise: add it to public_names.txt on purpose, never take one away by accident."""
    import expertmesh
    from expertmesh import functional, lora

    names = []
    for module in (expertmesh, functional, lora):
        names += [f"{module.__name__}.{name}" for name in module.__all__]
        assert all(hasattr(module, name) for name in module.__all__)
    frozen = Path(__file__).with_name("public_names.txt").read_text().split()
    assert sorted(names) == frozen


def test_no_registry_hosts_and_no_machine_paths():
    """The project installs from wherever pip is set to, and speaks of no machine of its own."""
    hosts = [
        "pypi" + ".org",
        "python" + "hosted",
        "npmjs" + ".",
        "download.py" + "torch",
        "anaconda" + ".",
        "conda-" + "forge",
    ]
    paths = ["/wo" + "rk/", "/opt/wh" + "eels", "/ro" + "ot/"]
    found = []
    for path in project_text_files():
        text = path.read_text(errors="replace")
        found += [f"{relative(path)}: {word}" for word in hosts + paths if word in text]
    assert found == []


def test_constraints_are_exact_and_complete():
    """Everything that `make` installs is pinned: names and versions only."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), lines
    pinned = {normal(line.split("==")[0]) for line in lines}
    extras = project()["optional-dependencies"].values()
    wanted = sum(extras, start=project()["dependencies"])
    assert needed_by(wanted) - pinned <= {"setuptools"}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed_by(requirements):
    """Names of these packages and of all that they need, as far as they are installed here."""
    found, queue = set(), list(requirements)
    while queue:
        name = normal(re.match(r"[A-Za-z0-9._-]+", queue.pop()).group())
        if name not in found:
            found.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                queue += [n for n in importlib.metadata.requires(name) or [] if ";" not in n]
    return found


def test_a_gpu_without_a_network_gets_all_wheels():
    """What `make gpu-wheels` collects is all that tests and race need beside torch, triton and transformers."""
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu-wheels:")[2].partition("\n\n")[0]
    (line,) = re.findall(r"-d \S+ \S+ \\\n(.*)\$\$\(", recipe, re.DOTALL)
    collected = {normal(word) for word in line.split() if word != "\\"}
    tests = ["pytest", "pytest-xdist", "hypothesis"]
    wanted = needed_by([*project()["dependencies"], *tests])
    assert wanted - needed_by(["torch", "triton", "transformers"]) - {"torch"} <= collected


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_make_targets_of_the_readme_exist():
    """Its other commands run in test_pages.py."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = re.findall(r"^make ([^#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = {word for line in asked for word in line.split() if "=" not in word}
    assert {"demo", "test"} <= words <= set(targets)


def test_links_in_documents_lead_somewhere():
    broken = []
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{relative(path)}: {target}")
    assert broken == []


def test_decisions_are_numbered_and_shaped_alike():
    numbers = []
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        number = path.name[:3]
        numbers.append(number)
        title = path.read_text().partition("\n")[0]
        assert re.fullmatch(r"# (NNN|\d{3}): .+", title), f"{path.name}: {title}"
        assert number == "000" or title.startswith(f"# {number}: "), path.name
    assert len(set(numbers)) == len(numbers), "two decisions have one number"


def shape_suffixes():
    """Shapes that names of values in `src/` end in: what follows the last underscore and has upper-case letters."""
    for path in sorted(SOURCE.rglob("*.py")):
        for name, shape in sorted(facts_of(path).shapes):
            yield relative(path), name, shape


def test_letters_of_shapes_are_in_the_legend():
    legend = (ROOT / "docs" / "glossary.md").read_text().split("## Words")[0]
    cells = re.findall(r"^\| ([A-Za-z](?:, [A-Za-z])*) \|", legend, re.MULTILINE)
    known = {letter for cell in cells for letter in cell.split(", ")}
    assert {"T", "d", "U"} <= known, "the legend was not found"
    unknown = {f"{path}: {name}" for path, name, shape in shape_suffixes() if set(shape) - known - set("0123456789")}
    assert unknown == set()


SAYERS = {
    "ConfigError",
    "FieldError",
    "CheckpointError",
    "CollectiveError",
    "TrainingDivergedError",
}
SAYERS |= {"Line", "require", "refuse_idle"}


def texts_of_messages(path):
    """Texts in the calls that make messages, `{}` for what is formatted into them."""
    for node in ast.walk(ast.parse(path.read_text())):
        called = getattr(node, "func", None)
        if (getattr(called, "attr", None) or getattr(called, "id", None)) not in SAYERS:
            continue
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.lineno, argument.value
            elif isinstance(argument, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in argument.values]
                yield argument.lineno, "".join(p if isinstance(p, str) else "{}" for p in parts)


def test_messages_name_options_by_fields_that_each_printer_spells():
    names = {name for family in FAMILIES.values() for name in option_names(family.config)}
    option = rf"(?<![\w./'\"-])({'|'.join(map(re.escape, sorted(names - {'family'})))})(?![\w/'\"-])"
    found = [
        f"{relative(path)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in texts_of_messages(path)
        if " " in text and re.search(option, text)
    ]
    assert found == [], "write ConfigError(option, value, rule, fix), and named(option) inside them"
