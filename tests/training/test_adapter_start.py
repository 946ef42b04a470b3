"""`adapter.init_from`: a run goes on with loaded adapters, whose logits are those of its step 0."""

import json

import pytest
import torch
from tests.support.adapters import make_adapter
from tests.support.hub_text import chats_file, hub_folder
from tests.support.runs import assert_same_lines, lines_of, train_quietly

import expertmesh as em
from expertmesh import lora
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.merged_adapters import read_factor_pairs
from expertmesh.checkpoints.source import read_into
from expertmesh.cli.main import main
from expertmesh.cli.start_training import parse_and_begin
from expertmesh.engine.request_adapters import Adapters
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.run_adapters import adapt
from expertmesh.runs.run_dir import find_model, load_run
from expertmesh.runs.started_adapters import StartedFactors

IDS = torch.arange(24).view(1, 24)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, conversations, pairs, a run with adapters of rank 2 on attention and experts, and its folder of peft."""
    folder = tmp_path_factory.mktemp("start")
    hub_folder(folder / "tiny")
    chats_file(folder / "chats.jsonl")
    pairs = [{"prompt": f"say {n}", "chosen": f"well {n}", "rejected": "no"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "rewards.py").write_text("def one(completions, **more):\n    return [0.5] * len(completions)\n")
    sft = words_of(folder, "sft", **RANK_2, **{"--optim.lr": "1e-2"})
    assert main(["train", *sft]) == 0
    to = ["--to", str(folder / "peft"), "--adapter-only"]
    assert main(["convert", "--from", str(folder / "sft"), *to]) == 0
    return folder


RANK_2 = {"--adapter.rank": "2", "--adapter.expert-rank": "2", "--adapter.alpha": "4"}
LARGER = {"--adapter.rank": "5", "--adapter.expert-rank": "3", "--adapter.alpha": "7"}


def words_of(place, run, **options):
    usual = {
        "--train.run-dir": f"{place}/{run}",
        "--data.cache-dir": f"{place}/cache",
        "--data.path": f"{place}/chats.jsonl",
        "--train.batch-size": "8",
        "--train.steps": "3",
        "--train.device": "cpu",
        "--adapter.kind": "lora",
        "--adapter.targets": "attention experts",
    }
    base = options.pop("base", f"{place}/tiny")
    pairs = ((name, value) for name, value in {**usual, **options}.items() if value is not None)
    words = [word for name, value in pairs for word in (name, *value.split(" "))]
    return [base, "--train.no-tensorboard", *words]


def begun(place, start, **options):
    """The model of a run at step 0."""
    options = {**LARGER, "--adapter.init-from": str(start), **options}
    config = parse_and_begin(words_of(place, "unused", **options)).config
    base = find_model(place / "tiny")
    model = em.load(place / "tiny").model
    adapt(model, config, dtype=torch.float32)
    targets = {n: t for n, t in model.state_dict().items() if ".adapters." in n}
    read_into(StartedFactors(config, base), targets)
    return model.eval()


def served_logits(place, folder):
    """Logits of the base with the folder's adapters, as the engine adds them."""
    model = em.load(place / "tiny").model.eval()
    adapters = Adapters(model, torch.float32)
    root = adapters.load("one", folder).root
    with torch.no_grad(), adapters.on(adapters.runs([(IDS.numel(), root)])):
        return model(IDS).logits_BSV


