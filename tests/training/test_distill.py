"""Mixture-of-Students: what a teacher adds to the loss and when, on one process and on two; mistakes are one line."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import FP64_RELATIVE, assert_two_times, relative_error
from tests.support.calls import calls_of
from tests.support.older_runs import as_older
from tests.support.runs import lines_of, train_quietly

from expertmesh.cli.train import describe
from expertmesh.config.run import DistillConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.token_losses import DistillTargets, token_losses
from expertmesh.parallel.experts.adaptive import adapt
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import resolve_precision
from expertmesh.text.tokenizer import with_start
from expertmesh.training.init_from import save_as_run
from expertmesh.training.teacher import open_teacher, teacher_bytes, teacher_dtype

RELATIVE = 1e-9


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_divergence_equals_pytorchs(overwrite):
    """beta T^2 KL(teacher || student) beside the cross-entropy: losses and gradient."""
    beta, temperature = 0.7, 2.5
    logits = 3 * torch.randn(2, 9, 33)
    taught = 3 * torch.randn(2, 9, 33)
    targets = torch.randint(33, (2, 9))
    grad = torch.rand(18)

    def plain(x):
        ours, theirs = ((z.to(x.dtype).flatten(0, 1) / temperature).log_softmax(-1) for z in (x, taught))
        divergence = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
        losses = F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="none")
        return losses + beta * temperature**2 * divergence

    def ours(x):
        distill = DistillTargets(taught, beta, temperature)
        return token_losses(x.clone(), targets, distill=distill, overwrite_logits=overwrite)

    results = []
    for function, dtype in ((ours, None), (plain, None), (plain, torch.float64)):
        x = logits.to(dtype or logits.dtype).requires_grad_()
        losses = function(x)
        (gradient,) = torch.autograd.grad(losses, x, grad.to(losses.dtype))
        results.append((losses.detach(), gradient))
    for what, *three in zip(("losses", "gradient"), *results, strict=True):
        assert_two_times(*three, what=what)


def test_the_weight_follows_the_schedule():
    stop = DistillConfig(teacher="x", beta=2.0, until=0.7)
    assert [stop.weight(step, total_steps=10) for step in (0, 6, 7, 9)] == [2.0, 2.0, 0.0, 0.0]
    line = DistillConfig(teacher="x", beta=2.0, until=0.8, decay="linear")
    assert [line.weight(step, total_steps=10) for step in (0, 4, 8)] == [2.0, 1.0, 0.0]
    assert DistillConfig().weight(0, total_steps=10) == 0.0


STUDENT = {
    "model.num_layers": 3,
    "model.moe_every": 1,
    "model.moe.num_experts": (4,),
    "model.moe.residual": True,
    "train.dtype": "float64",
    "train.steps": 6,
    "train.eval_every": 6,
    "train.checkpoint_every": 6,
}
TEACHER = STUDENT | {"model.num_layers": 4, "model.moe.num_experts": (4, 4, 4, 8)}


def run(config):
    train_quietly(config)
    return lines_of(config.train.run_dir)


@pytest.fixture(scope="module")
def teacher(tiny_in, tmp_path_factory):
    config = tiny_in(tmp_path_factory.mktemp("teacher"), **TEACHER, **{"optim.lr": 1e-2})
    run(config)
    return config


def test_a_copy_of_the_teacher_has_nothing_to_learn_from_it(tiny, tmp_path, teacher):
    """So its first loss does not depend on beta, its second one does; it starts where the teacher ended."""
    losses = []
    for beta in (1.0, 50.0):
        changes = TEACHER | {
            "train.run_dir": str(tmp_path / f"copy-{beta}"),
            "distill.teacher": teacher.train.run_dir,
            "distill.beta": beta,
            "distill.init_from_teacher": True,
        }
        losses.append(run(tiny(**changes)))
    ended = lines_of(teacher.train.run_dir)[-1]["eval_loss"]
    assert relative_error(losses[0][0]["initial_eval_loss"], ended) <= FP64_RELATIVE
    assert relative_error(losses[0][0]["loss"], losses[1][0]["loss"]) <= FP64_RELATIVE
    assert relative_error(losses[0][1]["loss"], losses[1][1]["loss"]) > RELATIVE


@pytest.mark.parametrize("moe", [{"router": "hash"}, {"bias_update_rate": 0.1}], ids=str)
def test_a_teacher_has_the_compute_type_and_a_student_its_unrounded_weights(tiny, tmp_path, moe):
    """The key of a hash and a balancing bias are the teacher's, too: they say who its experts are."""
    options = {f"model.moe.{name}": value for name, value in moe.items()}
    config = tiny(**options, **{"train.run_dir": str(tmp_path / "teacher")})
    theirs = GPTTask(config).builder.build(device="cpu", dtype=torch.float32)
    for layer in theirs.layers:
        if layer.moe.expert_bias_E is not None:
            layer.moe.expert_bias_E.normal_()
    (tmp_path / "tokenizer.json").write_text("{}")
    files = {"tokenizer.json": tmp_path / "tokenizer.json"}
    save_as_run(theirs, config, recipe="test", files=files)
    changes = {"distill.teacher": config.train.run_dir, "distill.init_from_teacher": True}
    task = GPTTask(config.updated({**changes, "train.seed": 7, "train.dtype": "bfloat16"}))
    student = task.builder.build(device="cpu", dtype=torch.float32)
    teacher = open_teacher(
        GPT,
        task,
        SimpleNamespace(files=files),
        precision=resolve_precision(task.config.train),
        ranks=Ranks(),
        student=student,
    )
    for name, parameter in teacher.named_parameters():
        expected = torch.float32 if "router" in name else torch.bfloat16
        assert parameter.dtype == expected, name
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(student.state_dict()[name], tensor), name
    at_rest = sum(p.numel() * 2 for p in teacher.parameters())
    told = teacher_bytes(task.config, GPT, num_ranks=1, compute_dtype=torch.bfloat16)
    assert told == at_rest
    assert teacher_dtype(torch.float16) == torch.float32  # sums over layers leave FP16's range
    assert f"teacher     {told / 1024:.1f} KiB" in describe(task.config, GPT, recipe="test")


