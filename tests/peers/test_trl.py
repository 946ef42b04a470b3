"""Preferences beside TRL: its DPOTrainer's own loss and gradients on its own batches, from the same weights."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hub_text import hub_folder
from tests.support.trainer_step import loss_of_step

from expertmesh.checkpoints.hub.load_pretrained import load_pretrained
from expertmesh.config.text import TextConfig
from expertmesh.data.text import text_data
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.preference_task import PreferenceTask
from expertmesh.models.task import Part
from expertmesh.objectives.preferences import LOSSES as PAIR_LOSSES
from expertmesh.objectives.preferences import LossNumbers, PairScores
from expertmesh.parallel.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
trl = pytest.importorskip("trl", reason="trl not installed")

PAIRS = [{"prompt": f"say {i}", "chosen": f" well {i * i}", "rejected": " no" * (1 + i % 3)} for i in range(6)]
LOSSES = {
    "sigmoid": {},
    "robust": {"label_smoothing": 0.1},
    "ipo": {},
    "hinge": {},
    "apo_zero": {},
    "apo_down": {},
    "sigmoid_norm": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a reference, and of a policy far from it."""
    from transformers import AutoModelForCausalLM

    folder = hub_folder(tmp_path_factory.mktemp("trl") / "reference")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.router_aux_loss_coef = 0.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.3 * float(parameter.std()) if parameter.ndim > 1 else 0)
    policy = folder.parent / "policy"
    model.save_pretrained(policy)
    return SimpleNamespace(reference=folder, policy=policy)


@pytest.fixture(scope="module")
def theirs(models, tmp_path_factory):
    """Function from a loss to TRL's trainer of it, whose model is the policy."""
    import datasets
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    made = byte_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")
    tokenizer.pad_token = "<|endoftext|>"

    def trainer(loss, numbers):
        args = trl.DPOConfig(
            output_dir=str(tmp_path_factory.mktemp("out")),
            loss_type=[loss],
            per_device_train_batch_size=len(PAIRS),
            report_to=[],
            use_cpu=True,
            bf16=False,
            router_aux_loss_coef=0.0,
            beta=0.1,
            **numbers,
        )
        model = AutoModelForCausalLM.from_pretrained(models.reference)
        found = trl.DPOTrainer(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_list(PAIRS),
            processing_class=tokenizer,
        )
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(models.policy).state_dict())
        return found

    return trainer


def batch_of(theirs):
    """A batch of pairs from one of TRL, whose chosen answers come first."""

    def pairs(x):
        return torch.stack(x.chunk(2), 1)

    ids, mask, learned = (pairs(theirs[name]) for name in ("input_ids", "attention_mask", "completion_mask"))
    more = {"counts": learned[..., 1:].bool(), "is_token": mask[..., 1:].bool()}
    more["place"] = torch.arange(len(ids))[:, None]
    return ids[..., :-1].contiguous(), ids[..., 1:].contiguous(), more


def task_of(model, loss, numbers):
    objective = {"name": "dpo", "loss": loss, **numbers}
    train = {"device": "cpu", "dtype": "float32", "run_dir": "unused"}
    data = {"seq_len": model.config.max_seq_len}
    config = GPTRunConfig(model=model.config, data=data, objective=objective, train=train)
    return PreferenceTask(config)


def scores(task, model, batch):
    """Log-probabilities (B, 2) of the answers."""
    found = task.scores(model.eval(), batch, Part(0, slice(0, len(batch[0])), Ranks()))
    return found.at_positions(found.logprobs_R).sum(2).detach().double()


