"""Outputs of the engine."""

from dataclasses import dataclass, field

from torch import Tensor

from expertmesh.engine.request import FinishReason
from expertmesh.engine.timing import Timing

NOT_FINITE = (
    "logits after {} tokens are not finite: the weights are damaged, or the compute dtype is too small for them; use "
    "another "
    "checkpoint or float32"
)
"""Error of an answer whose logits are not finite, formatted with the number of tokens before it."""
NO_MAXIMUM = (
    "logits after {} tokens have no finite maximum once penalties, logit_bias and masks are applied: no token can be "
    "drawn; "
    "choose a repetition_penalty nearer to 1, or mask fewer tokens"
)
"""Error of an answer of which no token can be drawn, formatted with the number of tokens before it."""


@dataclass(frozen=True)
class Logprob:
    """Logprobs at one token: log-softmax of the raw logits, in FP32."""

    token_id: int  # the actual token
    logprob: float
    # the requested number of most likely tokens with their logprobs, most likely first
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """Answer to a prompt.

    Attributes:
        request_id: id of the request.
        index: index among the request's n answers.
        prompt_ids: token ids of the prompt.
        token_ids: generated ids, including the one that ended the answer.
        text: generated text before a stop string; "" for an engine without a tokenizer.
        finish_reason: "stop" (end token or stop), "length", "abort" or "error"; None: not finished.
        error: error message, if finish_reason is "error".
        logprobs: logprobs of each generated token, if requested.
        prompt_logprobs: logprobs of each prompt token, if requested; None for the first token.
        routed_experts: (tokens - 1, MoE layers, K) int64 expert ids of prompt and answer so far, without the last
            token, if requested; each row as in the pass that gave the logprob of the next token.
        num_cached_tokens: prompt tokens found in the prefix cache.
        stop_string: stop string before which the text ends; None: something else ended it.
        timing: times of the answer; None for `Lockstep`, which has no queue and takes no times.

    Example:
        >>> engine = em.Engine(em.GPT(em.recipe("gpt-moe-test").model, seed=0).eval(), num_blocks=8)
        >>> (answer,) = engine.generate([[1, 2, 3]], em.SamplingParams(max_tokens=2, logprobs=0))
        >>> isinstance(answer, em.RequestOutput), len(answer.logprobs)
        (True, 2)
    """

    request_id: str
    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = field(default=None, repr=False)
    routed_experts: Tensor | None = field(default=None, repr=False)
    num_cached_tokens: int = 0
    stop_string: str | None = None
    timing: Timing | None = field(default=None, repr=False, compare=False)