STARTS = {
    "a run": (lambda place: (place / "sft", place / "peft"), {}),
    "a run, same rank": (lambda place: (place / "sft", place / "peft"), RANK_2),
    "a run, more targets": (
        lambda place: (place / "sft", place / "peft"),
        {"--adapter.targets": "attention experts head"},
    ),
    "a run, rsLoRA": (
        lambda place: (place / "sft", place / "peft"),
        {"--adapter.rslora": "true"},
    ),
    "our folder of peft": (lambda place: (place / "peft", place / "peft"), {}),
    "a folder of peft": (
        lambda place: (place / "theirs", place / "theirs"),
        {"--adapter.rank": "6"},  # of three first factors for queries, keys and values
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_logits_of_step_0_are_those_of_the_served_adapters(name, place):
    if not (place / "theirs").exists():
        make_adapter(place / "theirs", find_model(place / "tiny").config.model, seed=1)
    paths, options = STARTS[name]
    start, served = paths(place)
    model = begun(place, start, **options)
    with torch.no_grad():
        found = model(IDS).logits_BSV
        expected = served_logits(place, served)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        lora.remove(model)
        assert (model(IDS).logits_BSV - expected).abs().max() > 1e-3
    for one in lora.adapters(begun(place, start, **options)).values():
        assert one.a.abs().amin(-1).max() > 0, "new directions have an A to learn with"


def test_preferences_go_on_with_the_adapters_of_the_conversations(place, capsys):
    """SFT -> DPO on the SFT's adapters: the reference is the model at step 0, and one folder of adapters is the
    result."""
    options = {"--adapter.init-from": str(place / "sft"), "--data.path": f"{place}/pairs.jsonl"}
    more = {"--objective.name": "dpo", "--train.dtype": "float64", **RANK_2, **options}
    assert main(["train", *words_of(place, "dpo", **more)]) == 0
    first, *_, last = lines_of(place / "dpo")
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=1e-15)
    assert first["reward_chosen"] == first["reward_rejected"] == 0
    assert last["loss"] < first["loss"]
    before, after = (
        read_factor_pairs(Checkpoint(load_run(place / run).checkpoint, prefix="model.")) for run in ("sft", "dpo")
    )
    assert before.keys() == after.keys()
    for name, (a, b) in before.items():
        moved = (after[name][1] - b).abs().max()
        assert 0 < moved < b.abs().max() and after[name][0].shape == a.shape
    whole = ["--to", str(place / "after"), "--adapter-only"]
    assert main(["convert", "--from", str(place / "dpo"), *whole]) == 0


def run_training(place, run, steps, **options):
    own = {**LARGER, "--adapter.init-from": str(place / "sft"), "--train.steps": str(steps)}
    words = words_of(place, run, **{**own, "--optim.schedule-steps": "4", **options})
    train_quietly(parse_and_begin(words).config)
    return lines_of(place / run)


def test_ranks_begin_with_the_same_factors_and_a_resumed_run_with_its_own(place, two_ranks):
    fp64 = {"--train.dtype": "float64"}
    one = run_training(place, "one", 4, **fp64)
    assert_same_lines(two_ranks.run(run_training, place, "two", 4, **fp64)[0], one, "loss", "grad_norm")
    run_training(place, "broken", 2, **fp64)
    (place / "sft").rename(place / "away")
    try:
        found = run_training(place, "broken", 4, **fp64, **{"--train.resume": "required"})
    finally:
        (place / "away").rename(place / "sft")
    assert [(r["loss"], r["grad_norm"]) for r in found] == [(r["loss"], r["grad_norm"]) for r in one]


MISTAKES = {
    "a lower rank": (
        {"--adapter.rank": "1", "--adapter.expert-rank": "2"},
        "adapter.rank=1: is below 2, the rank of",
    ),
    "a lower rank of experts": (
        {"--adapter.expert-rank": "1"},
        "adapter.expert_rank=1: is below 2, the rank of",
    ),
    "fewer targets": (
        {"--adapter.targets": "attention", "--adapter.expert-rank": None},
        "has an adapter on layers.0.moe.experts.w_in, which is none of adapter.targets=attention; add",
    ),
    "one for all experts": (
        {"--adapter.shared": "true"},
        "has an adapter for each expert of layers.0.moe.experts.w_in, and adapter.shared=True has",
    ),
    "no adapters": ({"--adapter.init-from": "{place}/full"}, "has no adapters, all of its weights"),
    "no run": (
        {"--adapter.init-from": "{place}/tiny"},
        "holds neither a run nor adapter_config.json",
    ),
    "nowhere": (
        {"--adapter.init-from": "{place}/gone"},
        "holds neither a run nor adapter_config.json",
    ),
    "another base": ({"base": "{place}/other"}, "whose weights are not those of"),
    "another base of peft": (
        {"base": "{place}/other", "--adapter.init-from": "{place}/peft"},
        "whose weights are not those of",
    ),
    "no adapters to learn": (
        {"--adapter.kind": None, "--adapter.targets": None, **dict.fromkeys(LARGER)},
        "has no effect with adapter.kind=none",
    ),
    "a reference without them": (
        {
            "--objective.name": "grpo",
            "--reward.functions": "{place}/rewards.py:one",
            "--rl.kl-beta": "0.1",
        },
        "rl.kl_beta=0.1: has the model without its adapters as reference, and adapter.init_from begins",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_adapters_that_do_not_fit_are_one_line_before_work_starts(mistake, place):
    if not (place / "other").exists():
        hub_folder(place / "other", seed=9)
        config = em.recipe("gpt-moe-test").updated({"train.run_dir": str(place / "full")})
        train_quietly(
            config.updated(
                {
                    "train.steps": 1,
                    "optim.warmup_steps": 0,
                    "data.max_bytes": 60_000,
                    "train.tensorboard": False,
                }
            )
        )
    changes, said = MISTAKES[mistake]
    options = {**LARGER, "--adapter.init-from": "{place}/sft", **changes}
    options = {k: v and v.format(place=place) for k, v in options.items()}
    words = words_of(place, "unused", **options)
    with pytest.raises((ConfigError, CheckpointError)) as error:
        parse_and_begin(words)
    assert said in str(error.value) and "\n" not in str(error.value)
