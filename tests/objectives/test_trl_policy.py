"""The policy's losses and gradients are those of TRL's own code, in FP64 and FP32; skipped where TRL is absent."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tests.objectives.test_policy_gradient import LENGTHS, B, G, drawn_of, given, with_gradient
from tests.oracle.numerics import assert_close_fp64, relative_error

from expertmesh.config.rl import RLConfig
from expertmesh.objectives import policy_gradient

trainer = pytest.importorskip("trl.trainer.grpo_trainer")
FP32 = 1e-5
CASES = {
    "grpo": ({"average": "sequence"}, {"loss_type": "grpo"}),
    "dapo": ({"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (
        {"average": "constant", "max_tokens": 6, "scale": "none"},
        {"loss_type": "dr_grpo"},
    ),
    "bnpo of one batch": ({}, {"loss_type": "bnpo"}),
    "cispo": (
        {"loss": "cispo", "cispo_cap": 1.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "two-sided": ({"dual_clip": 1.3, "average": "sequence"}, {"loss_type": "grpo", "delta": 1.3}),
    "divergence": ({"kl_beta": 0.04}, {"loss_type": "dapo", "beta": 0.04}),
    "divergence of answers": (
        {"kl_beta": 0.1, "average": "sequence"},
        {"loss_type": "grpo", "beta": 0.1},
    ),
    "entropy": ({"entropy_coef": 0.01}, {"loss_type": "dapo", "entropy_coef": 0.01}),
    "gspo": (
        {"ratio": "sequence", "average": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "gspo near 1": (
        {"ratio": "sequence", "average": "sequence", "clip_low": 0.01, "clip_high": 0.02},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 0.02,
        },
    ),
}


def padded(x_R):
    """(answers, longest) with zeros behind each answer."""
    return torch.nn.utils.rnn.pad_sequence(x_R.split(list(LENGTHS)), batch_first=True)


def entropies(x_R):
    """Numbers in the place of entropies, which depend on the log-probabilities."""
    return x_R.square()


def theirs(options, advantage_A, old_R, reference_R):
    """TRL's loss of log-probabilities (R,): its own method, with these in the place of a model's."""
    lengths, ids = torch.tensor(LENGTHS), padded(torch.arange(len(old_R)))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    defaults = {"epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}
    defaults |= {"beta": 0.0, "entropy_coef": 0.0}
    chosen = defaults | options
    delta = chosen.pop("delta", None)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage_A,
        "old_per_token_logps": padded(old_R),
        "ref_per_token_logps": padded(reference_R),
        "num_items_in_batch": lengths.sum(),
    }

    def loss(leaf):
        state = SimpleNamespace(
            **chosen,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            accelerator=SimpleNamespace(
                num_processes=1,
                gather=lambda x: x,
                reduce=lambda x, **_: x,
                sync_gradients=False,
            ),
            model=SimpleNamespace(training=True),
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                padded(leaf),
                padded(entropies(leaf)),
                None,
            ),
            _metrics={"train": defaultdict(list)},
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_adaptive_entropy=False,
            aux_loss_enabled=False,
            use_vllm=False,
            _entropy_bonus_enabled=chosen["entropy_coef"] != 0,
            current_gradient_accumulation_steps=1,
            max_completion_length=6,
        )
        return trainer.GRPOTrainer._compute_loss(state, None, inputs)

    return loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_trl(name, dtype):
    options, their_options = CASES[name]
    rl = RLConfig(**options)
    rewards_BG, old_R, new_R, reference_R = (x.to(dtype) for x in given())
    drawn = drawn_of(old_R, rewards_BG, rl)
    drawn = drawn._replace(length_A=drawn.length_A.to(dtype))

    def ours(leaf):
        loss_R = policy_gradient.policy_losses(leaf, drawn, rl)
        kl_R = policy_gradient.kl_estimates(leaf, reference_R)
        loss_R = policy_gradient.with_penalties(loss_R, entropies(leaf), kl_R, rl)
        count = policy_gradient.num_items(len(leaf), B * G, rl)
        return policy_gradient.summed(loss_R, drawn, rl) / count

    found = with_gradient(ours, new_R)
    expected = with_gradient(theirs(their_options, drawn.advantage_A, old_R, reference_R), new_R)
    for one, other, what in zip(found, expected, ("loss", "gradient"), strict=True):
        if dtype == torch.float64:
            assert_close_fp64(one, other, what=what, scale=1.0)
        else:
            assert relative_error(one, other) < FP32, what
