"""Text written by a run's model, with the experts that each layer chose for each token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.texts import continue_prompts
from expertmesh.models.decoder import CausalLM, EncoderDecoder
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import RoutingStats
from expertmesh.runs.open import LoadedModel
from expertmesh.text.stream import TextStream

_TOKENS = 120


@contextmanager
def watched(model: nn.Module) -> Iterator[list[tuple[int, RoutingStats]]]:
    """Context that collects (num_experts, RoutingStats) of every call of a MoE layer in the model, in order."""
    found: list[tuple[int, RoutingStats]] = []

    def keep(module: nn.Module, inputs: Any, output: tuple[Tensor, RoutingStats]) -> None:
        assert isinstance(module, MoELayer)
        found.append((module.num_experts, output[1]))

    handles = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, MoELayer)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def experts_of_tokens(model: CausalLM, ids: list[int]) -> list[list[list[tuple[int, float]]]]:
    """Experts that every layer chooses for every token of a text, and their routing weights.

    Args:
        ids: tokens, at least one.

    Returns:
        [layer][token][choice], as (expert, weight); choices of "no expert" are left out; [] for a dense model.
    """
    assert isinstance(model, nn.Module)
    cache = model.new_cache(batch_size=1, max_len=len(ids))
    ids_BS = torch.tensor([ids], device=model.device)
    with torch.no_grad(), watched(model) as layers:
        model.next_logits(ids_BS, token_mask_BS=None, cache=cache)
    found = []
    for num_experts, stats in layers:
        chosen = zip(stats.topk_expert_ids_TK.tolist(), stats.topk_weights_TK.tolist(), strict=True)
        found.append([[(e, round(w, 3)) for e, w in zip(*one, strict=True) if e < num_experts] for one in chosen])
    return found


def sample_of_run(opened: LoadedModel) -> list[dict[str, Any]]:
    """Sample text from the run's newest model, generated without a prompt.

    Returns:
        For every token its "text" and, per MoE layer, "experts" as (expert, weight) pairs; [] for an encoder-decoder.
    """
    model = opened.decoder
    if isinstance(model, EncoderDecoder):
        return []
    text = opened.text
    start = list(text.first_ids)
    room = min(_TOKENS, model.max_seq_len - len(start))
    with opened.precision.autocast():
        params = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=room)
        (output,) = continue_prompts(model, [start], params, text=text)
        ids = list(output.token_ids[: -1 if output.finish_reason == "stop" else None])
        if not ids:
            return []
        layers = experts_of_tokens(model, [*start, *ids])
    stream = TextStream(text.tokenizer)
    return [
        {"text": stream.feed(token), "experts": [layer[place] for layer in layers]}
        for place, token in enumerate(ids, len(start))
    ]
