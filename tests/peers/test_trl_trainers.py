"""Whole losses and every gradient beside TRL's trainers on one batch, in tiny models of four families, with adapters
and without."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hub_text import hub_folder
from tests.support.trainer_step import loss_of_step

from expertmesh import lora
from expertmesh.checkpoints.hub.load_pretrained import load_pretrained
from expertmesh.checkpoints.peft_folder import WEIGHTS
from expertmesh.integrations.peft import save_adapters
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.preference_task import PreferenceTask
from expertmesh.models.gpt.task import GPTTask
from expertmesh.rl.batch import DrawnAnswer, batch_of_answers
from expertmesh.rl.policy_task import PolicyTask

pytestmark = pytest.mark.filterwarnings("ignore")
trl = pytest.importorskip("trl", reason="trl not installed")
peft = pytest.importorskip("peft", reason="peft not installed")

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
OBJECTIVES = ("sft", "dpo", "grpo")
GROUP, LONGEST = 2, 7
FP32 = 1e-5
LOST = {("deepseek_v3", "grpo"): 2e-5}
"""Bounds of gradients where theirs lose more: 1.1e-5 beside theirs in FP64, where ours and theirs agree to 1e-6."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A model whose routers and experts are far from even."""
    from transformers import AutoModelForCausalLM

    path = hub_folder(tmp_path_factory.mktemp("base") / request.param, request.param)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.router_aux_loss_coef = 0.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=float(parameter.std()))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapted(folder, tmp_path_factory):
    """Our model with adapters on attention and experts that have moved far, and the same for peft."""
    model = load_pretrained(folder).eval()
    lora.add(model, rank=3, alpha=6.0, targets=("attention", "experts"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in lora.adapters(model).values():
            one.b.copy_(torch.randn(one.b.shape, generator=generator) * 0.2)
    place = tmp_path_factory.mktemp("adapters")
    save_adapters(model, place / "factors", base=str(folder))
    return model, place


def trainer_of(objective, model, place):
    """TRL's trainer of an objective, which computes no step of its own here."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    given = {
        "output_dir": str(place),
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "router_aux_loss_coef": 0.0,
    }
    rows = {"prompt": [f"say {i}" for i in range(4)]}
    if objective == "sft":
        args = trl.SFTConfig(**given)
        rows["completion"] = [" well" * (1 + i) for i in range(4)]
        made, more = trl.SFTTrainer, {}
    elif objective == "dpo":
        args = trl.DPOConfig(**given, precompute_ref_log_probs=True)
        rows |= {
            "chosen": [f" {i * i}" for i in range(4)],
            "rejected": [" no" * (1 + i) for i in range(4)],
        }
        made, more = trl.DPOTrainer, {}
    else:
        args = trl.GRPOConfig(**given, num_generations=GROUP, max_completion_length=LONGEST, epsilon_high=0.28)
        made, more = (
            trl.GRPOTrainer,
            {"reward_funcs": lambda completions, **_: [0.0] * len(completions)},
        )
    data = datasets.Dataset.from_dict(rows)
    return made(model=model, args=args, train_dataset=data, processing_class=tokenizer, **more)


def answers():
    """Answers to two prompts, drawn by another policy."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for row, length in enumerate((7, 3, 5, 6)):
        ids = torch.randint(97, 123, (length,), generator=generator).tolist()
        logprobs = (-4 - torch.rand(length, generator=generator)).tolist()
        prompt = tuple(range(100 + row // GROUP, 105 + row // GROUP))
        found.append(DrawnAnswer(prompt, tuple(ids), tuple(logprobs), False, None, float(row % 3)))
    return found


def theirs(objective, model, place):
    """Loss of TRL's trainer, whose gradients are in the model, and the batch as ours takes it."""
    trainer = trainer_of(objective, model, place)
    model = trainer.model
    model.zero_grad()
    if objective == "grpo":
        config = config_of(objective, {"max_seq_len": 64}, folder="x")
        batch = batch_of_answers(answers(), config.rl, num_updates=1, dtype=torch.float32)
        more = batch[2]
        more["mismatch_max"] = torch.zeros(2, dtype=torch.float64)
        drawn = [torch.tensor(one.token_ids) for one in answers()]
        ids = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in drawn], batch_first=True)
        old = [torch.tensor(one.logprobs) for one in answers()]
        prompts = torch.tensor([one.prompt_ids for one in answers()])
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(
            model,
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": more["advantage"].flatten(),
                "old_per_token_logps": torch.nn.utils.rnn.pad_sequence(old, batch_first=True),
                "num_items_in_batch": mask.sum(),
            },
        )
        loss.backward()
        return float(loss), batch
    inputs = next(iter(trainer.get_train_dataloader()))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if objective == "sft":
        loss = trainer.compute_loss(model, dict(inputs))
        learned = inputs["labels"][:, 1:] != -100
        more = {"counts": learned, "is_token": mask[:, 1:].bool()}
        batch = (
            ids[:, :-1].contiguous(),
            ids[:, 1:].contiguous(),
            torch.zeros_like(ids[:, 1:]),
            more,
        )
    else:
        loss = trainer._compute_loss(model, inputs, False)

        def pairs(x):
            return torch.stack(x.chunk(2), 1)

        reference = pairs(torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]]))
        ids, mask, learned = pairs(ids), pairs(mask), pairs(inputs["completion_mask"])
        more = {"counts": learned[..., 1:].bool(), "is_token": mask[..., 1:].bool()}
        more |= {"place": torch.arange(len(ids))[:, None], "reference": reference[:, None].double()}
        batch = ids[..., :-1].contiguous(), ids[..., 1:].contiguous(), more
    loss.backward()
    return float(loss), batch