def student_run(config):
    lines = run(config)
    return [{k: line[k] for k in ("loss", "grad_norm", "aux_loss")} for line in lines]


def test_a_student_on_two_ranks_learns_what_it_learns_on_one(tiny, tmp_path, teacher, two_ranks):
    """Staged: three of six steps listen. Silent steps have the loss of the data alone."""

    def student(name, **changes):
        taught = {"distill.teacher": teacher.train.run_dir, "distill.until": 0.5}
        return tiny(**STUDENT | taught | changes, **{"train.run_dir": str(tmp_path / name)})

    alone = student_run(student("alone"))
    together = two_ranks.run(student_run, student("together"))[0]
    for line, oracle in zip(together, alone, strict=True):
        for name, value in oracle.items():
            assert relative_error(line[name], value) <= RELATIVE, name
    untaught = student_run(student("untaught", **{"distill.teacher": None, "distill.until": 1.0}))
    assert alone[0]["loss"] > untaught[0]["loss"], "the divergence is not zero"
    whole = student_run(student("whole", **{"distill.until": 1.0}))
    assert whole[:3] == alone[:3] and whole[3]["loss"] > alone[3]["loss"]
    copied = student_run(student("copied", **{"distill.init_from_teacher": True}))
    assert copied[0]["loss"] != alone[0]["loss"]


def memory_that_is_taken(config):
    """What each call of `adapt` counts as taken."""
    with calls_of(adapt) as calls:
        train_quietly(config)
    return [variables["resting_bytes"] for variables, _ in calls]


def test_who_chooses_how_tokens_travel_counts_the_teacher(tiny, tmp_path, teacher, two_ranks):
    def student(name, **changes):
        places = {
            "train.run_dir": str(tmp_path / name),
            "train.steps": 2,
            "parallel.adaptive": True,
        }
        return tiny(**STUDENT | places | changes)

    taught = student("taught", **{"distill.teacher": teacher.train.run_dir})
    (alone,) = two_ranks.run(memory_that_is_taken, student("alone"))[0]
    ours, theirs = two_ranks.run(memory_that_is_taken, taught)[0]
    needed = teacher_bytes(taught, GPT, num_ranks=2, compute_dtype=torch.float64)
    assert ours - alone == needed > 0


