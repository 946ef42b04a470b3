"""Differentiable logprobs of given tokens, bitwise equal to the engine's when it sampled them."""

from collections.abc import Sequence, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from expertmesh.engine.checks import ids_of_prompts, prompts_of
from expertmesh.engine.lockstep import pad_prompts
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import evaluating
from expertmesh.models.replay import replaying


def token_logprobs(
    model: Any, ids: Sequence[Sequence[int]], *, routing: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Logprob of every token after the first, given the tokens before it; differentiable.

    The model computes as in evaluation: dropless, without dropout and noise. With batch_invariant in its config the
    results are bitwise equal to the logprobs that `Engine(model, deterministic=True)` returns for the same tokens, in
    any batch, so the ratio of the policy to the sampling policy is exactly 1. Gradients are computed as usual. Without
    it they are equal up to rounding, which may route a token to other experts than in the engine, unless `routing` is
    given.

    Args:
        model: a GPT in training or evaluation mode; the mode is restored.
        ids: token ids of each sequence, prompt and answer, at least two per sequence; lists or arrays, or (sequences,
            length) of one tensor.
        routing: expert ids to replay, (length - 1, layers, K) per sequence, as in `RequestOutput.routed_experts`;
            routing weights are computed at these experts, so routers get gradients. None: the routers choose.

    Returns:
        For each sequence (length - 1,) logprobs: log-softmax of raw logits, FP32 (FP64 for an FP64 model).

    Raises:
        ConfigError: a sequence has fewer than two tokens or is too long for the model, or routing is of another model
            or other sequences.

    Example:
        >>> model = em.GPT(em.recipe("gpt-moe-test").model, seed=0)
        >>> (scores,) = em.token_logprobs(model, [[5, 6, 7]])
        >>> scores.shape, scores.requires_grad
        (torch.Size([2]), True)
    """
    if not len(ids := prompts_of(ids)):
        return []
    ids = ids_of_prompts(ids, model.vocab_size, what="sequence")
    if short := [one for one in ids if len(one) < 2]:
        raise ConfigError(f"ids: {short[0]} has no token behind the first; give two or more")
    length = max(map(len, ids))
    if length > model.max_seq_len:
        raise ConfigError(f"a sequence of {length} tokens: must be at most max_seq_len={model.max_seq_len}; shorten it")
    if routing is not None:
        _check_routing(model, ids, routing)
    ids_BS, mask_BS = pad_prompts(ids, "right", device=model.device)
    rows = [torch.arange(len(one) - 1) + row * length for row, one in enumerate(ids)]
    rows_R = torch.cat(rows).to(model.device)
    with evaluating(model), _replayed(model, routing, length):
        output = model(
            ids_BS,
            token_mask_BS=mask_BS,
            logit_rows_R=rows_R,
            targets_R=ids_BS.flatten()[rows_R + 1],
            capacity_factor=model.config.moe.dropless_factor,
        )
    return list(output.logprobs_R.split([len(one) - 1 for one in ids]))


def _check_routing(model: Any, ids: Sequence[Sequence[int]], routing: Sequence[Tensor]) -> None:
    is_list = isinstance(routing, Sized) and getattr(routing, "ndim", 1) != 0
    count = len(routing) if is_list else 1
    if count != len(ids):
        raise ConfigError(
            f"routing: {count} for {len(ids)} sequences; give one for each, as answers have it in routed_experts"
        )
    counts = [num for num in model.config.experts_per_layer() if num]
    for place, (one, chosen) in enumerate(zip(ids, routing, strict=True)):
        wanted = len(one) - 1, len(counts)
        if not isinstance(chosen, Tensor) or chosen.ndim != 3 or chosen.shape[:2] != wanted:
            given = tuple(chosen.shape) if isinstance(chosen, Tensor) else type(chosen).__name__
            raise ConfigError(
                f"routing[{place}]: is {given}, must be ({wanted[0]}, {wanted[1]}, K) expert ids of a sequence of "
                f"{len(one)} tokens; give routed_experts of the answer whose tokens these are"
            )
        for layer, num in enumerate(counts):
            own = chosen[:, layer]
            if bool(((own < -1) | (own > num)).any()):
                raise ConfigError(
                    f"routing[{place}]: an expert id of layer {layer} is not in 0 ... {num - 1}; give routed_experts "
                    "of this model"
                )


def _replayed(model: Any, routing: Sequence[Tensor] | None, length: int) -> Any:
    """Context in which MoE layers use the given expert ids; padding tokens get no expert."""
    if routing is None:
        return nullcontext()
    counts = [num for num in model.config.experts_per_layer() if num]
    found = (_choice(routing, i, length, none=num) for i, num in enumerate(counts))
    return replaying(model, [ids_TK.to(model.device) for ids_TK in found])


def _choice(routing: Sequence[Tensor], layer: int, length: int, *, none: int) -> Tensor:
    """(B * S, K) expert ids of a layer, whose K may be smaller than the largest K of all layers."""
    own = [one[:, layer] for one in routing]
    width = max(int((one >= 0).any(0).sum()) for one in own)
    ids_BSK = torch.full((len(own), length, width), none, dtype=torch.int64)
    for row, one in enumerate(own):
        ids_BSK[row, : len(one)] = one[:, :width]
    return ids_BSK.flatten(0, 1)
