"""Logprobs of given tokens with gradients: the same bits that the engine gave when it drew them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.models.decoder import evaluating
from expertmesh.ops.sampling import logprobs


def token_logprobs(model: Any, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logprob of every token behind the first one, given those before it; differentiable.

    The model computes as in evaluation: nothing is dropped and nothing is drawn. With batch_invariant in its config these are,
    to the bit, the logprobs that `Engine(model, deterministic=True)` returns for the same tokens, whatever batch they were
    drawn in; the gradients are ordinary ones. So the ratio of a policy to the one that has just written is exactly 1.

    Args:
        model: a GPT, in training or evaluation mode, which is put back.
        ids: token ids of each sequence, prompt and answer; two or more each, of any lengths.

    Returns:
        For each sequence (length - 1,) logprobs: log-softmax of raw logits, FP32 (FP64 of an FP64 model).

    Raises:
        ConfigError: a sequence of fewer than two tokens, or longer than the model's.

    Example:
        >>> model = em.GPT(em.recipe("gpt-moe-test").model, seed=0)
        >>> (scores,) = em.token_logprobs(model, [[5, 6, 7]])
        >>> scores.shape, scores.requires_grad
        (torch.Size([2]), True)
    """
    if short := [list(one) for one in ids if len(one) < 2]:
        raise ConfigError(f"ids: {short[0]} has no token behind the first; give two or more")
    length = max(map(len, ids), default=0)
    if length > model.max_seq_len:
        raise ConfigError(
            f"a sequence of {length} tokens: must be at most max_seq_len={model.max_seq_len}; shorten it"
        )
    if not ids:
        return []
    ids_BS = torch.zeros(len(ids), length, dtype=torch.int64, device=model.device)
    mask_BS = torch.zeros(len(ids), length, dtype=torch.bool, device=model.device)
    for row, one in enumerate(ids):
        ids_BS[row, : len(one)] = torch.tensor(list(one), device=model.device)
        mask_BS[row, : len(one)] = True
    whole = bool(mask_BS.all())
    with evaluating(model):
        output = model(
            ids_BS,
            token_mask_BS=None if whole else mask_BS,
            capacity_factor=model.config.moe.dropless_factor,
        )
    scores_BSV = logprobs(output.logits_BSV[:, :-1])
    scores_BS = scores_BSV.gather(-1, ids_BS[:, 1:, None])[..., 0]
    return [scores_BS[row, : len(one) - 1] for row, one in enumerate(ids)]
