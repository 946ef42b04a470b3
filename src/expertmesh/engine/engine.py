"""Inference engine: continuous batching over a paged KV cache."""

import atexit
import copy
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.config.sampling import SamplingParams
from expertmesh.config.values import check_type
from expertmesh.engine.answers import Answers
from expertmesh.engine.awaited import AnswerIterator, Awaited, one_at_a_time
from expertmesh.engine.block_pool import ROOT, BlockPool
from expertmesh.engine.captured import fastest_forward
from expertmesh.engine.chat import conversation_ids, prompts_of_conversations
from expertmesh.engine.checks import (
    check_asked,
    check_dtype_kept,
    check_ids,
    check_mode,
    check_model,
    check_no_folder,
    check_state,
    check_text,
    named_limit,
    one_for_each,
    params_for_each,
    prompts_of,
    room_for,
)
from expertmesh.engine.grammar import AnswerRules, Compiled
from expertmesh.engine.groups import GroupScheduler
from expertmesh.engine.kv_cache import PagedCache, num_blocks_of
from expertmesh.engine.opening import open_served
from expertmesh.engine.output import RequestOutput
from expertmesh.engine.parallel import EngineRanks, RankedRunner, as_parallel, share
from expertmesh.engine.request import Request, token_ids_of
from expertmesh.engine.request_adapters import LoadedAdapter, check_adapters, folders_by_name
from expertmesh.engine.runner import Runner
from expertmesh.engine.scheduler import Scheduler
from expertmesh.engine.stats import EngineStats, stats_of
from expertmesh.errors import ConfigError
from expertmesh.moe.expert_slots import PagingCounts
from expertmesh.moe.init import draw_seed
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.parallel.redundant_experts import PlacementCounts
from expertmesh.parallel.serving import as_plain, world_of
from expertmesh.runs.paged import paging_of
from expertmesh.text.format import TextFormat, text_format

Prompt = str | Seq[int]


