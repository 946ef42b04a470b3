"""`adapter.dropout`: peft's `lora_dropout` in distribution, the same numbers on any layout and after a resume, nothing
outside training."""

import functools

import pytest
import torch
from tests.support.hub_text import chats_file, hub_folder
from tests.support.runs import assert_same_lines, lines_of, train_quietly

import expertmesh as em
from expertmesh import lora
from expertmesh.cli.start_training import parse_and_begin
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.moe.dense_parts import Linear
from expertmesh.moe.routing_noise import key_noise
from expertmesh.moe.token_dropout import AdapterDropout

TARGETS = ("attention", "dense", "shared", "head")
RATE = 0.3


def gpt(rate, **options):
    sizes = {"vocab_size": 64, "max_seq_len": 16, "dim": 16, "num_heads": 2, "num_layers": 2}
    moe = {"num_experts": (4,), "top_k": 2, "hidden_dim": 16, "num_shared_experts": 1}
    config = ModelConfig(**sizes, ffn_hidden_dim=32, tie_embeddings=False, moe_every=2, moe=moe)
    model = em.GPT(config, seed=0)
    model.set_activation_checkpointing(options.pop("checkpointing", False))
    lora.add(model, rank=4, targets=TARGETS, dropout=rate, seed=1, **options)
    generator = torch.Generator().manual_seed(2)
    for one in lora.adapters(model).values():
        one.b.data.copy_(torch.randn(one.b.shape, generator=generator) * 0.3)
    return model


