"""What the engine answers."""

from dataclasses import dataclass, field

from torch import Tensor

from expertmesh.engine.request import FinishReason
from expertmesh.engine.timing import Timing

NOT_FINITE = (
    "logits after {} tokens are not finite: the weights are damaged, or the compute dtype is too small for them; use another "
    "checkpoint or float32"
)
"""What an answer ends with whose model is broken, after so many tokens."""


@dataclass(frozen=True)
class Logprob:
    """Logprobs of one token: log-softmax of the raw logits, in FP32.

    Attributes:
        token_id: the token that is there.
        logprob: its logprob.
        top: the most likely tokens and theirs, most likely first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """One answer to a prompt.

    Attributes:
        request_id: of the request.
        index: which of its n answers.
        prompt_ids: token ids of the prompt.
        token_ids: generated ids, the one that ended the answer included.
        text: their text, before a stop string; "" of an engine without a tokenizer.
        finish_reason: "stop" (end token or stop), "length", "abort" or "error"; None: it goes on.
        error: why, where finish_reason is "error".
        logprobs: of each generated token, where they were asked for.
        prompt_logprobs: of each prompt token behind the first, where they were asked for; None stands for the first.
        routed_experts: (tokens - 1, MoE layers, K) int64 expert ids of prompt and answer so far but its last token, where asked for.
        num_cached_tokens: prompt tokens that were found in the cache.
        timing: when it was asked for, admitted and computed; None where nothing waits, and no time is taken.

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
    timing: Timing | None = field(default=None, repr=False, compare=False)
