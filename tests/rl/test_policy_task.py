"""GRPO inside `train`: rollouts of the trainer's own weights, compared to the bit, rewarded, and learned."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.oracle.numerics import relative_error
from tests.support.killed import kill_after_a_checkpoint
from tests.support.runs import RELATIVE, assert_same_lines, lines_of, train_quietly

import expertmesh as em
from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.start_training import parse_and_begin
from expertmesh.cli.train import run as train_verb
from expertmesh.errors import ConfigError, PeerError
from expertmesh.models.gpt.family import GPT
from expertmesh.rl.policy_task import PolicyTask
from expertmesh.rl.rollouts import seed_of_row
from expertmesh.runs.run_dir import RunDir

COMPARED = ("grad_norm", "reward", "length", "entropy", "clipped")


def words_of(options, more=""):
    """Words of `train`: options, some of them changed by a text of names and values."""
    words = more.split() if isinstance(more, str) else more
    changed = {**options, **dict(zip(words[::2], words[1::2], strict=True))}
    named = (word for name, value in changed.items() if name for word in (f"--{name}", value))
    return [changed[""], *named]


def trained(options, more="", *, name="run"):
    """Lines of metrics of a run."""
    folder = f"{options['train.run-dir']}-{name}"
    assert train_verb(words_of({**options, "train.run-dir": folder}, more)) == 0
    return lines_of(folder)


def test_a_run_samples_rewards_and_learns(options, rewards, base, tmp_path, capsys):
    functions = f"{rewards}:early,{rewards}:long:0.5"
    lines = trained(options, f"reward.functions {functions} train.sample-every 2")
    assert "validation: " in capsys.readouterr().out
    for line in lines:
        assert line["mismatch_max"] == 0 and line["mismatch_k3"] == 0
        assert line["aux_loss"] == line["z_loss"] == 0 and line["clipped"] == 0
        expected = line["reward_early"] + 0.5 * line["reward_long"] / 2
        assert 0 < line["reward"] < 1.5 and abs(line["reward"] - expected) < 0.5
        assert 1 <= line["length"] <= 6 and line["entropy"] > 4 and line["seen"] == 12
    assert lines[-1]["eval_loss"] == -lines[-1]["eval_reward"]
    config, _ = RunDir(tmp_path / "run-run").read_config()
    assert config.model.batch_invariant and config.train.freeze == ("router",)
    before, after = (em.load(folder).model.state_dict() for folder in (base, tmp_path / "run-run"))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved and not any("router" in name for name in moved)
    samples = [json.loads(line) for line in (tmp_path / "run-run/samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in samples] == [2] * 3 + [4] * 3
    assert len({one["prompt"] for one in samples}) == 2 and "early" in samples[0]


def test_prompts_of_a_step_draw_independently():
    seeds = {seed_of_row(seed, step, row) for seed in (0, 1) for step in (0, 1) for row in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_micro_batches_and_their_size_change_nothing(average, options):
    """A group stays together, and averages are those of the step."""
    more = f"train.dtype float64 rl.average {average} train.steps 2 train.micro-batch-size"
    found = [trained(options, f"{more} {size}", name=str(size)) for size in (1, 2, 4)]
    for lines in found[1:]:
        assert_same_lines(lines, found[0], *COMPARED)
        for line, oracle in zip(lines, found[0], strict=True):  # near 0, as ratios are 1
            assert abs(line["loss"] - oracle["loss"]) < RELATIVE


def test_several_updates_use_the_answers_once_each(options):
    """The first is compared to the bit; ratios move in the second."""
    lines = trained(options, "rl.updates 2 optim.lr 0.05 rl.clip-low 0.01")
    assert all(line["mismatch_max"] == 0 for line in lines)
    assert any(line["clipped"] > 0 for line in lines)


REFERENCES = {
    "a copy": "train.freeze none",
    "without adapters": "adapter.kind lora adapter.rank 4",
    "of a quantised base": "adapter.kind lora adapter.rank 4 base.storage int8",
}


@pytest.mark.parametrize("form", REFERENCES)
def test_the_divergence_to_the_beginning_is_added_to_the_loss(form, options):
    """Its first gradient is 0, so that both runs draw the same answers in the second step."""
    more = f"train.dtype float64 train.steps 2 optim.lr 1e-2 {REFERENCES[form]}"
    plain, held = (trained(options, f"{more} rl.kl-beta {beta}", name=str(beta)) for beta in (0, 0.5))
    assert held[0]["kl"] == 0 and held[1]["kl"] > 0 and "kl" not in plain[0]
    assert held[0]["loss"] == plain[0]["loss"] and held[1]["reward"] == plain[1]["reward"]
    assert abs(held[1]["loss"] - plain[1]["loss"] - 0.5 * held[1]["kl"]) < RELATIVE
    assert held[1]["grad_norm"] != plain[1]["grad_norm"]


def test_the_entropy_is_taken_from_the_loss(options):
    more = "train.dtype float64 train.steps 1 rl.entropy-coef"
    plain, held = (trained(options, f"{more} {c}", name=str(c))[0] for c in (0, 0.1))
    assert abs(held["loss"] - plain["loss"] + 0.1 * plain["entropy"]) < RELATIVE
    assert held["grad_norm"] != plain["grad_norm"]


def option_sets():
    """Rows of the table of docs/rl.md, and some more."""
    text = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    table = text.split("\n## Objectives\n")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(rows) == 7
    more = {"dual clip": "--rl.dual-clip 3 --rl.scale batch --train.freeze none"}
    return {**dict(rows), **more}


OPTION_SETS = option_sets()


@pytest.mark.parametrize("name", OPTION_SETS)
def test_the_sets_of_options_of_the_literature(name, options):
    given = {name: value for name, value in options.items() if name != "rl.max-tokens"}
    words = [*OPTION_SETS[name].split(), "--rl.max-tokens", "6"]
    assert train_verb([*words_of(given, "train.steps 2"), *words]) == 0
    lines = lines_of(options["train.run-dir"])
    assert all(math.isfinite(line["loss"]) and line["mismatch_max"] == 0 for line in lines)


def test_without_exact_arithmetic_the_mismatch_is_measured(options):
    """BF16: replayed experts leave at most rounding, free routers more, if any; corrections bound its weight."""
    more = "rl.exact false train.dtype bfloat16 train.steps 2"
    free = f"{more} rl.replay-routing false"
    replayed = trained(options, more, name="replayed")
    cases = {
        "free": free,
        "truncated": f"{free} rl.correction token_truncate rl.correction-cap 1.01",
        "masked": f"{free} rl.correction sequence_mask rl.correction-cap 1.0001",
    }
    found = {name: trained(options, case, name=name) for name, case in cases.items()}
    first = {name: lines[0] for name, lines in found.items()}
    gap = first["free"]["mismatch_max"]
    assert 0 <= replayed[0]["mismatch_max"] <= gap == first["masked"]["mismatch_max"]
    assert (gap > 0) == (first["free"]["mismatch_k3"] > 0)
    norms = {name: line["grad_norm"] for name, line in first.items()}
    if gap == 0:  # with AMX's tiles the engine has the bits of training in a model as small as this
        assert norms["masked"] == norms["free"] == norms["truncated"]
    else:
        assert norms["masked"] < norms["free"] and norms["truncated"] != norms["free"]


def test_a_bfloat16_run_is_exact(options):
    lines = trained(options, "train.dtype bfloat16 train.steps 2")
    assert all(line["mismatch_max"] == 0 for line in lines)


def test_a_difference_stops_the_run(options):
    """A rollout of other weights: the answer and the size are named."""

    class Elsewhere(PolicyTask):
        def _rolled_out(self, model, prompts, seeds):
            first = next(iter(model.parameters()))
            saved = first.detach().clone()
            first.data.mul_(1.5)
            try:
                return super()._rolled_out(model, prompts, seeds)
            finally:
                first.data.copy_(saved)

    config = parse_and_begin(words_of(options)).config
    with pytest.raises(ConfigError) as error:
        train_quietly(config, family=replace(GPT, task=Elsewhere))
    said = str(error.value)
    assert "tokens have other log-probabilities in training than in rollouts" in said
    assert "rl.exact=False" in said and "\n" not in said


KILLED = {
    "all weights": "",
    "adapters on a packed base": "adapter.kind lora adapter.rank 4 base.storage int8 optim.lr 1e-2",
    "with a reference": "rl.kl-beta 0.1 optim.lr 1e-2",
}


# a run with a reference keeps all weights, too
FORMS = [pytest.param(form, marks=pytest.mark.exhaustive if form == "all weights" else ()) for form in KILLED]


@pytest.mark.parametrize("form", FORMS)
def test_a_killed_run_goes_on_to_the_bit(form, options):
    straight = trained(options, f"train.steps 6 {KILLED[form]}", name="straight")
    folder = Path(f"{options['train.run-dir']}-killed")
    more = f"train.run-dir {folder} train.steps 6 train.resume auto {KILLED[form]}"
    words = words_of(options, more)
    kill_after_a_checkpoint(words, folder)
    assert train_verb(words) == 0
    assert lines_of(folder) == straight


MISTAKES = {
    "no reward": ("reward.functions none", "reward.functions"),
    "an idle option": ("objective.name sft", "rl.group=3: has no effect without"),
    "updates": ("rl.updates 3", "rl.updates=3: must divide train.batch_size, 4"),
    "tensor parallel": (
        "parallel.tp-degree 2",
        "parallel.tp_degree=2: adds parts of products over ranks",
    ),
    "packs": ("data.pack true", "data.pack=True: has no effect with"),
    "routers of adapters": (
        "adapter.kind lora adapter.learn-routers true rl.kl-beta 0.1",
        "rl.kl_beta=0.1: has the model without its adapters as reference",
    ),
    "a group of one": ("rl.group 1", "rl.group='1': must be at least 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_before_work_starts(mistake, options):
    more, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        parse_and_begin(words_of(options, more))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_is_no_trained_model(options):
    with pytest.raises(ConfigError, match="train.init_from.*must be a trained model"):
        parse_run_config(words_of({**options, "": "gpt-moe-test"}))


LATER = {
    "no room": ("rl.max-tokens 500", "rl.max_tokens=500: leaves no room for a prompt"),
    "a long prompt": ({"prompt": "x" * 300}, "leaves room for"),
    "a column of another name": (
        "reward.functions exact data.path {}/unnamed.jsonl",
        "exact needs a column 'answer', and the data's are: label; name one so",
    ),
    "a column that is hidden": ({"prompt": "x", "completions": 3}, "has a column 'completions'"),
    "no prompt": ({"question": "x"}, "'prompt'"),
    "an answer": (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "a list of messages",
    ),
}


@pytest.mark.parametrize("mistake", LATER)
def test_mistakes_of_data_are_one_line(mistake, options, tmp_path):
    given, said = LATER[mistake]
    more = given if isinstance(given, dict) else given.format(tmp_path)
    lines = [json.dumps({"prompt": f"{n}", "label": n}) for n in range(30)]
    (tmp_path / "unnamed.jsonl").write_text("\n".join(lines))
    if isinstance(given, dict):
        path = tmp_path / "other.jsonl"
        lines = [{"prompt": f"{n}"} for n in range(30)] + [given]
        path.write_text("\n".join(map(json.dumps, lines)))
        more = f"data.path {path}"
    with pytest.raises(ConfigError) as error:
        trained(options, more)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_conversations_are_rewarded_as_messages(options, tmp_path):
    """Prompts of messages, in the chat format; completions are messages of the assistant."""
    lines = [
        {
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "system": "be brief",
            "label": n % 2 == 0,
        }
        for n in range(30)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "r.py").write_text(
        "def seen(prompts, completions, label):\n"
        "    assert all(one[0]['role'] == 'user' for one in prompts)\n"
        "    assert all(one[0].keys() == {'role', 'content'} for one in completions)\n"
        "    return [float(good) + len(one[0]['content']) for good, one in zip(label, completions)]\n"
    )
    more = f"data.path {tmp_path}/talks.jsonl reward.functions {tmp_path}/own/r.py:seen"
    lines = trained(options, f"{more} data.completions chat train.steps 1")
    assert lines[0]["reward"] > 0 and relative_error(lines[0]["mismatch_max"], 0.0) < RELATIVE


def on_rank(words):
    """On every rank."""
    assert train_verb(words) == 0


LAYOUTS = {
    "experts on other ranks": ("parallel.ep-degree 2", ""),
    "gathered weights": ("parallel.ep-degree 1 parallel.zero-stage 2", ""),
    "adapters": ("parallel.ep-degree 2", "adapter.kind lora adapter.rank 4"),
    "a reference": ("parallel.ep-degree 2", "rl.kl-beta 0.1 optim.lr 1e-2"),
    "adapters and their reference": (
        "parallel.es-degree 2 parallel.route-degree 1",
        "rl.kl-beta 0.1 adapter.kind lora adapter.rank 4 optim.lr 1e-2",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_learn_what_one_does(layout, options, two_ranks):
    """Each samples its own prompts; rollouts and training are compared to the bit there, too."""
    degrees, learns = LAYOUTS[layout]
    more = f"train.dtype float64 train.steps 2 {learns}"
    expected = trained(options, more)
    folder = f"{options['train.run-dir']}-two"
    words = words_of({**options, "train.run-dir": folder}, f"{more} {degrees}")
    two_ranks.run(on_rank, words)
    found = lines_of(folder)
    kl = ("kl",) if "kl-beta" in learns else ()
    assert_same_lines(found, expected, *COMPARED, *kl, "eval_reward")
    assert not kl or found[-1]["kl"] > 0
    assert all(line["mismatch_max"] == 0 for line in found)


def said_on_rank(words):
    """The error, on every rank."""
    with pytest.raises((ConfigError, PeerError)) as error:
        train_quietly(parse_and_begin(words).config)
    return str(error.value)


def test_slices_of_experts_are_refused_before_a_rollout(options, two_ranks):
    said, _ = two_ranks.run(said_on_rank, words_of(options, "parallel.es-degree 2"))
    assert said.startswith("parallel.es_degree=2: adds parts") and "\n" not in said


def test_rewards_without_a_difference_are_told_once(options, tmp_path, caplog):
    path = tmp_path / "same.py"
    path.write_text("def one(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    trained(options, f"reward.functions {path}:one train.steps 21", name="same")
    trained(options, "train.steps 3", name="other")
    told = [r.getMessage() for r in caplog.records if "had equal rewards in 20 steps" in r.getMessage()]
    assert len(told) == 1 and "rl.group" in told[0] and "\n" not in told[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_exact(dtype, options):
    """Factors alone learn; the engine samples with them."""
    more = f"adapter.kind lora adapter.rank 4 optim.lr 1e-2 train.dtype {dtype}"
    lines = trained(options, more)
    assert all(line["mismatch_max"] == 0 and line["grad_norm"] > 0 for line in lines)
    assert lines[0]["entropy"] != lines[-1]["entropy"]