def config_of(objective, model, folder, dtype="float32"):
    more = {}
    if objective == "grpo":
        rl = {"group": GROUP, "max_tokens": LONGEST, "clip_high": 0.28, "exact": False}
        more = {"rl": rl, "reward": {"functions": ["number"]}}
    train = {"device": "cpu", "dtype": dtype, "run_dir": "unused", "init_from": str(folder)}
    values = {"model": model, "data": {"seq_len": 64}, "objective": {"name": objective}}
    return GPTRunConfig(**values, train=train, **more)


TASKS = {"sft": GPTTask, "dpo": PreferenceTask, "grpo": PolicyTask}


def learned(objective, model, batch, folder, size):
    """Loss of an objective's step of our trainer in micro-batches of a size, whose gradients stay in the model."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    task = TASKS[objective](config_of(objective, model.config, folder, dtype))
    return loss_of_step(task, model, batch, size, enriches=objective == "dpo")


def assert_equal_gradients(found, expected, exact, bound=FP32):
    """Theirs are ours to `bound` of each tensor's norm, or to four times what ours lose between FP64 and FP32; none is
    zero.

    Sums that nearly cancel are measured by a hundredth of the largest tensor's norm.
    """
    assert found.keys() == expected.keys() == exact.keys() and found
    largest = max(float(one.norm()) for one in exact.values())
    for name, one in exact.items():
        scale = max(float(one.norm()), 1e-2 * largest)
        gap, lost = (float((found[name] - x).norm()) / scale for x in (expected[name], one))
        assert gap <= max(bound, 4 * lost) and gap <= 1e-4, (name, gap, lost)
    assert all(float(one.norm()) > 0 for one in expected.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_adapters_learn_as_with_trl_and_peft(objective, adapted, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model, place = adapted
    base = AutoModelForCausalLM.from_pretrained(folder)
    other = peft.PeftModel.from_pretrained(base, place / "factors", is_trainable=True)
    expected, batch = theirs(objective, other, tmp_path)
    grads = {name.replace(".default.", "."): p.grad for name, p in other.named_parameters() if p.requires_grad}
    in_fp64 = copy.deepcopy(model).double()
    learned(objective, in_fp64, batch, folder, 1)
    exact, _ = in_common(in_fp64, grads, place)
    for size in (4 if objective == "sft" else 2, 1):
        found = learned(objective, model, batch, folder, size)
        assert abs(found - expected) <= FP32 * max(1.0, abs(expected)), (found, expected)
        assert_equal_gradients(*in_common(model, grads, place), exact, LOST.get((folder.name, objective), FP32))


def in_common(model, theirs, place):
    """Gradients of our factors by peft's names, and theirs; factors that are one here are added up there."""
    written = load_file(place / "factors" / WEIGHTS)
    factors = {n: (one.a, one.b) for n, one in lora.adapters(model).items()}
    kept = {n: [x.detach().clone() for x in pair] for n, pair in factors.items()}
    with torch.no_grad():
        for pair in factors.values():
            for x in pair:
                x.copy_(x.grad)
        save_adapters(model, place / "gradients", base=None)
        for name, pair in factors.items():
            for x, before in zip(pair, kept[name], strict=True):
                x.copy_(before)
    found = {
        name: x.clone() for name, x in load_file(place / "gradients" / WEIGHTS).items()
    }  # the file is written again
    assert found.keys() == theirs.keys()
    summed = {}
    for name in theirs:
        alike = [n for n in written if "lora_A" in n and written[n].equal(written[name])] or [name]
        summed[name] = sum(theirs[n] for n in alike) if "lora_A" in name else theirs[name]
    return found, summed


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_weights_learn_as_with_trl(objective, folder, tmp_path):
    """Their gradients are read as weights are, so that both have one layout."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(folder)
    expected, batch = theirs(objective, other, tmp_path / "out")
    model = load_pretrained(folder).eval()
    found = learned(objective, model, batch, folder, 1)
    assert abs(found - expected) <= FP32 * max(1.0, abs(expected)), (found, expected)
    with torch.no_grad():
        for parameter in other.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    other.save_pretrained(tmp_path / "gradients")
    read = dict(load_pretrained(tmp_path / "gradients").named_parameters())
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    in_fp64 = load_pretrained(folder).double().eval()
    learned(objective, in_fp64, batch, folder, 1)
    exact = {n: p.grad for n, p in in_fp64.named_parameters() if p.grad is not None}
    assert_equal_gradients(own, {n: read[n].detach() for n in own}, exact)