def gradients(model):
    """Gradients by kind, as both have them."""
    if hasattr(model, "layers"):
        layers = [(b.moe.router.proj.weight, b.moe.experts.w_in, b.moe.experts.w_out) for b in model.layers]
        head = model.output.weight
    else:
        layers = [(b.mlp.gate.weight, b.mlp.experts.gate_up_proj, b.mlp.experts.down_proj) for b in model.model.layers]
        head = model.lm_head.weight
    return [p.grad.flatten() for p in (*(one for layer in layers for one in layer), head)]


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_dpo_trainer(loss, models, theirs):
    numbers = LOSSES[loss]
    trainer = theirs(loss, numbers)
    inputs = next(iter(trainer.get_train_dataloader()))
    expected = trainer._compute_loss(trainer.model, inputs, False)
    expected.backward()

    batch = batch_of(inputs)
    model, reference = (load_pretrained(folder).eval() for folder in (models.policy, models.reference))
    task = task_of(model, loss, numbers)
    batch[2]["reference"] = scores(task, reference, batch)[:, None]
    found = []
    for size in (len(PAIRS), 2, 1):
        model.zero_grad()
        losses = loss_of_step(task, model, batch, size)
        assert abs(losses - float(expected)) <= 1e-5 * max(1.0, abs(float(expected)))
        for ours, other in zip(gradients(model), gradients(trainer.model), strict=True):
            assert float(other.abs().max()) > 1e-4, "a gradient that proves something"
            assert float((ours - other).abs().max()) <= 1e-5 * max(1.0, float(other.abs().max()))
        found.append(losses)
    assert max(found) - min(found) <= 1e-6 * max(found)


def test_rows_are_those_of_trl(theirs, models, tmp_path):
    """Ids and learned tokens of the same records as plain texts."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in PAIRS))
    config = TextConfig(
        path=str(path),
        seq_len=64,
        encode_with=str(models.reference / "tokenizer.json"),
        cache_dir=str(tmp_path / "cache"),
        completions="text",
    )
    data = text_data(config, vocab_size=264, seed=0, objective="dpo")
    ours = set()
    for side, count in (("training", data.num_training), ("validation", data.num_validation)):
        ours |= rows_of(data.samples(side, range(count)))
    found = rows_of(batch_of(next(iter(theirs("sigmoid", {}).get_train_dataloader()))))
    assert sorted(ours) == sorted(found)


FREE = {
    "simpo": ("CPOTrainer", "cpo_loss", {"loss_type": "simpo", "simpo_gamma": 0.5}, True),
    "cpo": ("CPOTrainer", "cpo_loss", {"loss_type": "sigmoid"}, False),
    "orpo": ("ORPOTrainer", "odds_ratio_loss", {}, True),
}
"""Losses without a reference: TRL's trainer and method, its options, and whether it gets means."""


@pytest.mark.parametrize("loss", FREE)
def test_losses_without_a_reference(loss):
    """But for ORPO's sign, which TRL gives the cross-entropy."""
    name, method, options, of_means = FREE[loss]
    module = importlib.import_module(f"trl.experimental.{name[:-7].lower()}")
    trainer = SimpleNamespace(
        beta=0.2,
        alpha=0.0,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        **options,
    )
    lengths = torch.tensor([[3.0, 7.0], [9.0, 2.0], [5.0, 5.0]])
    logprobs = -lengths * torch.tensor([[0.7, 0.9], [1.3, 0.4], [0.2, 2.0]])
    given = (logprobs / lengths if of_means else logprobs).unbind(1)
    expected, *_ = getattr(getattr(module, name), method)(trainer, *given)
    scores = PairScores(logprobs, lengths, torch.zeros_like(logprobs))
    found = PAIR_LOSSES[loss](scores, LossNumbers(0.2, gamma=0.5))
    torch.testing.assert_close(found, -expected if loss == "orpo" else expected)


def rows_of(batch):
    """Pairs as tuples: (ids of the row, learned ids) of both answers."""
    ids, targets, more = batch
    found = set()
    for pair in range(len(ids)):
        sides = []
        for side in range(2):
            real, learned = more["is_token"][pair, side], more["counts"][pair, side]
            row = ids[pair, side][real].tolist() + targets[pair, side][real][-1:].tolist()
            sides.append((tuple(row), tuple(targets[pair, side][learned].tolist())))
        found.add(tuple(sides))
    return found
