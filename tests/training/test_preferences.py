"""Runs that learn preferences: their measures, whatever micro-batches and ranks; resumed to the bit; the best by
accuracy."""

import json
import math
import shutil

import pytest
import torch
import torch.distributed as dist
from tests.support.hub_text import hub_folder
from tests.support.killed import kill_after_a_checkpoint
from tests.support.runs import assert_same_lines, lines_of, train_quietly

from expertmesh.api import load
from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.main import main
from expertmesh.config.objective import LOSS_OPTIONS
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.costs import dominant_products, gpt_costs
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.reference import FILE

BASE = {
    "model.vocab_size": 300,
    "model.dim": 16,
    "model.max_seq_len": 48,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "model.moe.aux_loss_weight": 0.0,
    "data.seq_len": 48,
    "data.validation_fraction": 0.2,
    "objective.name": "dpo",
    "optim.warmup_steps": 1,
    "optim.lr": 3e-3,
    "train.steps": 4,
    "train.batch_size": 8,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.tensorboard": False,
}
MEASURES = (
    *("loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen"),
    *("logp_rejected", "entropy", "grad_norm", "tokens", "eval_loss", "eval_accuracy"),
    *("eval_margin", "eval_bits_per_byte"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    lines = [
        json.dumps({"prompt": f"say {n}", "chosen": f"well {n * n}", "rejected": "no " * (1 + n % 4)})
        for n in range(60)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


def config_of(folder, name, changes=()):
    places = {
        "data.path": str(folder / "pairs.jsonl"),
        "data.cache_dir": str(folder / "cache"),
        "train.run_dir": str(folder / name),
    }
    return RECIPES["gpt-moe-test"]().updated(BASE | places | dict(changes))


def run(folder, name, changes=()):
    """Train on the ranks there are; the lines of metrics.jsonl on the first of them."""
    train_quietly(config_of(folder, name, changes))
    leader = not dist.is_initialized() or dist.get_rank() == 0
    return lines_of(folder / name) if leader else None


WITH_SFT = {"objective.sft_weight": 0.5}
OBJECTIVES = {
    "sigmoid": WITH_SFT,
    "orpo": {"objective.loss": "orpo"},
}


@pytest.fixture(scope="module")
def whole(folder):
    """Lines of runs of one process whose batch is one micro-batch."""
    return {name: run(folder, name, changes) for name, changes in OBJECTIVES.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("objective", ["sigmoid", "orpo"])
def test_micro_batches_change_nothing(objective, size, whole, folder):
    changes = {**OBJECTIVES[objective], "train.micro_batch_size": size}
    found = run(folder, f"{objective}-{size}", changes)
    assert_same_lines(found, whole[objective], *MEASURES)


def test_ranks_change_nothing(whole, folder, two_ranks):
    changes = {**WITH_SFT, "train.micro_batch_size": 4}
    found, _ = two_ranks.run(run, folder, "ranks", changes)
    assert_same_lines(found, whole["sigmoid"], *MEASURES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distill.teacher": "runs/other"}, "distill.teacher=runs/other: teaches next tokens"),
        ({"train.best_by": "f1"}, "train.best_by=f1: is no measure of this run; known: loss, acc"),
        ({"data.column": "chosen"}, "data.column=chosen|learns from a pair of answers each"),
    ],
    ids=["teacher", "measure", "column"],
)
def test_options_that_do_not_fit_preferences(changes, said, folder):
    with pytest.raises(ConfigError, match=said) as error:
        run(folder, f"misfit-{len(said)}", changes)
    assert "\n" not in str(error.value)


def test_samples_are_answers_to_prompts_of_pairs(folder, base):
    more = ["--train.steps", "1", "--train.sample-every", "1"]
    assert main(words_of(folder, base, "sampled", *more)) == 0
    lines = (folder / "sampled" / "samples.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert prompts and all("say " in one and "well" not in one for one in prompts)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_first_step_is_the_reference(dtype, folder):
    """The policy is the reference, to the bit, in training and in the first evaluation."""
    changes = {"train.dtype": dtype, "train.steps": 1, "train.micro_batch_size": 4}
    (line,) = run(folder, f"first-{dtype}", changes)
    for prefix in ("", "initial_eval_"):
        assert line[f"{prefix}reward_chosen"] == line[f"{prefix}reward_rejected"] == 0
        assert line[f"{prefix}margin"] == line[f"{prefix}accuracy"] == 0
        exact = math.log(2)
        assert abs(line[f"{prefix}loss"] - exact) <= (0 if dtype == "float64" else 1e-7)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hub_folder(tmp_path_factory.mktemp("base") / "tiny")


def words_of(folder, base, name, *more):
    """Words that train the model of a folder on the pairs."""
    places = ["--train.run-dir", str(folder / name), "--data.cache-dir", str(folder / "cache")]
    of_run = ["--train.batch-size", "8", "--train.no-tensorboard", "--train.device", "cpu"]
    data = ["--objective.name", "dpo", "--data.path", str(folder / "pairs.jsonl")]
    return ["train", str(base), *data, *places, *of_run, *more]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_adapters_begin_at_the_reference(dtype, folder, base, capsys):
    more = ["--adapter.kind", "lora", "--train.dtype", dtype, "--train.steps", "3"]
    assert main(words_of(folder, base, f"lora-{dtype}", *more, "--optim.lr", "1e-2")) == 0
    first, *_, last = lines_of(folder / f"lora-{dtype}")
    for prefix in ("", "initial_eval_"):
        assert first[f"{prefix}reward_chosen"] == first[f"{prefix}reward_rejected"] == 0
        assert abs(first[f"{prefix}loss"] - math.log(2)) <= (0 if dtype == "float64" else 1e-7)
    assert last["loss"] < first["loss"] and first["aux_loss"] == 0
    final = f"validation: {last['eval_accuracy']:.4f} accuracy of preferences, 0.0000 before"
    assert final in capsys.readouterr().out


USUAL = {
    "all": ([], 1e-6, ("router",)),
    "adapters": (["--adapter.kind", "lora"], 1e-5, ()),
    "given": (["--optim.lr", "1e-3", "--train.freeze", "none"], 1e-3, ()),
}


@pytest.mark.parametrize("case", USUAL)
def test_what_is_usual_for_preferences(case, folder, base):
    more, rate, rests = USUAL[case]
    config = parse_run_config(words_of(folder, base, "unused", *more)[1:]).config
    assert (config.optim.lr, config.train.freeze) == (rate, rests)
    without = parse_run_config([str(base)]).config
    assert (without.optim.lr, without.train.freeze) == (2e-5, ())


def test_routers_rest_unless_they_are_freed(folder, base):
    """To the bit, without a balance loss; a micro-batch then changes no gradient."""
    for name, more, rests in (("resting", [], True), ("freed", ["--train.freeze", "none"], False)):
        steps = ["--train.steps", "2", "--optim.lr", "1e-2"]
        assert main(words_of(folder, base, name, *more, *steps)) == 0
        before, after = (load(path).model.state_dict() for path in (base, folder / name))
        routers = [one for one in before if ".router." in one]
        same = [torch.equal(before[one], after[one]) for one in routers]
        assert routers and all(same) is rests
        assert not torch.equal(before["output.weight"], after["output.weight"])
        assert (lines_of(folder / name)[0]["aux_loss"] == 0) is rests


def test_preferences_are_learned(folder):
    changes = {"train.steps": 12, "train.best_by": "accuracy", "train.patience": 99}
    lines = run(folder, "learned", changes)
    assert lines[-1]["eval_accuracy"] == 1.0 and lines[-1]["margin"] > 0.1
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_the_learned_tokens_are_counted(folder, whole):
    lines = whole["sigmoid"]
    tokens = [b["tokens"] - a["tokens"] for a, b in zip(lines, lines[1:], strict=False)]
    assert all(8 * 4 <= n <= 8 * 30 for n in tokens)


def test_a_resumed_run_has_the_same_lines(folder, whole):
    """From the checkpoint in the middle, with the scores of the reference from the run's folder."""
    again = folder / "resumed"
    shutil.copytree(folder / "sigmoid", again)
    for path in list_checkpoints(again / "checkpoints")[1:]:
        shutil.rmtree(path)
    scores = (again / FILE).read_bytes()
    changes = {**WITH_SFT, "train.run_dir": str(again), "train.resume": "required"}
    found = run(folder, "resumed", changes)
    assert found == whole["sigmoid"] and (again / FILE).read_bytes() == scores


@pytest.mark.parametrize("storage", ["int4", "nf4"])
def test_a_killed_run_with_adapters_on_a_packed_base_goes_on_to_the_bit(storage, folder, tmp_path):
    base = hub_folder(tmp_path / "base", hidden_size=32, moe_intermediate_size=32, head_dim=16)
    lora = ["--adapter.kind", "lora", "--adapter.rank", "4", "--base.storage", storage]
    more = ["--train.steps", "6", "--train.checkpoint-every", "2", "--base.group-size", "32"]
    more += [*lora, "--optim.lr", "1e-2", "--train.resume", "auto"]
    straight, killed = (words_of(folder, base, f"{storage}-{name}", *more) for name in ("straight", "killed"))
    assert main(straight) == 0
    kill_after_a_checkpoint(killed[1:], folder / f"{storage}-killed")
    assert main(killed) == 0
    found, expected = (lines_of(folder / f"{storage}-{name}") for name in ("killed", "straight"))
    assert found == expected and found[-1]["loss"] < found[0]["loss"]


SPOILT = {
    "missing": lambda path: path.unlink(),
    "damaged": lambda path: path.write_bytes(b"no zip"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
}


@pytest.mark.parametrize("how", SPOILT)
def test_scores_that_are_gone_are_one_line(how, folder, whole):
    again = folder / f"gone-{how}"
    shutil.copytree(folder / "sigmoid", again)
    SPOILT[how](again / FILE)
    with pytest.raises(ConfigError) as error:
        run(folder, again.name, {**WITH_SFT, "train.steps": 6, "train.resume": "required"})
    assert FILE in str(error.value) and "\n" not in str(error.value)


def test_another_objective_does_not_go_on(folder, whole):
    changes = {**WITH_SFT, "objective.beta": 0.2, "train.resume": "required", "train.steps": 6}
    with pytest.raises(ConfigError, match="objective.beta=0.2: the run in .* has None"):
        train_quietly(config_of(folder, "sigmoid", changes))


@pytest.mark.parametrize("loss", [name for name, row in LOSS_OPTIONS.items() if not row.has_reference])
def test_losses_without_a_reference_score_none(loss, folder):
    run(folder, f"free-{loss}", {"objective.loss": loss, "train.steps": 1})
    assert not (folder / f"free-{loss}" / FILE).exists()


@pytest.mark.parametrize("more", [{}, {"objective.loss": "orpo"}], ids=["sigmoid", "orpo"])
def test_packed_rows_have_the_loss_of_their_pairs(more, folder):
    """A batch of all pairs, in as many rows as they need: the same loss, measures and gradient."""
    plain = config_of(folder, "unused", {"data.seq_len": 48, **more})
    data = plain_data(plain)
    sizes = {False: data.num_training}
    sizes[True] = plain_data(plain.updated({"data.pack": True})).num_training
    assert sizes[True] < sizes[False]
    lines = {
        pack: run(
            folder,
            f"packed-{pack}-{len(more)}",
            {**more, "data.pack": pack, "train.batch_size": size, "train.steps": 1},
        )
        for pack, size in sizes.items()
    }
    assert_same_lines(lines[True], lines[False], *MEASURES)


def plain_data(config):
    return GPT.open_task(config).prepare()


def test_options_of_training_alone_are_told(folder, caplog):
    changes = {"model.moe.router_noise": "gumbel", "model.moe.capacity_factor": 1.0}
    plain_data(config_of(folder, "unused", changes))
    (said,) = (one.message for one in caplog.records if "without effect" in one.message)
    assert "router_noise=gumbel" in said and "capacity_factor=1.0" in said and "\n" not in said
    caplog.clear()
    plain_data(config_of(folder, "unused"))
    assert not any("without effect" in one.message for one in caplog.records)


def test_a_pair_costs_two_sequences(folder):
    pairs = config_of(folder, "unused", {"train.micro_batch_size": 4})
    texts = pairs.updated({"objective.name": "lm", "train.batch_size": 16, "train.micro_batch_size": 8})
    found, expected = (gpt_costs(one, num_ranks=1, dtype="float32") for one in (pairs, texts))
    assert found == expected
    assert dominant_products(pairs) == dominant_products(texts)


def test_the_report_of_a_run(folder, whole, capsys):
    assert main(["report", str(folder / "sigmoid"), "--samples", "0"]) == 0
    said = capsys.readouterr().out
    final = whole["sigmoid"][-1]["eval_accuracy"]
    assert "validation accuracy of preferences" in said and f"{final:.4f}" in said
