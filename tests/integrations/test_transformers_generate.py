"""Generation and evaluation of our GPT in transformers: what `expertmesh.generate` says, whatever the mode, the
capacity and the batch."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import numerics
from tests.support.generation import written_ids
from transformers import Trainer, TrainingArguments

from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers import ExpertMeshConfig, ExpertMeshForCausalLM
from expertmesh.models.gpt.config import ModelConfig

WINDOW = 32
PROMPTS = [[5, 9, 200, 31, 7, 8], [77, 8], [4, 4, 4, 4]]


def model_of(**moe):
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=(4,), hidden_dim=16, **moe)
    options = {"vocab_size": 256, "max_seq_len": WINDOW, "dim": 32, "num_layers": 2, "num_heads": 2}
    gpt = ModelConfig(**options, tie_embeddings=False, init_std=0.5, moe=moe)
    return ExpertMeshForCausalLM(ExpertMeshConfig(gpt=gpt, pad_token_id=0)).double()


def written(model, prompts, **how):
    """Six tokens after each prompt, padded on the left, of transformers' generate."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **how}
    found = model.generate(ids, attention_mask=(ids != 0).long(), **how)
    return found[:, longest:].tolist()


ALONE = {
    "dropless": {},
    "a capacity in evaluation": {"eval_capacity_factor": 0.3, "min_capacity": 0},
    "a capacity in training": {"capacity_factor": 0.3, "min_capacity": 0},
    "noise": {"router_noise": "gumbel"},
    "jitter": {"input_jitter": 0.9},
    "masked outputs": {"expert_output_masking": 0.9},
    "groups": {"eval_capacity_factor": 0.3, "min_capacity": 0, "routing_group_size": 2},
}
"""Options of layers that change nothing in generation."""


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", ALONE)
def test_generation_drops_nothing_and_draws_nothing(name, use_cache, training):
    model = model_of(**ALONE[name]).train(training)
    odd = model.gpt.layers[1].train(not training)
    expected = written_ids(model.gpt.eval(), PROMPTS, max_tokens=6)
    model.train(training)
    odd.train(not training)
    found = written(model, PROMPTS, use_cache=use_cache)
    assert found == expected
    assert found == [written(model, [prompt], use_cache=use_cache)[0] for prompt in PROMPTS]
    assert model.training is training and model.gpt.layers[1].training is not training


@pytest.mark.parametrize(
    "moe",
    [
        {"max_capacity_factor": 0.5, "min_capacity": 0},
        {"router": "expert_choice", "aux_loss_weight": 0.0},
    ],
    ids=["bound", "expert choice"],
)
def test_what_depends_on_the_batch_does_so_as_in_our_own_engine(moe):
    model = model_of(**moe).eval()
    assert written(model, PROMPTS) == written_ids(model.gpt, PROMPTS, max_tokens=6)


def test_the_loss_of_an_evaluation_is_cross_entropy_alone():
    """Also where Trainer evaluates; the routers' share stays an output of its own."""
    model = model_of(aux_loss_weight=0.5, z_loss_weight=0.1)
    ids = torch.randint(1, 256, (2, 9))
    labels = ids.clone()
    labels[0, :4] = -100
    model.train()
    learned = model(ids, labels=labels)
    model.eval()
    found = model(ids, labels=labels)
    text = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    numerics.assert_close_fp64(found.loss, text, what="loss of an evaluation")
    numerics.assert_close_fp64(learned.loss, text + learned.aux_loss, what="loss of training")
    assert torch.equal(found.aux_loss, learned.aux_loss) and found.aux_loss > 0.5


def test_the_trainer_evaluates_cross_entropy_alone(tmp_path):
    pytest.importorskip("accelerate")
    model = model_of(aux_loss_weight=0.5)
    rows = torch.randint(1, 256, (4, 9))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    found = Trainer(model, args, eval_dataset=data).evaluate()["eval_loss"]
    with torch.no_grad():
        logits = model.eval()(rows).logits[:, :-1].flatten(0, 1)
    numerics.assert_close_fp64(
        torch.tensor(found, dtype=torch.float64),
        F.cross_entropy(logits, rows[:, 1:].flatten()),
        what="eval_loss",
    )


ROOM = {
    "new tokens": {"max_new_tokens": WINDOW},
    "a length": {"max_length": WINDOW + 1},
    "a least number": {"min_new_tokens": WINDOW, "max_new_tokens": WINDOW},
}


@pytest.mark.parametrize("name", ROOM)
def test_what_passes_the_window_is_refused_before_a_token_is_made(name):
    model = model_of()
    model.gpt.register_forward_pre_hook(lambda *_: pytest.fail("a token was made"))
    with pytest.raises(ConfigError, match=f"max_seq_len={WINDOW}; shorten the prompt, or ask"):
        model.generate(torch.tensor(PROMPTS[:1]), **ROOM[name])


def test_the_window_can_be_filled():
    prompt = torch.tensor(PROMPTS[:1])
    full = model_of().generate(prompt, max_length=WINDOW, eos_token_id=None)
    assert full.shape == (1, WINDOW)
    rest = WINDOW - prompt.shape[1]
    assert model_of().generate(prompt, max_new_tokens=rest, eos_token_id=None).shape == full.shape
