"""Samples of a model in training: what it answers to the first validation prompts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.texts import continue_prompts
from expertmesh.models.decoder import EncoderDecoder, evaluating
from expertmesh.models.task import Data, Task, named_tensors
from expertmesh.runs.precision import Precision
from expertmesh.text.tokenizer import load_tokenizer

_COUNT = 3
_TOKENS = 48
_PROMPT_TOKENS = 16
"""Tokens of a prompt that is the beginning of a text, not of a conversation."""


def training_samples(task: Task, model: nn.Module, data: Data, precision: Precision) -> Sequence[Mapping[str, Any]]:
    """Answers of the last step where the task samples; else greedy answers of a model to the first validation prompts.

    No random number is drawn.

    Returns:
        For each sample its "prompt" and "text"; [] for an encoder-decoder.
    """
    if task.samples:
        return task.samples
    decoder: Any = task.builder.decoder(model)
    if isinstance(decoder, EncoderDecoder):
        return []
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    prompts = list(_prompts(data, most=decoder.max_seq_len - 1))
    room = min(_TOKENS, decoder.max_seq_len - max(map(len, prompts), default=0))
    params = SamplingParams(temperature=0.0, max_tokens=room)
    with evaluating(model), precision.autocast(), torch.no_grad():
        outputs = continue_prompts(decoder, prompts, params)
    return [
        {
            "prompt": tokenizer.decode(ids, skip_special_tokens=False),
            "text": tokenizer.decode(list(output.token_ids)),
        }
        for ids, output in zip(prompts, outputs, strict=True)
    ]


def _prompts(data: Data, *, most: int) -> Iterator[list[int]]:
    """Tokens of each validation sample before the first one that is learned; of a text its first tokens."""
    for batch in data.validation(_COUNT, 1):
        ids_S: Tensor = batch[0].flatten(0, -2)[0]
        size = min(_PROMPT_TOKENS, len(ids_S))
        more = named_tensors(batch)
        if "counts" in more:
            size = int(more["counts"].flatten(0, -2)[0].int().argmax()) + 1
        yield ids_S[:size][-most:].tolist()