def test_a_teacher_is_the_same_however_its_folder_is_written(tiny, tmp_path, teacher, monkeypatch):
    path = Path(teacher.train.run_dir)
    places = {"train.run_dir": str(tmp_path / "student"), "train.resume": "auto"}
    run(tiny(**STUDENT | places | {"distill.teacher": str(path), "train.steps": 2}))
    monkeypatch.chdir(path.parent)
    (tmp_path / "link").symlink_to(path)
    for steps, name in enumerate((path.name, f"{path}/", f"../{path.parent.name}/{path.name}", "link"), 3):
        name = str(tmp_path / name) if name == "link" else name
        taught = {"distill.teacher": name, "train.steps": steps}
        assert len(run(tiny(**STUDENT | places | taught))) == steps
    shutil.copytree(path, tmp_path / "other")
    taught = {"distill.teacher": str(tmp_path / "other"), "train.steps": 7}
    with pytest.raises(ConfigError, match="distill.teacher=.*other: the run in .* has .*link; use"):
        run(tiny(**STUDENT | places | taught))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"distill.teacher": "nowhere"}, "run nowhere: does not exist"),
        ({"model.vocab_size": 310}, "has a vocabulary of 300 and model.vocab_size=310"),
        ({"data.max_bytes": 20_000}, "has another tokenizer.json"),
        ({"distill.init_from_teacher": True, "model.dim": 16}, r"no layer of the shapes of layers\.0"),
    ],
)  # fmt: skip
def test_a_wrong_teacher_is_one_line(tiny, tmp_path, teacher, changes, words):
    taught = {"distill.teacher": teacher.train.run_dir, "train.run_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=words) as error:
        run(tiny(**STUDENT | taught | changes))
    assert "\n" not in str(error.value)


def test_a_teacher_may_come_back_from_the_hub(tiny, tmp_path, teacher):
    """Its tokenizer puts the run's start before a text itself, which changes no token of the data."""
    back = tmp_path / "back"
    shutil.copytree(teacher.train.run_dir, back, ignore=shutil.ignore_patterns("lock"))
    made = with_start(back / "tokenizer.json", (0,))
    assert made is not None
    (back / "tokenizer.json").write_text(made)
    as_older(back)
    taught = {"distill.teacher": str(back), "train.run_dir": str(tmp_path / "run")}
    assert len(run(tiny(**STUDENT | taught | {"train.steps": 2}))) == 2
    (back / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="has another tokenizer.json"):
        run(tiny(**STUDENT | taught | {"train.run_dir": str(tmp_path / "more")}))


def test_weights_come_from_one_place():
    taught = {"distill.teacher": "x", "distill.init_from_teacher": True, "optim.schedule": "wsd"}
    for name in ("init_from", "branch_from"):
        with pytest.raises(ConfigError, match=f"conflicts with train.{name}"):
            RECIPES["gpt-moe-test"]().updated({**taught, f"train.{name}": "y"})


def test_options_without_a_teacher_are_refused():
    with pytest.raises(ConfigError, match="beta=2.0: has no effect without a teacher"):
        DistillConfig(beta=2.0)


@pytest.mark.parametrize("size", ["350m", "1.3b"])
def test_published_students_keep_the_top_of_the_pyramid(size):
    """24 -> 21 layers, 12 -> 10 MoE layers, taught for 400,000 of 572,000 steps."""
    student, teacher = (RECIPES[f"gpt-{size}-{kind}"]() for kind in ("mos", "prmoe"))
    counts = [n for n in student.model.experts_per_layer() if n]
    assert counts == list(teacher.model.moe.num_experts[2:])
    assert student.model.num_layers == 21 and student.distill.until == 0.7
    assert student.distill.teacher == teacher.train.run_dir
