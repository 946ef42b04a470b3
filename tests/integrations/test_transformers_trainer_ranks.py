"""transformers' Trainer on two ranks, with FSDP and `ep_implementation="expertmesh"`: the weights of one process,
whatever the family and the number of ranks that share experts, and folders that open on other numbers of them.
"""

import os

import pytest
import torch
from tests.support.hub_models import tiny_model
from tests.support.ranks import RankError, RankPool
from transformers import AutoModelForCausalLM

RANKS, STEPS, RATE, CLIP, EQUAL = 2, 3, 0.05, 0.5, 2e-5
FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
CASES = [(name, ep) for name in FAMILIES for ep in (1, 2)] + [("frozen", 2)]


def batch():
    return torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(2))


def made(case, folder):
    """A model of a family in a folder, with routers that choose apart."""
    model = tiny_model("qwen3_moe" if case == "frozen" else case, num_experts=4)
    model.save_pretrained(folder)


def freeze(case, model):
    if case == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)


def opened(folder, ep):
    from transformers.distributed import DistributedConfig

    from expertmesh.integrations.transformers import register

    config = DistributedConfig(fsdp_size=RANKS, ep_size=ep, ep_implementation="expertmesh")
    return AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation=register(), distributed_config=config, dtype=torch.float32
    )


def as_torchrun():
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"ACCELERATE_USE_CPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def logits(model):
    with torch.no_grad():
        return model.eval()(batch()).logits


def trained_on_ranks(root):
    """Train every case and save it; logits of what was saved, on other numbers of ranks per expert."""
    as_torchrun()
    from transformers import Trainer, TrainingArguments

    found = {}
    for case, ep in CASES:
        model = opened(f"{root}/{case}", ep)
        freeze(case, model)
        arguments = TrainingArguments(
            output_dir=f"{root}/out", max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True,
            report_to=[], learning_rate=RATE, max_grad_norm=CLIP, optim="sgd", save_strategy="no",
            lr_scheduler_type="constant", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids} for ids in batch()]
        Trainer(model=model, args=arguments, train_dataset=data).train()
        model.save_pretrained(f"{root}/{case}-{ep}")
        torch.distributed.barrier()
        again = opened(f"{root}/{case}-{ep}", 3 - ep)
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        found[case, ep] = logits(model), logits(again), frozen
    return found


def trained_alone(case, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    freeze(case, model)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch(), labels=batch()).loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, CLIP)
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Ranks that nobody else has: accelerate stays started in them."""
    root = tmp_path_factory.mktemp("trainer")
    for case in dict.fromkeys(name for name, _ in CASES):
        made(case, root / case)
    pool = RankPool(RANKS)
    yield pool.run(trained_on_ranks, str(root)), root, pool
    pool.stop()


@pytest.mark.parametrize(("case", "ep"), CASES)
def test_weights_are_those_of_one_process(case, ep, trained):
    results, root, _ = trained
    expected, begin = (
        trained_alone(case, root / case),
        tiny_model("qwen3_moe" if case == "frozen" else case, num_experts=4),
    )
    saved = AutoModelForCausalLM.from_pretrained(root / f"{case}-{ep}", dtype=torch.float32)
    ours, theirs = saved.state_dict(), expected.state_dict()
    moved = 0
    for name, before in begin.state_dict().items():
        assert (ours[name] - theirs[name]).abs().max() < EQUAL, name
        moved += not torch.equal(theirs[name], before)
        if case == "frozen" and "experts" in name:
            assert torch.equal(ours[name], before), name
    assert moved > len(theirs) / 2
    for now, again, frozen in (result[case, ep] for result in results):
        assert torch.equal(now, again) or (now - again).abs().max() < 10 * EQUAL
        assert (now - logits(saved)).abs().max() < 10 * EQUAL
        assert bool(frozen) == (case == "frozen")


def opens_three(folder):
    as_torchrun()
    opened(folder, 2)


def test_experts_that_the_ranks_do_not_divide(trained, tmp_path):
    tiny_model("mixtral", num_experts=3).save_pretrained(tmp_path)
    with pytest.raises(RankError, match="3 experts across 2 expert-parallel ranks"):
        trained[2].run(opens_three, str(tmp_path))
