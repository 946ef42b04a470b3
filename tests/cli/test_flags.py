"""`expertmesh train RECIPE --section.field value`: every spelling that works, and what each mistake says."""

import os
import pickle
from operator import attrgetter

import pytest
from tests.support.known_rows import known

from expertmesh.cli.flags import parse_run_config, print_train_help
from expertmesh.cli.options import flag_name
from expertmesh.cli.prog_name import Flags, prog_name
from expertmesh.config.base import FieldError, option_names
from expertmesh.errors import CheckpointError, ConfigError, Line, command, named
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.family import GPT
from expertmesh.models.registry import FAMILIES

RECIPE = "gpt-moe-demo"


def parse(*words):
    return parse_run_config([RECIPE, *words])


def test_recipe_alone_is_the_recipe():
    from expertmesh.models.gpt.recipes import RECIPES

    for name, recipe in RECIPES.items():
        assert parse_run_config([name])[:4] == (name, recipe(), False, GPT)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_option_can_be_given(family):
    """Each option, set to its own default in the command line's spelling, is understood."""
    config = family.config()
    words = []
    for name in option_names(family.config):
        value = attrgetter(name)(config)
        texts = [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
        texts = texts or ["none"]
        words += [flag_name(name), *texts]
    assert parse_run_config(["base", *words], recipes={"base": family.config}).config == config


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--train.steps", "60"], "train.steps", 60),
        (["--train.steps=60"], "train.steps", 60),
        (["--train.run-dir", "runs/x"], "train.run_dir", "runs/x"),
        (["--train.run_dir", "runs/x"], "train.run_dir", "runs/x"),
        (["--optim.lr", "3e-4"], "optim.lr", 3e-4),
        (["--model.moe.capacity-factor", "1.25"], "model.moe.capacity_factor", 1.25),
        (["--model.moe.capacity-factor", "none"], "model.moe.capacity_factor", None),
        (["--model.moe.capacity-factor", "None"], "model.moe.capacity_factor", None),
        (["--model.moe.num-experts", "4"], "model.moe.num_experts", (4,)),
        (
            ["--model.num-layers", "6", "--model.moe.num-experts", "4", "4", "4", "8", "8", "8"],
            "model.moe.num_experts",
            (4, 4, 4, 8, 8, 8),
        ),
        (
            ["--model.num-layers", "6", "--model.moe.num-experts", "4,4,4,8,8,8"],
            "model.moe.num_experts",
            (4, 4, 4, 8, 8, 8),
        ),
        (["--parallel.ep-degree", "4"], "parallel.ep_degree", (4,)),
        (["--parallel.ep-degree", "4", "1", "2", "2"], "parallel.ep_degree", (4, 1, 2, 2)),
        (["--parallel.ep-degree", "none"], "parallel.ep_degree", ()),
        (["--model.moe.num-experts", "none"], "model.moe.num_experts", ()),
        (["--train.tensorboard"], "train.tensorboard", True),
        (["--train.no-tensorboard"], "train.tensorboard", False),
        (["--train.tensorboard", "false"], "train.tensorboard", False),
        (["--train.tensorboard=False"], "train.tensorboard", False),
        (["--data.path", "-odd-name.txt"], "data.path", "-odd-name.txt"),
        (["--train.dtype", "float64"], "train.dtype", "float64"),
        (["--train.steps", "20"], "optim.warmup_steps", 50 * 20 // 520),
        (["--train.steps", "50"], "optim.warmup_steps", 50),
        (["--train.steps", "20", "--optim.schedule-steps", "60"], "optim.warmup_steps", 50),
        (["--train.steps", "20", "--optim.schedule-steps", "none"], "optim.warmup_steps", 1),
        (["--train.steps", "20.0"], "optim.warmup_steps", 1),
        (["--train.steps", "60", "--optim.warmup-steps", "60"], "optim.warmup_steps", 60),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_spellings(words, name, value):
    for order in ([RECIPE, *words], [*words, RECIPE]):
        assert attrgetter(name)(parse_run_config(order).config) == value


LISTS = {
    "model.moe.num_experts": ["4", "4", "4", "8", "8", "8"],
    "parallel.ep_degree": ["2", "1", "1", "2"],
    "train.freeze": ["experts", "router"],
    "data.path": ["a.txt", "b.txt:2", "c,d.txt"],
    "data.languages": ["en", "de", "fr"],
    "data.pairs": ["en-de", "de-en"],
}


@pytest.mark.parametrize("name", known(LISTS))
def test_lists_have_blanks_commas_or_the_option_before_each(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c,d.txt").touch()  # a comma of a name is no separator
    recipe = "translate-multi30k" if name in ("data.languages", "data.pairs") else RECIPE
    values, flag = LISTS[name], flag_name(name)
    more = ["--model.num-layers", "6"] if name.startswith("model") else []
    with_commas = (
        [values] if "c,d.txt" in values else [[",".join(values)], [", ".join(values)], [f"{values[0]},", *values[1:]]]
    )
    for words in (
        [flag, *values],
        *([flag, *one] for one in with_commas),
        [word for value in values for word in (flag, value)],
        [f"{flag}={value}" for value in values],
        [flag, values[0], "--train.steps", "60", flag, *values[1:]],
    ):
        for order in ([recipe, *more, *words], [*more, *words, recipe]):
            found = attrgetter(name)(parse_run_config(order).config)
            assert [str(value) for value in found] == values, order


def test_dry_run():
    assert parse("--dry-run").dry_run
    assert not parse().dry_run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no recipe given; say one after 'train': "),
        (["gpt-moe-dmo"], "unknown recipe 'gpt-moe-dmo'; did you mean gpt-moe-demo? known: "),
        (["zebra"], "unknown recipe 'zebra'; known: gpt-moe-test, "),
        ([RECIPE, "again"], "unexpected word 'again'; options look like --section.field value"),
        (
            ["--data.path", "here", "gpt-moe-dmo"],
            "no recipe given; did you mean gpt-moe-demo? known: ",
        ),
        (
            [RECIPE, "--model.moe.num-experts", "4", "oops"],
            "--model.moe.num-experts oops: must be a whole number",
        ),
        (
            [RECIPE, "--train.stepz", "3"],
            "unknown option --train.stepz; did you mean --train.steps?",
        ),
        ([RECIPE, "--steps", "3"], "unknown option --steps; did you mean --train.steps?"),
        (
            [RECIPE, "--model.top-k", "3"],
            "unknown option --model.top-k; did you mean --model.moe.top-k?",
        ),
        (
            [RECIPE, "--train.no-steps"],
            "unknown option --train.no-steps; did you mean --train.steps?",
        ),
        ([RECIPE, "--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        ([RECIPE, "--xyz"], "unknown option --xyz; see expertmesh train --help"),
        ([RECIPE, "-x"], "unknown option -x; see expertmesh train --help"),
        (
            [RECIPE, "--train", "3"],
            "--train is a section; name a field of it, for example --train.steps",
        ),
        (
            [RECIPE, "--model.moe", "3"],
            "--model.moe is a section; name a field of it, for example --model.moe.",
        ),
        ([RECIPE, "--train.steps"], "--train.steps needs a value; write it after the option"),
        *(
            (words, f"{words[1]} needs a value, or none; write it after the option")
            for words in (
                [RECIPE, "--train.freeze"],
                [RECIPE, "--train.trackers", "--train.steps", "3"],
                [RECIPE, "--model.moe.num-experts"],
            )
        ),
        (
            [RECIPE, "--train.steps", "--optim.lr", "1"],
            "--train.steps needs a value; write it after the option",
        ),
        (
            [RECIPE, "--train.steps", "9", "--train.steps", "9"],
            "--train.steps is given twice; give it once",
        ),
        (
            [RECIPE, "--train.steps", "abc"],
            "--train.steps abc: must be a whole number above 0; for example 1000",
        ),
        (
            [RECIPE, "--train.steps", "1e-3"],
            "--train.steps 1e-3: must be a whole number above 0; for example 1000",
        ),
        (
            [RECIPE, "--train.steps="],
            "--train.steps '': must be a whole number above 0; for example 1000",
        ),
        (
            [RECIPE, "--train.steps", "-5"],
            "--train.steps -5: must be greater than 0; for example 1000",
        ),
        (
            [RECIPE, "--optim.lr", "fast"],
            "--optim.lr fast: must be a finite number above 0; for example 0.001",
        ),
        (
            [RECIPE, "--train.no-tensorboard", "true"],
            "--train.no-tensorboard takes no value; leave 'true' out",
        ),
        (
            [RECIPE, "--model.moe.num-experts", "8", "--model.moe.top-k", "9"],
            "--model.moe.top-k 9: must be at most the fewest experts of a layer, 8; ",
        ),
        (
            [RECIPE, "--parallel.ep-degree", "2", "2", "1"],
            "--parallel.ep-degree 2 2 1: must have one entry, or one per MoE layer (4), has 3; ",
        ),
        (
            [RECIPE, "--model.num-layers", "6", "--model.moe.num-experts", "8", "8"],
            "--model.moe.num-experts 8 8: must have one entry, or one per MoE layer (6), has 2; ",
        ),
        (
            [RECIPE, "--model.moe.num-experts", "0"],
            "--model.moe.num-experts 0: must be greater than 0; for example 8",
        ),
        (
            [RECIPE, "--model.moe.num-experts", ""],
            "--model.moe.num-experts '': must not be empty; ",
        ),
        ([RECIPE, "--train.freeze", ","], "--train.freeze ,: must not be empty; "),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_mistakes(words, message):
    with pytest.raises(ConfigError) as caught:
        parse_run_config(words)
    said = Flags().spell(caught.value)
    assert said.replace(prog_name(), "expertmesh").startswith(message)
    assert "\n" not in said


def test_help_lists_recipes_and_every_option(capsys):
    from expertmesh.models.gpt.recipes import RECIPES

    with pytest.raises(SystemExit) as stop:
        parse_run_config(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in RECIPES:
        assert f"  {name} " in text
    for name in option_names(GPTRunConfig):
        assert flag_name(name) in text


def test_help_of_a_recipe_shows_its_defaults(capsys):
    from expertmesh.models.gpt.recipes import RECIPES

    print_train_help("gpt-moe-test", RECIPES)
    text = " ".join(capsys.readouterr().out.split())
    assert "expertmesh train gpt-moe-test" in text
    assert f"(default: {RECIPES['gpt-moe-test']().train.run_dir})" in text


TOLD = [  # an error or a line, as Python and as the command line of a verb print it
    (
        ConfigError(
            "train.run_dir",
            "runs/x",
            "is in use",
            f"try {named('train.resume', 'auto')}, or another {named('train.run_dir')}",
        ),
        "",
        "train.run_dir=runs/x: is in use; try train.resume=auto, or another train.run_dir",
        "--train.run-dir runs/x: is in use; try --train.resume auto, or another --train.run-dir",
    ),
    (
        ConfigError("runs/train.steps/x: train.steps=3 is no option of its own; train.stepsize"),
        "",
        "runs/train.steps/x: train.steps=3 is no option of its own; train.stepsize",
        "runs/train.steps/x: train.steps=3 is no option of its own; train.stepsize",
    ),
    (
        ConfigError("model.moe.num_experts", (4, 8), "no", "yes"),
        "train",
        "model.moe.num_experts=4 8: no; yes",
        "--model.moe.num-experts 4 8: no; yes",
    ),
    (
        FieldError(("moe", "top_k", 1), "4", "no", "yes").inside(("model",)),
        "train",
        "model.moe.top_k[1]='4': no; yes",
        "--model.moe.top-k 4: no; yes",
    ),
    (
        FieldError("stepz", 3, "unknown option", "", near="steps").inside(("train",)),
        "train",
        "train.stepz=3: unknown option; did you mean train.steps?",
        "--train.stepz 3: unknown option; did you mean --train.steps?",
    ),
    (
        ConfigError("es_degree", 3, "no", f"use {named('tp_degree', 2)}"),
        "train",
        "es_degree=3: no; use tp_degree=2",
        "--parallel.es-degree 3: no; use --parallel.tp-degree 2",
    ),
    (
        ConfigError("es_degree", 3, "no"),
        "generate",
        "es_degree=3: no",
        "--parallel.es-degree 3: no",
    ),
    (
        CheckpointError(f"lower {named('device', 'x')}"),
        "classify",
        "lower device=x",
        "lower --device x",
    ),
    (ConfigError("num_beams", 0, "no"), "translate", "num_beams=0: no", "--beams 0: no"),
    (
        Line(f"{named('split_long', True)}, {named('train.tensorboard', False)}"),
        "translate",
        "split_long=True, train.tensorboard=False",
        "--split-long, --train.tensorboard false",
    ),
    (
        ConfigError("to", "a\x02b\x03c", "no", f"see {command('convert --help')}"),
        "convert",
        "to=a b c: no; see expertmesh convert --help",
        "--to a b c: no; see PROGRAM convert --help",
    ),
    (ValueError("train.steps"), "train", "train.steps", "train.steps"),
]


@pytest.mark.parametrize(("told", "verb", "python", "typed"), known(TOLD), ids=str)
def test_options_are_spelled_where_they_are_printed(told, verb, python, typed):
    copies = [told] if isinstance(told, Line) else [told, pickle.loads(pickle.dumps(told))]
    for one in copies:
        assert str(one) == python
        assert Flags(verb).spell(one).replace(prog_name(), "PROGRAM") == typed


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train"],
        ["train", "gpt-moe-demo"],
        ["generate"],
        ["report"],
        ["export"],
        *known([["translate"], ["classify"]]),
        ["convert"],
        ["evaluate"],
        ["bench"],
        ["doctor"],
        ["experts"],
        ["sweep"],
    ],
    ids=str,
)
def test_help_fits_the_terminal_and_cuts_no_word(words, width, monkeypatch, capsys):
    from expertmesh.cli.main import main

    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    for line in out.splitlines():
        is_one_word = len(line.removesuffix(" \\").split()) == 1
        assert len(line) <= width or is_one_word, line
        assert not ("#" in line and line.endswith("\\")), "a remark ends with its line"
    commands = [" ".join(line.split()) for line in out.replace("\\\n", " ").splitlines()]
    if words == ["bench"]:
        rest = "-m expertmesh bench comm --largest-mib 256 --plot bandwidth.svg --ranks-per-node 2"
        assert f"torchrun --nproc-per-node 4 {rest}" in commands
    usage = out[out.index("usage: ") :].partition("\n\n")[0]
    assert all(line.count("[") == line.count("]") for line in usage.splitlines())
    if words == ["train"]:
        joined = " ".join(out.replace("\\\n", " ").split())
        assert "gpt-moe-demo --train.steps 100 --train.run-dir runs/short --data.path my_texts/" in joined


def test_help_of_training_ends_in_one_column(monkeypatch, capsys):
    from expertmesh.cli.main import main

    monkeypatch.setenv("COLUMNS", "1")
    assert main(["train", "gpt-moe-test", "--help"]) == 0
    assert "--train.steps" in capsys.readouterr().out.replace("\n", "")
    assert os.environ["COLUMNS"] == "1"
