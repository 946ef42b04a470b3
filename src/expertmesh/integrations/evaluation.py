"""lm-evaluation-harness on a model in this process: a model class for it, and tasks from local files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.config.evaluation_task import check_task
from expertmesh.config.sampling import SamplingParams
from expertmesh.config.values import WHOLE, Number, type_of
from expertmesh.engine.lockstep import pad_prompts
from expertmesh.engine.texts import continue_prompts
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import evaluating
from expertmesh.models.gpt.model import GPT
from expertmesh.text.format import text_format

_NEW_TOKENS = 256
_KNOWN = ("do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks")

Pair = tuple[Any, list[int], list[int]]
"""Cache key of a score, context tokens, continuation tokens."""


class ExpertMeshLM(TemplateLM):
    """GPT with lm-evaluation-harness's model interface: likelihoods of continuations and of texts, and generation up to
    a stop.

    Args:
        model: the model; the compute dtype is its weights' or autocast's.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, *, end_id: int, batch_size: int = 8) -> None:
        super().__init__()
        if not isinstance(model, GPT):
            raise ConfigError(
                f"{type_of(model)}: lm-evaluation-harness asks for likelihoods, which a gpt has; use a run of one"
            )
        Number(1, fix="use 1 or more", types=WHOLE).check("batch_size", batch_size)
        self.model, self.tokenizer_file = model, tokenizer
        self.end_id, self.batch_size = end_id, batch_size
        self._text = text_format(tokenizer, model=model)

    @property
    def eot_token_id(self) -> int:
        """End-of-text token."""
        return self.end_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context."""
        return self._text.first_ids[-1]

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.model.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        """Name under which requests are cached."""
        return "expertmesh"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text, after the model's start tokens unless add_special_tokens is False."""
        ids: list[int] = self.tokenizer_file.encode(string, add_special_tokens=False).ids
        start = self._text.start_ids
        puts = add_special_tokens is not False and tuple(ids[: len(start)]) != start
        return [*start, *ids] if puts else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation given its context, dropless, and whether it is the greedy one."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for places in _groups(order, self.batch_size):
            batch = [requests[i] for i in places]
            for place, answer in zip(places, self._scores(batch), strict=True):
                found[place] = answer
                if requests[place][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], answer)
        return found

    def _scores(self, batch: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        for _, _, continuation in batch:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens: the model reads at most {self.max_length}; shorten "
                    "the task's answers"
                )
        # truncated on the left to the model's length; the last token is predicted only
        rows = [(before + after)[-(self.max_length + 1) :][:-1] for _, before, after in batch]
        ids_BS, token_mask_BS = pad_prompts(rows, "right", device=self.model.device)
        factor = self.model.config.moe.dropless_factor
        with evaluating(self.model), torch.no_grad():
            logits_BSV = self.model(ids_BS, token_mask_BS=token_mask_BS, capacity_factor=factor).logits_BSV
        for row, (_, _, continuation), logits_SV in zip(rows, batch, logits_BSV, strict=True):
            yield _score(logits_SV[len(row) - len(continuation) : len(row)], continuation)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, with every token scored once, in windows of the model's length."""
        texts = [request.args[0] for request in requests]
        windows: list[tuple[int, Pair]] = []
        for place, text in enumerate(texts):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(place, (None, *make_disjoint_window(pair))) for pair in rolling]
        sums = [0.0] * len(texts)
        scores = self._loglikelihood_tokens([pair for _, pair in windows])
        for (place, _), (score, _) in zip(windows, scores, strict=True):
            sums[place] += score
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each text until a stop, the end of the text or the maximum number of tokens; each text has its own
        seed."""
        found: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        num_done = 0
        for places in groups.values():
            options = requests[places[0]].args[1]
            contexts = [requests[i].args[0] for i in places]
            texts = self._continued(contexts, options, seed=num_done)
            num_done += len(places)
            for place, text in zip(places, texts, strict=True):
                found[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return found

    def _continued(self, contexts: Sequence[str], options: dict[str, Any], *, seed: int) -> list[str]:
        if unknown := sorted(set(options) - set(_KNOWN)):
            raise ConfigError(
                f"generation_kwargs.{unknown[0]}={options[unknown[0]]}: is none of {', '.join(_KNOWN)}; leave it out"
            )
        most = options.get("max_gen_toks", _NEW_TOKENS)
        room = self.max_length - most
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={most}: leaves no room for a prompt in the model's {self.max_length} tokens; lower it"
            )
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        temperature = float(options.get("temperature") or 0.0)
        draws = options.get("do_sample", temperature > 0) and temperature > 0
        params = SamplingParams(
            temperature=temperature if draws else 0.0,
            top_k=options.get("top_k") or None,
            top_p=options.get("top_p") or None,
            seed=seed,
            max_tokens=most,
            stop=tuple(stop for stop in stops if stop),
            stop_token_ids=(self.end_id,),
        )
        prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-room:] for text in contexts]
        outputs = continue_prompts(self.model, prompts, params, text=self._text, batch_size=self.batch_size)
        return [output.text for output in outputs]


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    tasks: Sequence[str | Path],
    *,
    end_id: int,  # end-of-text token
    batch_size: int = 8,  # number of sequences at a time
    num_fewshot: int | None = None,  # examples before each question; None: as in the task
    limit: int | None = None,  # maximum number of questions per task; None: all
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness from local files; nothing is downloaded.

    Args:
        tasks: YAML task files of lm-evaluation-harness, whose data are local files (relative to the working folder).

    Returns:
        lm-evaluation-harness' results: "results" by task, "versions", "configs" and more.
    """
    for task in tasks:
        check_task(Path(task))
    judge = ExpertMeshLM(model, tokenizer, end_id=end_id, batch_size=batch_size)
    datasets.disable_progress_bars()
    found = simple_evaluate(
        judge,
        tasks=[str(task) for task in tasks],
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None  # None on other ranks only
    return dict(found)


def _groups(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (places[start : start + size] for start in range(0, len(places), size))


def _score(logits_CV: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    logp_CV = torch.log_softmax(logits_CV.float(), dim=1)
    ids_C = torch.tensor(continuation, device=logits_CV.device)
    is_greedy = bool((logp_CV.argmax(1) == ids_C).all())
    return float(logp_CV.gather(1, ids_C[:, None]).sum()), is_greedy
