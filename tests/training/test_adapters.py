"""`--adapter.kind lora`: what learns is what is said, checkpoints hold factors alone, and runs open as merged
models."""

import math
import shutil

import pytest
import torch
from tests.support.hub_text import chats_file, hub_folder

import expertmesh as em
from expertmesh import lora
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.merged_adapters import AdaptedModel, factor_prefix
from expertmesh.checkpoints.source import Stored, read_whole
from expertmesh.cli.main import main
from expertmesh.cli.start_training import parse_and_begin
from expertmesh.cli.train import run as train_verb
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.run_adapters import adapt
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import RunDir, load_run
from expertmesh.spec.adapter_counts import factor_counts
from expertmesh.training.metrics import read_metrics
from expertmesh.training.what_learns import counts_of_parts

LORA = ["--adapter.kind", "lora", "--adapter.rank", "4"]
FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hub_folder(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return chats_file(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture
def words_of(chats, tmp_path):
    def words(base, run="run", steps=4):
        places = ["--train.run-dir", f"{tmp_path}/{run}", "--data.cache-dir", f"{tmp_path}/cache"]
        more = ["--data.path", str(chats), "--train.batch-size", "8", "--train.no-tensorboard"]
        return [str(base), *places, *more, "--train.device", "cpu", "--train.steps", str(steps)]

    return words


SIZES = {"vocab_size": 256, "max_seq_len": 32, "dim": 24, "num_heads": 2, "num_layers": 2}
MOE = {"num_experts": (4,), "top_k": 2, "hidden_dim": 16, "num_shared_experts": 1}


def gpt(**options):
    moe = {**MOE, **options.pop("moe", {})}
    sizes = {**SIZES, "ffn_hidden_dim": 48, "tie_embeddings": False, "moe_every": 2, "moe": moe}
    return em.GPT(ModelConfig(**{**sizes, "init_std": 0.3, **options}), seed=0)


ALL = ("attention", "dense", "shared", "experts", "head")
TARGETS = {
    "all": (
        ALL,
        {"attention", "dense layers", "shared experts", "experts w_in", "experts w_out", "head"},
    ),
    "attention": (["attention"], {"attention"}),
    "peft's attention": (["q_proj", "k_proj", "v_proj", "o_proj"], {"attention"}),
    "short names": (["q", "k", "v"], {"attention"}),
    "peft's experts": (
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        {"experts w_in", "experts w_out"},
    ),
    "our names": (["experts.w_out"], {"experts w_out"}),
    "one layer": (["layers.1.attention.out"], {"attention"}),
    "down everywhere": (["down_proj"], {"dense layers", "shared experts", "experts w_out"}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_said_to_learn_gets_gradients_that_are_not_zero(name):
    targets, parts = TARGETS[name]
    model = gpt()
    lora.add(model, rank=2, targets=targets, expert_rank=1, seed=0)
    for one in lora.adapters(model).values():
        torch.nn.init.normal_(one.b, std=0.1)
    learning, _ = counts_of_parts(model)
    assert set(learning) == parts
    model(torch.randint(256, (4, 16))).logits_BSV.square().mean().backward()
    with_gradient = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert sum(g.numel() for g in with_gradient.values()) == sum(learning.values())
    idle = [n for n, g in with_gradient.items() if not g.any()]
    assert not idle, idle


@pytest.mark.parametrize("targets", [ALL, ["experts"]], ids=["all", "experts"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["usual", "invariant"])
def test_merged_logits_and_scores_are_those_of_the_adapters(targets, shared, batch_invariant):
    model = gpt(batch_invariant=batch_invariant).double().eval()
    lora.add(model, rank=3, targets=targets, shared=shared, seed=0, dtype=torch.float64)
    plain = model(torch.arange(12).view(1, 12)).logits_BSV
    for one in lora.adapters(model).values():
        torch.nn.init.normal_(one.b, std=0.1)
    ids = torch.randint(256, (2, 12))
    with torch.no_grad():
        before = model(ids).logits_BSV
        targets_R = torch.randint(256, (24,))
        scores = model(ids, targets_R=targets_R).logprobs_R
        expected = before.log_softmax(-1).flatten(0, 1).gather(1, targets_R[:, None])[:, 0]
        torch.testing.assert_close(scores, expected)
        lora.merge(model)
        torch.testing.assert_close(model(ids).logits_BSV, before)
        assert not torch.allclose(model(torch.arange(12).view(1, 12)).logits_BSV, plain)


MISTAKES = {
    "no such target": (
        ["--adapter.targets", "nothing_proj"],
        "nothing_proj matches nothing that takes an adapter; there are attention (q_proj",
    ),
    "half a matrix": (["--adapter.targets", "q_proj", "v_proj"], "name k_proj too, or attention"),
    "a tied head, or none": (["--adapter.targets", "router"], "router matches nothing"),
    "a kind of other models": (
        ["--adapter.targets", "attention", "shared"],
        "shared matches nothing that takes an adapter",
    ),
    "a rank above the matrices'": (
        ["--adapter.rank", "25"],
        "adapter.rank=25: is above 24, the largest rank of layers.0.attention.qkv.weight",
    ),
    "a rank above the experts'": (
        ["--adapter.expert-rank", "17"],
        "adapter.expert_rank=17: is above 16, the largest rank of layers.0.moe.experts.w_out",
    ),
    "a rank of experts without them": (
        ["--adapter.targets", "attention", "--adapter.expert-rank", "2"],
        "adapter.expert_rank=2: has no effect without adapters of routed experts",
    ),
    "one for all experts without them": (
        ["--adapter.targets", "attention", "--adapter.shared"],
        "adapter.shared=True: has no effect without adapters of routed experts",
    ),
    "frozen twice": (
        ["--train.freeze", "router"],
        "has no effect with adapter.kind=lora, where all but adapters rests",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_before_work_starts(mistake, base, words_of):
    more, said = MISTAKES[mistake]
    lora_words = LORA[:2] if "--adapter.rank" in more else LORA
    with pytest.raises(ConfigError) as error:
        parse_and_begin([*words_of(base), *lora_words, *more])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_options_without_adapters_and_adapters_without_a_model_are_refused():
    with pytest.raises(ConfigError, match="adapter.rank=4: has no effect with adapter.kind=none"):
        RunConfig(adapter={"rank": 4})
    with pytest.raises(ConfigError, match="adapter.kind=lora: needs a trained model"):
        RunConfig(adapter={"kind": "lora"})
    config = AdapterConfig(kind="lora")
    assert (config.expert_rank_of(8), config.expert_rank_of(64), config.scaling(16)) == (2, 1, 2)


def test_the_learning_rate_is_that_of_adapters_unless_one_is_given(base, words_of):
    assert parse_and_begin([*words_of(base), *LORA]).config.optim.lr == 2e-4
    given = parse_and_begin([*words_of(base), *LORA, "--optim.lr", "3e-5"])
    assert given.config.optim.lr == 3e-5


def adapter_bytes(run):
    """Twelve bytes of each learned number: FP32 and two moments."""
    config, _ = RunDir(run).read_config()
    model = em.GPT(config.model, device="meta")
    options = config.adapter
    ranks = {"rank": options.rank, "expert_rank": options.expert_rank_of(config.model.moe.top_k)}
    lora.add(model, **ranks, targets=options.targets)
    return 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_checkpoints_hold_factors_alone_and_resume_to_the_bit(base, words_of, tmp_path, capsys):
    """Six steps at once, and three and three: the same losses; routers and base keep their bits; the run opens
    merged."""
    assert train_verb([*words_of(base, "whole", 6), *LORA, "--optim.schedule-steps", "6"]) == 0
    said = capsys.readouterr().out
    broken = words_of(base, "broken", 3), words_of(base, "broken", 6)
    more = [*LORA, "--optim.schedule-steps", "6"]
    assert train_verb([*broken[0], *more]) == 0
    assert train_verb([*broken[1], *more, "--train.resume", "required"]) == 0
    runs = [tmp_path / name for name in ("whole", "broken")]
    losses = [[line["loss"] for line in read_metrics(run / "metrics.jsonl")] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 6 and losses[0][-1] < losses[0][0]
    (whole, broken) = (load_run(run).open_weights() for run in runs)
    original = em.load(base).model.state_dict()
    changed = set()
    for name, tensor in original.items():
        found = read_whole(whole, name)
        assert torch.equal(found, read_whole(broken, name)), name
        changed |= set() if torch.equal(found, tensor) else {name}
    assert changed == {n for n in original if n.endswith(("qkv.weight", "out.weight", "w_in", "w_out"))}
    num_learned = adapter_bytes(runs[0]) // 12
    assert f"trainable: {num_learned:,} of " in said
    assert "routers" in said.split("frozen: ")[1]
    assert f"adapters: {num_learned:,} parameters beside" in said
    assert "; rank 4, scale 8, for each expert rank 2, scale 16; routers frozen, no balance loss" in said
    saved = Checkpoint(load_run(runs[0]).checkpoint).tensors
    sizes = {n: math.prod(s.shape) * s.dtype.itemsize for n, s in saved.items() if n[0] != "r"}
    assert not [n for n in sizes if ".adapters." not in n]
    assert adapter_bytes(runs[0]) <= sum(sizes.values()) < 1.2 * adapter_bytes(runs[0])


COUNTED = {
    "usual": {},
    "shared, all": {"shared": True, "targets": ALL, "expert_rank": 3, "rslora": True},
    "routers": {"learn_routers": True, "targets": ("experts.w_in", "out")},
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_numbers_before_training_are_those_of_the_model(name):
    """The planner's count by kind equals what requires gradients, in a model with every part."""
    options = AdapterConfig(kind="lora", rank=3, **COUNTED[name])
    config = em.recipe("gpt-moe-test").updated({"train.init_from": "runs/none", "adapter": options})
    model = gpt(moe={"residual": True})
    config = config.model_copy(update={"model": model.config})
    adapt(model, config, dtype=torch.float64)
    counts = factor_counts(options, model.spec)
    routers = sum(p.numel() for n, p in model.named_parameters() if ".router." in n)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(counts.values()) == learning - routers * options.learn_routers
    assert all(p.dtype == torch.float64 for n, p in model.named_parameters() if ".adapters." in n)


def test_routers_learn_and_are_saved_when_asked_and_runs_generate(base, words_of, tmp_path, capsys):
    words = [*words_of(base, steps=2), *LORA, "--adapter.learn-routers", "--optim.lr", "1e-2"]
    assert train_verb([*words, "--dry-run"]) == 0
    assert "routers learn, with their balance loss" in capsys.readouterr().out
    assert train_verb(words) == 0
    assert "routers 192" in capsys.readouterr().out.split("frozen: ")[0]
    run = load_run(tmp_path / "run")
    router = "layers.0.moe.router.proj.weight"
    found = read_whole(run.open_weights(), router)
    assert f"model.{router}" in Checkpoint(run.checkpoint).tensors
    assert not torch.equal(found, em.load(base).model.state_dict()[router])
    assert main(["generate", str(tmp_path / "run"), "say", "--max-tokens", "3"]) == 0
    again = words_of(tmp_path / "run", "second", steps=1)
    assert train_verb([*again, *LORA]) == 0  # adapters on a run with adapters
    twice = load_run(tmp_path / "second").open_weights()
    assert torch.equal(read_whole(twice, router), found)


def test_another_base_at_resume_is_one_line(base, words_of, tmp_path):
    assert train_verb([*words_of(base, steps=1), *LORA]) == 0
    other = hub_folder(tmp_path / "other", seed=9)
    words = words_of(other, steps=2)
    with pytest.raises(ConfigError, match="its weights are not those of .*tiny"):
        train_verb([*words, *LORA, "--train.resume", "auto"])


def test_a_run_whose_base_is_gone_says_so(words_of, tmp_path):
    own = hub_folder(tmp_path / "own")
    assert train_verb([*words_of(own, steps=1), *LORA]) == 0
    shutil.move(own, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="has adapters for .*own, which is gone"):
        open_model(tmp_path / "run")


class Stack:
    """Tensors in memory as a source."""

    def __init__(self, tensors):
        self.path, self.values = "memory", tensors
        self.tensors = {n: Stored(tuple(t.shape), t.dtype) for n, t in tensors.items()}

    def read(self, name, box, into):
        into.copy_(self.values[name][box])


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_any_part_of_a_merged_tensor_is_that_of_the_whole(shared):
    model = gpt()
    base = Stack({n: t.clone() for n, t in model.state_dict().items()})
    lora.add(model, rank=2, alpha=6.0, targets=ALL, shared=shared, seed=0)
    for one in lora.adapters(model).values():
        torch.nn.init.normal_(one.b)
    learned = Stack({n: t.clone() for n, t in model.state_dict().items() if ".adapters." in n})
    source = AdaptedModel(base, learned, AdapterConfig(kind="lora", rank=2, alpha=6.0))
    adapted = set(lora.adapters(model))
    lora.merge(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read_whole(source, name), tensor)
        if name in adapted:
            assert f"{factor_prefix(name)}.a" in learned.tensors
            box = tuple(slice(s // 3, max(s // 2, s // 3 + 1)) for s in tensor.shape)
            part = torch.empty(tensor[box].shape)
            source.read(name, box, part)
            torch.testing.assert_close(part, tensor[box])