def outputs_of(linear, rows):
    with torch.no_grad():
        return linear(rows).double()


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.8])
def test_outputs_have_pefts_distribution(rate):
    """Means and variances of an adapter's output over 40,000 equal rows are those of peft's layer and of the
    formula."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    ours, rows = Linear(24, 6), torch.randn(24).expand(40_000, 24)
    plain = outputs_of(ours, rows[:1])
    lora.attach(ours, {"weight": lora.Size(4, 2.0)}, dropout=rate, seed=1)
    torch.nn.init.normal_(ours.adapters.weight.b)
    a, b = (f.detach() for f in (ours.adapters.weight.a, ours.adapters.weight.b))
    shell = torch.nn.Sequential(torch.nn.Linear(24, 6, bias=False))
    options = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=rate, target_modules=["0"])
    theirs = peft.get_peft_model(shell, options).base_model.model[0]
    theirs.lora_A.default.weight.data, theirs.lora_B.default.weight.data = a, b
    theirs.base_layer.weight.data = ours.weight.data
    key_noise(ours, seed=3, step=5)
    each_NK = (2.0 * (b @ a) * rows[0]).double()
    mean, variance = plain[0] + each_NK.sum(-1), each_NK.square().sum(-1) * rate / (1 - rate)
    for layer in (ours.train(), theirs.train()):
        found = outputs_of(layer, rows)
        assert ((found.mean(0) - mean).abs() < 6 * (variance / len(rows)).sqrt()).all()
        torch.testing.assert_close(found.var(0), variance, rtol=0.06, atol=0)
    whole = outputs_of(ours.eval(), rows[:2])
    torch.testing.assert_close(whole[0], mean, rtol=1e-5, atol=1e-6)


def test_nothing_is_dropped_at_rate_0_in_evaluation_and_after_a_merge():
    ids = torch.randint(64, (3, 8))
    usual, dropped = gpt(0.0), gpt(RATE)
    assert not [m for m in usual.modules() if isinstance(m, AdapterDropout)]
    assert usual.state_dict().keys() == dropped.state_dict().keys()
    before = usual(ids).logits_BSV
    assert not torch.allclose(dropped(ids).logits_BSV, before)
    assert torch.equal(dropped.eval()(ids).logits_BSV, usual.eval()(ids).logits_BSV)
    targets_R = ids.flatten()
    scores = [m(ids, targets_R=targets_R).logprobs_R for m in (usual, dropped)]
    assert torch.equal(*scores)
    lora.merge(dropped)
    assert not dropped._forward_pre_hooks
    torch.testing.assert_close(dropped.train()(ids).logits_BSV, before, rtol=1e-3, atol=1e-4)


def gradients(model, ids, token_index, rows_R=None):
    key_noise(model, seed=7, step=2)
    targets_R = ids.flatten() if rows_R is None else ids.flatten()[rows_R]
    how = {} if rows_R is None else {"logit_rows_R": rows_R}
    model(ids, targets_R=targets_R, token_index=token_index, **how).logprobs_R.sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("way", ["parts", "checkpointing", "rows of the head", "again"])
def test_a_mask_depends_on_seed_step_and_token_alone(way):
    ids, index = torch.randint(64, (4, 8)), torch.arange(32)
    whole = gradients(gpt(RATE).double(), ids, index)
    model = gpt(RATE, checkpointing=way == "checkpointing").double()
    if way == "parts":
        parts = [gradients(model, ids[i : i + 1], index[8 * i : 8 * i + 8]) for i in range(4)]
        found = {n: sum(part[n] for part in parts) for n in whole}
    elif way == "rows of the head":
        halves = [gradients(model, ids, index, index[i::2]) for i in range(2)]
        found = {n: sum(half[n] for half in halves) for n in whole}
    else:
        found = gradients(model, ids, index)
    for name, grad in whole.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)
    other = gradients(model, ids, index + 32)
    assert not any(torch.allclose(other[n], g) for n, g in whole.items() if n.endswith("b"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropout")
    hub_folder(folder / "tiny")
    chats_file(folder / "chats.jsonl")
    return folder


def words_of(place, run, *more):
    usual = {
        "--train.run-dir": f"{place}/{run}",
        "--data.cache-dir": f"{place}/cache",
        "--data.path": f"{place}/chats.jsonl",
        "--train.batch-size": "8",
        "--train.steps": "4",
        "--train.device": "cpu",
        "--optim.schedule-steps": "4",
        "--adapter.kind": "lora",
        "--adapter.rank": "4",
        "--adapter.dropout": str(RATE),
        "--adapter.targets": "attention",
    }
    words = [word for pair in usual.items() if pair[0] not in more for word in pair]
    return [f"{place}/tiny", "--train.no-tensorboard", *words, *more]


def run_training(place, run, *more):
    train_quietly(parse_and_begin(words_of(place, run, *more)).config)
    return lines_of(place / run)


@pytest.fixture(scope="module")
def whole(place):
    return functools.cache(lambda *more: run_training(place, "-".join(("whole", *more)), *more))


FP64 = ("--train.dtype", "float64")
WAYS = {
    "micro-batches": ["--train.micro-batch-size", "2"],
    "ranks": [],
    "ranks and micro-batches": ["--train.micro-batch-size", "4"],
}


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_and_ranks_change_nothing(way, place, whole, two_ranks):
    call = place, way.replace(" ", "-"), *FP64, *WAYS[way]
    found = two_ranks.run(run_training, *call)[0] if "ranks" in way else run_training(*call)
    assert_same_lines(found, whole(*FP64), "loss", "grad_norm", "eval_loss")


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(place, whole):
    run_training(place, "broken", "--train.steps", "2")
    found = run_training(place, "broken", "--train.resume", "required")
    columns = [[(line["loss"], line["grad_norm"]) for line in one] for one in (found, whole())]
    assert columns[0] == columns[1] and len(columns[0]) == 4
    without = run_training(place, "without", "--adapter.dropout", "0")
    assert without[-1]["loss"] != found[-1]["loss"]


MISTAKES = {
    "experts": (
        ["--adapter.targets", "attention", "experts"],
        "adapter.dropout=0.3: is of adapters of dense matrices only, and layers.0.moe.experts.w_in is",
    ),
    "preferences": (
        ["--objective.name", "dpo"],
        "adapter.dropout=0.3: has no effect with objective.name=dpo, which computes as in evaluation",
    ),
    "reinforcement learning": (
        ["--objective.name", "grpo", "--reward.functions", "number"],
        "adapter.dropout=0.3: has no effect with objective.name=grpo",
    ),
    "cut inputs": (
        ["--parallel.tp-degree", "2"],
        "adapter.dropout=0.3: is drawn for whole inputs, and parallel.tp_degree=2 cuts them",
    ),
    "all of it": (["--adapter.dropout", "1"], "must be at most 0.99"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_dropout_that_cannot_be_is_refused_in_one_line(mistake, place):
    more, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        parse_and_begin(words_of(place, "unused", *more))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_python_refuses_dropout_of_experts_and_leaves_the_model_as_it_was():
    layer = em.MoELayer(dim=8, hidden_dim=8, num_experts=2, top_k=1, seed=0)
    with pytest.raises(ConfigError, match="dropout=0.1: is of adapters of dense matrices only"):
        lora.add(layer, dropout=0.1)
    assert layer.experts.adapters is None and not layer._forward_pre_hooks
