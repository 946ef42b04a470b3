"""Batched beam search over an encoder-decoder with a key-value cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.values import WHOLE, Number, type_of
from expertmesh.engine.checks import ids_of_prompts, room_for
from expertmesh.engine.lockstep import pad_prompts
from expertmesh.engine.output import NOT_FINITE
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.decoder import BeamCache, EncoderDecoder, evaluating
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.inference import broadcast_from_rank0

MOST_BEAMS = 1000
_MOST_PENALTY = 10  # larger powers of lengths overflow


@dataclass(frozen=True)
class Hypothesis:
    """Output of beam search for one source."""

    ids: list[int]  # tokens of the output, without the start and the end
    score: float  # log probability, with the end token, divided by the length penalty; larger is better
    is_finished: bool  # whether it ended with the end token; False: it was cut off at the maximum length


@dataclass
class _Hypotheses:
    """Best hypotheses so far of every source, sorted: (B, K) scores, -inf for empty places, and (B, K, length)
    tokens."""

    scores_BK: Tensor
    ids_BKS: Tensor

    def best_of(self, scores_BN: Tensor, ids_BNS: Tensor, count: int) -> "_Hypotheses":
        """The best `count` of these hypotheses and new ones, which may be longer."""
        longer = ids_BNS.shape[2] - self.ids_BKS.shape[2]
        mine = F.pad(self.ids_BKS, (0, longer), value=-1)
        scores, order = torch.cat((self.scores_BK, scores_BN), 1).topk(count, dim=1)
        ids = torch.cat((mine, ids_BNS), 1)
        return _Hypotheses(scores, _rows(ids, order))


def length_penalty_of(length: int, alpha: float) -> float:
    """Length penalty ((5 + length) / 6)^alpha, by which log probabilities are divided (Wu et al. 2016, eq. 14)."""
    return float(((5 + length) / 6) ** alpha)


@torch.no_grad()
def beam_search(
    model: EncoderDecoder,  # the encoder-decoder; its cache must be an `expertmesh.models.decoder.BeamCache`
    sources: Sequence[Sequence[int]],  # token ids of each source, none of them empty
    *,
    start: Sequence[int],  # ids that every output begins with
    end_id: int,  # id that ends an output
    num_beams: int = 5,  # unfinished outputs kept for each source; 1 without a length penalty: greedy decoding
    length_penalty: float = 1.0,
    max_tokens: int | Sequence[int] | None = None,
) -> list[Hypothesis]:
    """The best output found for each source.

    A source is done when it has `num_beams` finished outputs and no unfinished one can still score higher than the
    worst of them at any length. Synchronises with the device once per token.

    Args:
        length_penalty: alpha of `length_penalty_of`, from 0 to 10; 0: plain log probabilities, which favour short
            outputs.
        max_tokens: maximum tokens of an output, with the end, for all sources or for each; None: limited by the model's
            context.

    Returns:
        One hypothesis per source: the best finished one, or, if there is none, the best that was cut off.
    """
    Number(1, MOST_BEAMS, "5 is usual", types=WHOLE).check("num_beams", num_beams)
    Number(0, _MOST_PENALTY, "1 is usual").check("length_penalty", length_penalty)
    sources = ids_of_prompts(sources, model.vocab_size, what="source")
    longest = max(map(len, sources))
    if longest > model.max_source_len:
        raise ConfigError(f"source of {longest} tokens: the model reads at most {model.max_source_len}; shorten it")
    given = max_tokens if isinstance(max_tokens, Sequence) else [max_tokens] * len(sources)
    if len(given) != len(sources):
        raise ConfigError(f"max_tokens: {len(given)} for {len(sources)} sources; give one for all, or one per source")
    room = {most: room_for(model, start, most) for most in set(given)}
    limits = [room[most] for most in given]
    with evaluating(model):
        return _search(model, sources, list(start), end_id, num_beams, length_penalty, limits)


def _search(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    start: list[int],
    end_id: int,
    K: int,
    alpha: float,
    limits: Sequence[int],
) -> list[Hypothesis]:
    B, device, steps = len(sources), model.device, max(limits)
    cache = model.new_cache(batch_size=B, max_len=len(start) + steps)
    if not isinstance(cache, BeamCache):
        raise ConfigError(f"{type_of(cache)} has no beams; give one whose cache can branch")
    source_BS, source_mask_BS = pad_prompts(sources, "right", device=device)
    model.encode(source_BS, token_mask_BS=source_mask_BS, cache=cache)
    cache.branch(K)
    new_RS = torch.tensor([start] * (B * K), device=device)
    first_row_B1 = torch.arange(0, B * K, K, device=device)[:, None]
    limits_B = torch.tensor(limits, device=device)
    penalties = [length_penalty_of(limit, alpha) for limit in limits]
    penalties_B = torch.tensor(penalties, dtype=torch.float64, device=device)
    scores_BK = torch.full((B, K), float("-inf"), device=device)
    none = torch.empty(B, K, 0, dtype=torch.int64, device=device)
    finished = _Hypotheses(scores_BK, none)
    # the best unfinished output of each source at its maximum length
    cut = _Hypotheses(scores_BK[:, :1], none[:, :1])
    # all beams are equal at first, so only the first one starts with a score
    running = _Hypotheses(F.pad(scores_BK[:, 1:], (1, 0)), none)
    from_rank0 = broadcast_from_rank0(model)
    for step in range(steps):
        logits_RV = model.next_logits(new_RS, token_mask_BS=None, cache=cache)
        logp_BKV = logits_RV.to(accumulate_dtype(logits_RV.dtype)).log_softmax(-1).view(B, K, -1)
        total_BKV = running.scores_BK[..., None] + logp_BKV
        # At most K of the 2 K candidates are ends, one per beam. An end finishes an output only if it is among the best
        # K.
        scores_BN, flat_BN = map(from_rank0, total_BKV.flatten(1).topk(2 * K, dim=1))
        beam_BN, token_BN = flat_BN // logp_BKV.shape[2], flat_BN % logp_BKV.shape[2]
        is_end_BN = token_BN == end_id
        ids_BNS = torch.cat((_rows(running.ids_BKS, beam_BN), token_BN[..., None]), 2)
        ended_BK = (scores_BN[:, :K] / length_penalty_of(step + 1, alpha)).masked_fill(
            ~is_end_BN[:, :K] | (limits_B[:, None] <= step), float("-inf")
        )
        finished = finished.best_of(ended_BK, ids_BNS[:, :K], K)
        scores_BK, order_BK = scores_BN.masked_fill(is_end_BN, float("-inf")).topk(K, dim=1)
        running = _Hypotheses(scores_BK, _rows(ids_BNS, order_BK))
        at_limit_B1 = (limits_B == step + 1)[:, None]
        cut = cut.best_of(scores_BK[:, :1].masked_fill(~at_limit_B1, float("-inf")), running.ids_BKS[:, :1], 1)
        can_be_B = scores_BK[:, 0] / penalties_B.to(scores_BK.dtype)
        is_done_B = (can_be_B <= finished.scores_BK[:, -1]) | (limits_B <= step + 1)
        is_bad, is_done = torch.stack((scores_BN.isnan().any(), is_done_B.all())).tolist()
        if is_bad:
            raise CheckpointError(NOT_FINITE.format(cache.length))
        if is_done:
            break
        cache.reorder((first_row_B1 + beam_BN.gather(1, order_BK)).flatten())
        new_RS = running.ids_BKS[:, :, -1].reshape(B * K, 1)
    return _best(cut, finished, penalties)


def _best(cut: _Hypotheses, finished: _Hypotheses, penalties: Sequence[float]) -> list[Hypothesis]:
    found = []
    ended, unfinished = finished.scores_BK[:, 0].tolist(), cut.scores_BK[:, 0].tolist()
    for row, score in enumerate(ended):
        is_finished = score > float("-inf")
        ids = [i for i in (finished if is_finished else cut).ids_BKS[row, 0].tolist() if i >= 0]
        if is_finished:
            found.append(Hypothesis(ids[:-1], score, True))
        else:
            found.append(Hypothesis(ids, unfinished[row] / penalties[row], False))
    return found


def _rows(ids_BKS: Tensor, which_BN: Tensor) -> Tensor:
    """Rows of the second axis, (B, N, S)."""
    return ids_BKS.gather(1, which_BN[..., None].expand(-1, -1, ids_BKS.shape[2]))
