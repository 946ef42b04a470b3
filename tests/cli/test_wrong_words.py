"""Words that a stranger gets wrong, of every verb: one line on stderr with the word and what to do, exit code 2,
nothing on stdout."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli import parse
from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.help import name_of
from expertmesh.cli.main import main
from expertmesh.cli.options import declared_by, options_of

OF_FAMILIES = {"translate", "classify"}
"""Verbs that come with their families."""
WRONG = {
    "the verb": """
        nothing | use one of train, sweep
        traine gpt-moe-test | did you mean train?
        --train.steps 3 train gpt-moe-test | --train.steps: the first word must be a verb
        --seed 3 generate model hi | --seed: the first word must be a verb
        -x | -x: the first word must be a verb
        -- train | --: the first word must be a verb
        --verson | did you mean --version?
    """,
    "the recipe": """
        train | no recipe given
        train gpt-moe-tset | did you mean gpt-moe-test?
        train gpt-moe-test extra | unexpected word 'extra'
        train --train.steps 3 | no recipe given
        train gpt-moe-test --family nofamily | --family nofamily: unknown
        train gpt-moe-test --family os:path | --family os:path
    """,
    "the name of an option": """
        train gpt-moe-test --train.stepz 3 | did you mean --train.steps?
        train gpt-moe-test --steps 3 | did you mean --train.steps?
        train gpt-moe-test -train.steps 3 | did you mean --train.steps?
        train gpt-moe-test --train 3 | --train is a section
        train gpt-moe-test --train.no-steps | did you mean --train.steps?
        train gpt-moe-test --helpp | did you mean --help?
        train gpt-moe-test --debug=3 | unknown option --debug
        generate model hi --max-token 3 | did you mean --max-tokens?
        generate model hi --temp 3 | did you mean --temperature?
        generate model hi --größe 3 | unknown option --größe
        serve model --prot 80 | did you mean --port?
        doctor --clusters x | did you mean --cluster?
    """,
    "no value, or two": """
        train gpt-moe-test --train.steps | --train.steps needs a value; write
        train gpt-moe-test --train.steps --train.seed 3 | --train.steps needs a value; write
        train gpt-moe-test --train.steps 3 --train.steps 4 | --train.steps is given twice
        train gpt-moe-test --train.no-tensorboard --train.tensorboard | is given twice
        train gpt-moe-test --train.no-tensorboard true | takes no value; leave 'true' out
        generate model hi --no-greedy=3 | takes no value; leave '3' out
        generate --run model --run model hi | --run is given twice
        generate model hi --stop | --stop needs a value, or none
        sweep gpt-moe-test --rates | --rates needs a value; write
        sweep gpt-moe-test | --rates: must be given
        export model | --output: must be given; write --output FILE
        export model --output | --output needs a value
        convert model | --to: must be given; write --to DIR
        quantize model --to x | --format: must be given; write --format {int8,int4,fp8}
        evaluate model | --tasks: must be given
        plan gpt-1.1t | --cluster: must be given
        translate model hi | --to: must be given
        bench serve http://127.0.0.1:1 --prompt-tokens 5 | --prompt-tokens 5: must have 2 values; for example 16 128
        bench serve http://127.0.0.1:1 --prompt-tokens 5 6 7 | --prompt-tokens 5 6 7: must have at most 2 entries
    """,
    "numbers": """
        train gpt-moe-test --train.steps= | --train.steps '': must be a whole number
        train gpt-moe-test --train.steps '' | --train.steps '': must be a whole number
        train gpt-moe-test --train.steps -3 | --train.steps -3: must be greater than 0
        train gpt-moe-test --train.steps=-3 | --train.steps -3: must be greater than 0
        train gpt-moe-test --train.steps 3.5 | --train.steps 3.5: must be a whole number
        train gpt-moe-test --train.steps 0x10 | --train.steps 0x10: must be a whole number
        train gpt-moe-test --optim.lr fast | --optim.lr fast: must be a finite number
        train gpt-moe-test --optim.lr nan | --optim.lr nan: must be a finite number
        train gpt-moe-test --optim.lr 1e400 | --optim.lr 1e400: must be a finite number
        generate model hi --max-tokens 0 | --max-tokens 0: must be at least 1
        generate model hi --max-tokens many | --max-tokens many: must be a whole number
        generate model hi --temperature -1 | --temperature -1: must be at least 0
        generate model hi --temperature=-1 | --temperature -1: must be at least 0
        generate model hi --temperature=-0.5 | --temperature -0.5: must be at least 0
        generate model hi --top-p 2 | --top-p 2: must be at most 1
        generate model hi --top_k 0 | --top-k 0: must be at least 1
        generate model hi --seed 99999999999999999999 | must be at most 2^63 - 1
        generate model hi --batch-size 0 | --batch-size 0: must be at least 1; for example 32
        generate model hi --parallel.tp-degree 0 | --parallel.tp-degree 0: must be greater than 0
        serve model --port 99999 | --port 99999: must be at most 65,535; for example 8000
        serve model --port http | --port http: must be a whole number
        runs . --keep 0 | --keep 0: must be at least 1
        report model --samples -1 | --samples -1: must be at least 0
        sweep gpt-moe-test --rates a,b | --rates a: must be a finite number
        plan gpt-1.1t --cluster h100x8 --tokens zero | --tokens zero: must be a number, or one with k
        plan gpt-1.1t --cluster h100x8 --pp 0 | --pp 0: must be a whole number
        bench comm --largest-mib huge | --largest-mib huge: must be a finite number
        translate model hi --to de --beams 0 | --beams 0: must be at least 1
        classify model x.png --top 0 | --top 0: must be at least 1
    """,
    "switches, choices, lists, JSON": """
        train gpt-moe-test --train.tensorboard maybe | must be true or false; choose one
        train gpt-moe-test --dry-run=maybe | --dry-run maybe: must be true or false; choose one
        train gpt-moe-test --optim.name adam | must be one of adamw, muon; did you mean adamw?
        train gpt-moe-test --train.freeze expert | did you mean experts?
        train gpt-moe-test --model.moe.num-experts , | must not be empty
        train gpt-moe-test --model.moe.num-experts 4 x | --model.moe.num-experts x: must be a whole number
        train gpt-moe-test --train.device gpu | must be auto, cpu, cuda or cuda:N
        train gpt-moe-test --train.max-time soon | --train.max-time soon: must be
        generate model hi --dtype fp16 | must be one of float32, bfloat16, float16, float64
        generate model hi --device gpu | must be auto, cpu, cuda or cuda:N
        generate model hi --logit-bias { | --logit-bias {: must be numbers by token id; for example
        generate model hi --logit-bias '{"a": 1}' | --logit-bias a: must be a token id
        generate model hi --json-schema nope | --json-schema nope: must be a JSON schema
        generate model hi --stop-token-ids a | --stop-token-ids a: must be a token id
        generate model hi --chat-template-kwargs '{x' | --chat-template-kwargs {x: must be a JSON object
        quantize model --to x --format int3 | did you mean int8?
        plan gpt-1.1t --cluster h100x8 --goal speed | must be one of throughput, memory, latency
        classify model x.png --fit stretch | must be one of pad, resize, exact
        serve model --adapter poems | --adapter poems: each must be NAME=DIR
        experts merge model --to x | merge: must be one of prune, join
        bench com | com: must be one of comm, serve; did you mean comm?
    """,
    "bare words": """
        generate | no run given; write one:
        generate model | no prompt; write it last
        generate model --input file.txt hi | use one of them
        serve | no run given; write one:
        serve model model | unexpected word 'model'
        runs | no folder given; write one:
        report | no run given; write one:
        convert | no folder given; write one:
        experts | no prune|join given; write one:
        experts prune model --to x | needs --keep K
        experts join model --to x | got 1 runs; name two
        plan | no model given; write one:
        bench | bench comm
        bench serve | no address given; write one:
        doctor now | unexpected word 'now'
        classify model | no image
    """,
    "files and folders": """
        train gpt-moe-test --config gone.yaml | --config gone.yaml: does not exist
        train gpt-moe-test --config folder | --config folder: cannot be read (Is a directory)
        train gpt-moe-test --config bad.yaml | --config bad.yaml: is no YAML
        train gpt-moe-test --config - | --config -: does not exist
        train gpt-moe-test --config ~nosuchuser/x.yaml | there is no such user
        train gpt-moe-test --data.path '' | --data.path '': must not be empty
        train gpt-moe-test --train.run-dir file.txt | --train.run-dir file.txt: is a file
        train gpt-moe-test --train.run-dir ~nosuchuser/x | there is no such user
        train gpt-moe-test --train.init-from gone | run gone: does not exist
        generate gone hi | run gone: does not exist
        generate file.txt hi | run file.txt: is no folder
        generate model --input gone.txt | --input gone.txt: cannot be read
        generate model --input folder | --input folder: cannot be read (Is a directory)
        generate model --input file.txt --output folder | --output folder: is no regular file
        generate model --input file.txt --output file.txt | --output file.txt: is the file file.txt, which is read
        generate model --input file.txt --output nodir/x.jsonl | there is no folder nodir
        serve model --api-key-file folder | --api-key-file folder: cannot be read
        runs file.txt | file.txt: is no folder
        report gone | run gone: does not exist
        report model --page folder | --page folder: is no regular file
        export gone --output x.safetensors | gone: is no folder
        convert gone --to x | --from gone: is no folder
        plan nomodel --cluster h100x8 | plan nomodel: no recipe, run or config.json
        plan gpt-1.1t --cluster banana | --cluster banana: unknown device
    """,
    "options that do not fit together": """
        sweep gpt-moe-test --rates 1e-3 --optim.lr 3 | --optim.lr: has no effect in a sweep
        sweep gpt-moe-test --rates 1e-3 --dry-run | --dry-run: is for one run
        serve model --host 0.0.0.0 | --host 0.0.0.0: is reached by other machines
        plan gpt-1.1t --cluster h100x8 --batch 3 | --batch 3: is an option of inference; add --serve
        generate model hi --greedy --top-k 3 | --top-k 3: has no effect with --greedy
        generate model hi --eplb-step-interval 5 | has no effect without --enable-eplb
        bench serve localhost:8000 | must be http://HOST:PORT
    """,
}
"""Words, and a part of the message, by what is wrong."""
CASES = [
    tuple(part.strip() for part in line.rsplit(" | ", 1))
    for lines in WRONG.values()
    for line in lines.strip().splitlines()
    if line.split()[0] not in OF_FAMILIES - FAMILY_VERBS.keys()
]
LONGEST = 420
"""Characters of a line that a person reads."""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with a model, a file and files that are no YAML."""
    for name in ("model", "folder"):
        (tmp_path / name).mkdir()
    for name, text in {"model/config.json": "{}", "file.txt": "hi\n", "bad.yaml": "x: [\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "part"), CASES, ids=[words for words, _ in CASES])
def test_wrong_words_are_one_line(words, part, capsys):
    code = main(shlex.split(words))
    out, error = capsys.readouterr()
    assert (code, out) == (2, "") and part in error, (code, out, error)
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) <= LONGEST
    assert not [one for one in ("Errno", "Traceback", " None") if one in error]


def test_there_are_many():
    assert len(CASES) >= 130


SPELLINGS = [line.partition(": ")[::2] for line in Path(__file__).with_name("spellings.txt").read_text().splitlines()]
"""Verbs, and the options that they had when argparse read them."""


@pytest.mark.parametrize(
    ("verb", "flags"),
    [one for one in SPELLINGS if one[0] not in OF_FAMILIES - FAMILY_VERBS.keys()],
    ids=lambda one: one.partition(" ")[0],
)
def test_options_that_were_read_are_read(verb, flags):
    module = f"expertmesh.cli.{verb.replace(' ', '_')}"
    if verb in FAMILY_VERBS:
        module = FAMILY_VERBS[verb].run.partition(":")[0]
    (kind,) = (one for one in declared_by(module) if name_of(one) == verb)
    for flag in flags.split():
        words = [flag] if flag.startswith("--no-") else [f"{flag}=1"]
        assert parse.split_words(words, options_of(kind), verb=verb).flags, flag


@pytest.mark.parametrize("words", ["", "train", "train gpt-moe-test", "serve"])
def test_a_reader_that_leaves_is_no_error(words):
    command = f"{sys.executable} -m expertmesh {words} --help | head -c 20; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode in (0, 128 + signal.SIGPIPE) and done.stderr == ""
    assert len(done.stdout) == 20


def test_colours_are_not_used(capsys):
    assert main(["--help"]) == 0
    assert main(["--seed"]) == 2
    assert "\x1b" not in "".join(capsys.readouterr())