class Engine:
    """Inference engine that answers many requests at once with one model; calls of several threads take turns.

    Args:
        model: a run directory, a hub folder, or a GPT in evaluation mode.
        tokenizer: tokenizer of a GPT; None: prompts are token ids, and answers have no text.
        end_ids: more end tokens than the model's and its text format's.
        config: options; None: defaults.
        parallel: a `ParallelConfig` or its options (`tp_degree`, `ep_degree`, `es_degree`, `timeout_s`), equal on all
            ranks, to share the model over torchrun's ranks: rank 0 takes requests, the others `follow`. A GPT is
            sharded in place, and must be equal on all ranks. None: this process alone.
        adapters: folders of peft's low-rank adapters by name, for requests to choose; see `load_adapter`.
        **options: fields of `EngineConfig`, instead of `config`.

    Raises:
        ConfigError: a value breaks a rule, or the model or an adapter cannot be served.
        CheckpointError: the folder or an adapter has no usable weights.

    Example:
        >>> engine = em.Engine(em.GPT(em.recipe("gpt-moe-test").model, seed=0).eval(), num_blocks=8)
        >>> (answer,) = engine.generate([[1, 2, 3]], em.SamplingParams(temperature=0, max_tokens=4))
        >>> len(answer.token_ids), answer.finish_reason
        (4, 'length')

    Attributes:
        model: the model.
        config: options.
        max_len: maximum tokens of a sequence, for which the cache has room.
        tokenizer: tokenizer of the model; None: prompts are token ids.
        text: text format of the model; None without a tokenizer.
        answer_rules: compiler of JSON schemas, regular expressions and grammars, usable from any thread beside the
            steps.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        end_ids: Seq[int] = (),
        config: EngineConfig | None = None,
        parallel: ParallelConfig | Mapping[str, Any] | EngineRanks | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"{next(iter(options))}: is given beside config; put it into the config")
        for what, value, kind in (
            ("config", config, EngineConfig),
            ("tokenizer", tokenizer, Tokenizer),
        ):
            check_type(what, value, (kind, type(None)), f"a {kind.__name__}")
        self.config = EngineConfig(**options) if config is None else config
        text = None
        self._ranks = parallel if isinstance(parallel, EngineRanks) else None
        told = None if parallel is None or self._ranks else as_parallel(parallel)
        if isinstance(model, str | Path):
            model, text, self._ranks = open_served(model, tokenizer, self.config, told)
            tokenizer = text.tokenizer
        else:
            check_no_folder(self.config)
        check_model(model, self.config, is_alone=told is None and self._ranks is None)
        if told is not None and self._ranks is None:
            self._ranks = share(model, told, world_of(told, device_type=model.device.type))
            as_plain(model)
        if (ranks := self._ranks) is not None:
            ranks.check(self.config)
        self.model, self.tokenizer = model, tokenizer
        self.max_len = self.config.max_len or model.max_seq_len
        if text is None and tokenizer is not None:
            text = text_format(tokenizer, model=model)
        self.text: TextFormat | None = text and replace(text, window=self.max_len)
        end_ids = token_ids_of(end_ids, what="end_ids")
        check_ids(end_ids, model.vocab_size, what="end_ids")
        known = model.end_ids if text is None else text.end_ids
        self._end_ids = frozenset({*end_ids, *known})
        self.answer_rules = AnswerRules(tokenizer, vocab_size=model.vocab_size, end_ids=self._end_ids)
        self._dtype: torch.dtype = model.embedding.weight.dtype
        device, dtype = model.device, autocast_dtype(model.device) or self._dtype
        tp, groups = (1, 1) if ranks is None else (ranks.degrees.tp, ranks.degrees.num_groups)
        num_blocks = num_blocks_of(self.config, model.config, self.max_len, dtype, tp_degree=tp)
        # keys and values of the last token are never needed
        self.max_len = min(self.max_len, num_blocks * self.config.block_size + 1)
        faster = fastest_forward(model, self.config, num_blocks=num_blocks, max_len=self.max_len)
        cache = PagedCache(
            model.config,
            has_spare=faster is not None and faster.pads,
            num_parts=tp,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            device=device,
            dtype=dtype,
        )
        self._answers = Answers(tokenizer)
        schedulers = [
            Scheduler(
                BlockPool(num_blocks, block_size=self.config.block_size),
                token_budget=self.config.token_budget,
                max_sequences=-(-self.config.max_sequences // groups),
                reuses_prefixes=self.config.prefix_caching,
                num_guesses=self.config.num_draft_tokens,
                guess=self._answers.guess,
            )
            for _ in range(groups)
        ]
        self._runner = Runner(model, cache, faster)
        self._scheduler: Scheduler | GroupScheduler = schedulers[0]
        if ranks is not None:
            self._runner = RankedRunner(model, cache, ranks, self.config)
            self._scheduler = GroupScheduler(schedulers)
            atexit.register(self.close)
        self._requests: dict[str, Request] = {}
        self.lock = threading.RLock()
        self._awaited = Awaited(self._requests, self.lock)
        self._arrivals = self._steps = 0
        try:
            for name, folder in folders_by_name(adapters).items() if self.leads else ():
                self.load_adapter(name, folder)
        except BaseException:  # the other ranks are in follow already
            self.close()
            raise

    def warm_up(self) -> None:
        """Capture all kinds of decode steps now, on a GPU (`compile` in `EngineConfig`); else do nothing."""
        self._runner.warm_up()

    @property
    def captured(self) -> str:
        """Decode steps that are captured on a GPU, with their memory, in words; empty: none are."""
        return "" if self._runner.faster is None else self._runner.faster.description

    @property
    def leads(self) -> bool:
        """Whether this process takes requests: a single process, or rank 0."""
        return self._ranks is None or self._ranks.leads

    def _check_leads(self, what: str) -> None:
        if not self.leads:
            raise ConfigError(f"{what} go to rank 0; call follow() on this one")

    @torch.no_grad()
    def follow(self) -> None:
        """Compute this rank's part of rank 0's steps until rank 0 closes the engine; for all other ranks.

        Raises:
            ConfigError: this process takes requests.
            CollectiveError: a rank is gone or late.
        """
        if self.leads or not isinstance(self._runner, RankedRunner):
            raise ConfigError("follow() is for the ranks behind the first; give this one requests")
        self._runner.follow()

    def close(self) -> None:
        """Let the other ranks return from `follow`. May be called again; does nothing in a single process."""
        if isinstance(self._runner, RankedRunner):
            self._runner.close()
            atexit.unregister(self.close)

    def check_ranks(self) -> None:
        """Raise CollectiveError if other ranks were lost since the last step (heartbeats detect it); never in a single
        process."""
        if isinstance(self._runner, RankedRunner):
            self._runner.check_together()

    @one_at_a_time
    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a low-rank adapter that requests can choose; requests without an adapter are unaffected.

        Adapters are W + s B A on matrices of attention, dense layers, shared and routed experts, saved by peft for a
        model of transformers or for `ExpertMeshForCausalLM`, or by `expertmesh.integrations.peft.save_adapters`. Steps
        are not recorded from now on.

        Args:
            name: unique name.
            folder: folder with adapter_config.json and adapter_model.safetensors.

        Raises:
            ConfigError: this rank is not the first; the name is taken; the folder has no adapter, or an unsupported one
                (DoRA, on the router or the vocabulary, on quantised or paged experts, over ranks that slice matmuls or
                move experts, on a model of transformers, ...); or another rank cannot read it.
            CheckpointError: a tensor is missing, extra, of another shape, or not finite; names it.

        Example:
            >>> engine = em.Engine("runs/mine", adapters={"poems": "adapters/poems"})
            >>> engine.load_adapter("code", "adapters/code")
            >>> engine.generate(["Roses", "def", "Once"], adapter=["poems", "code", None])
        """
        self._check_leads("adapters")
        if self._runner.adapters is None:
            is_whole = None if self._ranks is None else self._ranks.degrees.is_whole
            check_adapters(self.model, self.config, is_whole=is_whole)
        self._runner.load_adapter(name, folder)
        self._runner.faster = None

    @one_at_a_time
    def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            ConfigError: this rank is not the first, the adapter is unknown, or an unfinished request uses it.
        """
        self._check_leads("adapters")
        if busy := self.num_requests_of(name):
            raise ConfigError("adapter", repr(name), f"{busy} requests have it", "wait for them, or abort them")
        self._runner.unload_adapter(name)

    def num_requests_of(self, name: str) -> int:
        """Number of unfinished requests that have an adapter.

        Raises:
            ConfigError: the adapter is unknown.
        """
        root = self._adapter(name).root
        return sum(request.root == root for request in self._requests.values())

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the loaded adapters, by name."""
        known = self._runner.adapters
        return {} if known is None else {one.name: one.folder for one in known.all}

    def adapter_requests(self) -> dict[str, int]:
        """Number of requests so far per adapter."""
        known, begun = self._runner.adapters, self._scheduler.counters.requests
        return {} if known is None else {one.name: begun[one.root] for one in known.all}

    def _adapter(self, name: Any) -> LoadedAdapter:
        if self._runner.adapters is None:
            raise ConfigError("adapter", repr(name)[:60], "this engine has none", "load it first (load_adapter)")
        return self._runner.adapters.get(name)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or has an answer that ended and was not returned; see `step`."""
        return self._scheduler.has_work or self._awaited.has_kept

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> str:
        """Add a request; `step` computes it.

        Args:
            prompt: text, or token ids, to which no start tokens are added.
            params: sampling parameters; None: `SamplingParams()`.
            request_id: id, unique among unfinished requests; None: a number.
            adapter: name of the adapter; None: the model alone.

        Returns:
            The request's id.

        Raises:
            ConfigError: a value breaks a rule, or the request could never run; other requests are unaffected.
        """
        self._check_leads("requests")
        params = self.answer_rules.ready(params)  # before the lock: steps go on meanwhile
        with self.lock:
            return self._add(self._prompt_ids(prompt), params, request_id, adapter)

    def _add(self, ids: list[int], params: SamplingParams, request_id: str | None, adapter: str | None) -> str:
        ends, has_text = frozenset(params.stop_token_ids), self.tokenizer is not None
        guide = params.guide
        if not params.ignore_eos or guide is not None:
            ends |= self._end_ids
        check_asked(ids, params, self.model.vocab_size, has_text=has_text, end_ids=ends)
        chosen = None if adapter is None else self._adapter(adapter)
        if request_id is None:
            numbers = map(str, itertools.count(self._arrivals))
            request_id = next(name for name in numbers if not self._is_busy(name))
        check_type("request_id", request_id, str, "a string")
        if self._is_busy(request_id):
            raise ConfigError(f"request_id={request_id!r}: is still being answered; choose another")
        request = Request(
            request_id,
            tuple(ids),
            params,
            self._arrivals,
            room_for(self.model, ids, params.max_tokens, named_limit(self.max_len, self.model, self.config)),
            end_ids=ends,
            seed=draw_seed() if params.seed is None else params.seed,
            root=ROOT if chosen is None else chosen.root,
        )
        if guide is not None and isinstance(guide[1], Compiled):
            for sequence in request.sequences:
                sequence.rule = guide[1].rule()
        self._scheduler.add(request)
        self._arrivals += 1
        self._requests[request_id] = request
        self._answers.begin(request)
        return request_id

    def _is_busy(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._awaited

    @one_at_a_time
    def abort(self, request_id: str) -> list[RequestOutput]:
        """Abort a request in any state; one whose answers were returned, and an unknown one, are ignored.

        Returns:
            Its answers; unfinished ones get finish_reason "abort".
        """
        kept = self._awaited.take_of(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return kept
        for sequence in request.sequences:
            self._scheduler.finish(sequence, "abort")
        outputs = self._answers.of(request)
        self._answers.forget(request)
        self._awaited.deliver(outputs)
        return outputs

    @one_at_a_time
    def step(self) -> list[RequestOutput]:
        """Compute one step. After an error in it, unfinished answers are computed again from their tokens so far.

        Returns:
            Current state of every answer that got a token or ended; answers of a finished request are returned once,
            complete, and are then dropped. First come answers that ended in steps of `generate` and other iterators
            and that these did not await.

        Raises:
            ConfigError: the model is in training mode.
        """
        outputs = self._outputs()
        return [*self._awaited.take(), *outputs]

    @one_at_a_time
    def _step_of_iterator(self) -> None:
        """Compute one step, and keep for `step` what no iterator awaits."""
        self._awaited.keep(self._outputs())

    def _outputs(self) -> list[RequestOutput]:
        """Outputs of one step; after an error in it, running sequences are computed again."""
        check_mode(self.model)
        check_dtype_kept(self.model, self._dtype)
        try:
            return self._computed()
        except BaseException:
            # blocks that the step should have copied or written hold other values
            self._scheduler.forget_prefixes()
            raise

    def _computed(self) -> list[RequestOutput]:
        """Outputs of one step."""
        step = self._scheduler.schedule()
        if not step.chunks:
            return []
        self._answers.note_begin(step, time.perf_counter())
        result = self._runner.run(step)
        self._steps += 1
        outputs = self._answers.settle(step, result, self._scheduler)
        for name in {output.request_id for output in outputs}:
            if self._requests[name].is_finished:
                self._answers.forget(self._requests.pop(name))
        self._awaited.deliver(outputs)
        return outputs

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        told: Callable[[int], None] | None = None,
        adapter: str | Seq[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts and return when all answers have ended; other requests continue meanwhile, and `step` returns
        their answers.

        Args:
            prompts: one or several texts or lists of token ids.
            params: parameters of all prompts, or one for each.
            told: called with the number of finished requests, for progress bars.
            adapter: name of the adapter of all prompts, or one (or None) for each.

        Returns:
            The n answers of the first prompt, then of the next, and so on.

        Raises:
            ConfigError: see `add`; raised before any computation, with no request left.
        """
        found: dict[int, list[RequestOutput]] = {}
        with closing(self.as_they_end(prompts, params, adapter=adapter)) as ended:
            for place, outputs in ended:
                found[place] = outputs
                if told is not None:
                    told(len(found))
        return [output for place in sorted(found) for output in found[place]]

    def chat(
        self,
        messages: Any,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        adapter: str | Seq[str | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; like `generate` with the prompts that `chat_ids` makes.

        Args:
            messages: one conversation or several.
            params: see `generate`.
            adapter: see `generate`.
            **options: see `chat_ids`.

        Example:
            >>> engine = em.Engine("models/Qwen3-30B-A3B")
            >>> engine.chat([{"role": "user", "content": "What is 2 + 2?"}], em.SamplingParams(temperature=0))
        """
        prompts = prompts_of_conversations(self.text, messages, **options)
        return self.generate(prompts, params, adapter=adapter)

    def chat_ids(self, messages: Seq[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, for `add` and `stream`, by the model's chat template or our own format.

        Args:
            messages: messages with a role ("system", "user", "assistant", "tool") and a content (text); a
                template gets other fields, too.
            **options: `add_generation_prompt` (False: no beginning of an answer), `continue_final_message` (True: the
                answer continues the last message), `chat_template_kwargs` (further variables of the template), `tools`
                (functions that may be called, as OpenAI's interface has them).

        Raises:
            ConfigError: the model knows no conversations, an argument is invalid, or the template refuses it.
        """
        return conversation_ids(self.text, messages, **options)

    def as_they_end(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        adapter: str | Seq[str | None] | None = None,
    ) -> AnswerIterator[tuple[int, list[RequestOutput]]]:
        """Like `generate`, but yields each prompt's index and answers once these have ended, whoever makes the steps.

        Closing or dropping the iterator aborts the others.

        Raises:
            ConfigError: see `generate`; raised at once.
        """
        many, names = prompts_of(prompts), list[str]()
        each = params_for_each(params, len(many))
        chosen = one_for_each("adapter", adapter, len(many))
        ready = [self.answer_rules.ready(one) for one in each]  # before the lock, as in `add`
        with self.lock:
            try:
                for prompt, one, its_adapter in zip(many, ready, chosen, strict=True):
                    names.append(self.add(prompt, one, adapter=its_adapter))
            except BaseException:  # also if a later prompt is refused
                list(map(self.abort, names))
                raise
            return self._awaited.as_they_end(names, step=self._step_of_iterator, abort=self.abort)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> AnswerIterator[RequestOutput]:
        """Answer a prompt as a stream: yields the answer after each step with new tokens.

        Steps that others make meanwhile count as one. Closing or dropping the iterator aborts the request. Streamed
        text is never retracted: a possible start of a stop string is held back.

        Raises:
            ConfigError: see `add`; raised at once.
        """
        params = self.answer_rules.ready(params)
        with self.lock:
            name = self.add(prompt, params, adapter=adapter)
            return self._awaited.streamed(name, step=self._step_of_iterator, abort=self.abort)

    @one_at_a_time
    @torch.no_grad()
    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copy new weights into the model; the prefix cache is cleared, and unfinished answers continue with the new
        weights.

        Args:
            state: tensors by their names in `model.state_dict()`; may be partial.

        Raises:
            ConfigError: a name, a shape or a kind of number differs from the model's, a tensor has no numbers in one
                piece (meta, sparse, sharded), or experts are in slots; then nothing is changed.
        """
        if state and self._ranks is not None:
            raise ConfigError("update_weights over ranks: each has a part of every tensor; make another engine")
        own = self.model.state_dict()
        if state and self.expert_paging():
            raise ConfigError(
                "update_weights of an engine with expert_slots: it reads experts from their files, which stay as they "
                "are; save the new weights, and open them by another engine"
            )
        check_state(state, own)
        try:
            for name, tensor in state.items():
                own[name].copy_(tensor)
        finally:  # what is half copied is not to be mixed with what the former weights computed
            self._scheduler.forget_prefixes()

    def stats(self) -> EngineStats:
        """Statistics for logs and metrics."""
        return stats_of(self._scheduler, steps=self._steps, new_tokens=self._answers.num_tokens)

    def expert_load(self) -> list[list[int]]:
        """Number of tokens that each expert has served so far, per MoE layer."""
        return [load[:-1] for load in self._runner.loads()]

    def expert_placement(self) -> PlacementCounts | None:
        """Counters of expert placement over ranks; None without `enable_eplb`."""
        runner = self._runner
        placed = runner.placed if isinstance(runner, RankedRunner) else None
        return None if placed is None else copy.deepcopy(placed.counts)

    def expert_paging(self) -> list[PagingCounts]:
        """Counters of each layer's expert slots; empty if all experts are on the device."""
        return [replace(paging.counts) for paging in paging_of(self.model)]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return token_ids_of(prompt)
        if self.text is None:
            raise ConfigError("prompt: is text, and the engine has no tokenizer; give token ids")
        check_text(prompt)
        return self.text.prompt_ids(prompt) if prompt else []
