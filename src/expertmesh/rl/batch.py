"""Answers of a step as tensors: rows of prompts with G answers each, padded on the right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from expertmesh.config.rl import RLConfig
from expertmesh.engine.output import RequestOutput
from expertmesh.objectives import policy_gradient


@dataclass(frozen=True)
class DrawnAnswer:
    """An answer of a rollout with its reward; plain values, which ranks exchange."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # token ids of the answer, with the one that ended it
    logprobs: tuple[float, ...]  # log-probabilities of these tokens when they were drawn
    is_cut: bool  # whether `rl.max_tokens` ended it
    experts: Tensor | None  # (tokens - 1, MoE layers, K) chosen experts; None: they are not replayed
    reward: float
    # values of the reward functions by name; None where one does not apply
    values: Mapping[str, float | None] = field(default_factory=dict)
    text: str = ""

    @classmethod
    def of(
        cls, output: RequestOutput, *, reward: float, values: Mapping[str, float | None], text: str
    ) -> "DrawnAnswer":
        """An answer of the engine."""
        assert output.logprobs is not None
        return cls(
            output.prompt_ids,
            output.token_ids,
            tuple(one.logprob for one in output.logprobs),
            output.finish_reason == "length",
            output.routed_experts,
            reward,
            values,
            text,
        )


def batch_of_answers(
    answers: Sequence[DrawnAnswer],  # B * G answers
    rl: RLConfig,  # options
    *,
    num_updates: int,  # optimizer steps among which the prompts are split
    dtype: torch.dtype,  # dtype of log-probabilities, FP32 or FP64
    multiple: int = 1,  # number that divides S, as ranks that share sequences need
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tensors of the answers of a step, neighbours being the answers to one prompt; B prompts, G answers each.

    Returns:
        Inputs and next tokens, (B, G, S) int64, and by name: `is_token` (B, G, S) bool, False for padding; `counts`
        (B, G, S) bool, whether a target is learned; `drawn` (B, G, S) bool, whether it is the answer's; `sampled` and
        `old` (B, G, S) its log-probability when it was drawn; `advantage`, `reward`, `is_cut` (B, G); `is_first` (B,)
        bool, whether the row is in the first update; `experts` (B, G, S, layers, K) int32 if they are replayed, -1
        where there is none.
    """
    G = rl.group
    longest = max(len(a.prompt_ids) + len(a.token_ids) for a in answers) - 1
    B, S = len(answers) // G, -(-longest // multiple) * multiple
    ids, targets = (torch.zeros(B * G, S, dtype=torch.int64) for _ in range(2))
    is_token, drawn = (torch.zeros(B * G, S, dtype=torch.bool) for _ in range(2))
    sampled = torch.zeros(B * G, S, dtype=dtype)
    for row, one in enumerate(answers):
        whole = torch.tensor([*one.prompt_ids, *one.token_ids])
        size, first = len(whole) - 1, len(one.prompt_ids) - 1
        ids[row, :size], targets[row, :size] = whole[:-1], whole[1:]
        is_token[row, :size], drawn[row, first:size] = True, True
        sampled[row, first:size] = torch.tensor(one.logprobs, dtype=dtype)
    reward = torch.tensor([one.reward for one in answers], dtype=torch.float64).view(B, G)
    length = torch.tensor([len(one.token_ids) for one in answers]).view(B, G)
    is_cut = torch.tensor([one.is_cut for one in answers]).view(B, G)
    judged = reward + policy_gradient.soft_length_penalty(length, rl)
    counts = drawn & ~is_cut.flatten()[:, None] if rl.mask_cut else drawn
    found = {"counts": counts, "is_token": is_token, "drawn": drawn, "sampled": sampled}
    if answers[0].experts is not None:
        found["experts"] = _padded(answers, S)
    more = {name: x.view(B, G, *x.shape[1:]) for name, x in found.items()}
    more |= {"old": more["sampled"], "reward": reward, "is_cut": is_cut}
    more["advantage"] = policy_gradient.advantages(judged, rl).to(dtype)
    more["is_first"] = torch.arange(B) < B // num_updates
    return ids.view(B, G, S), targets.view(B, G, S), more


def _padded(answers: Sequence[DrawnAnswer], S: int) -> Tensor:
    first = answers[0].experts
    assert first is not None
    found = torch.full((len(answers), S, *first.shape[1:]), -1, dtype=torch.int32)
    for row, one in enumerate(answers):
        assert one.experts is not None
        found[row, : len(one.experts)] = one.experts
    return found
