"""Engine over ranks: rank 0 has the requests, plans every step, and broadcasts the inputs.

    rank 0: Scheduler of each group -> StepBatch of each group -> broadcast -> its own group's part -> logits of all
    rows -> sample
    others:                                                       receive   -> their group's part   -> rows of hidden
        states to rank 0

A step is one broadcast of JSON, or two where it is longer than `_BYTES`. Block tables are sent once, then only
their changes. Between steps rank 0 sends heartbeats, so that collectives do not time out while there are no requests.
"""

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.comm.collectives import all_reduce, broadcast_
from expertmesh.comm.group import RankGroup
from expertmesh.comm.world import World
from expertmesh.config.engine import EngineConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.config.values import check_type
from expertmesh.engine.groups import JointStep
from expertmesh.engine.kv_cache import PagedCache
from expertmesh.engine.logits_rows import RowNumbers, RunnerOutput, WantedExperts
from expertmesh.engine.packed import packed
from expertmesh.engine.request import Sequence, State
from expertmesh.engine.runner import Runner, batch_of, runs_of
from expertmesh.engine.scheduler import Step
from expertmesh.engine.step_tensors import BatchChunk, StepBatch
from expertmesh.errors import CollectiveError, ConfigError, text_of
from expertmesh.models.sharing import spread_for_engine
from expertmesh.ops.op_set import OpSet
from expertmesh.parallel.experts.coordinated import ServingGroups, StepSizes
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.redundant_experts import RedundantExperts
from expertmesh.parallel.serving import ONE_PROCESS, ServingDegrees, gather_home, world_of
from expertmesh.runs.open import LoadedModel, device_of, open_model
from expertmesh.runs.run_dir import Run

_BYTES = 4096
"""Bytes of a message with its length; a longer message has a second part."""
_LENGTH = 8
_BEATS = 8
"""Heartbeats within the timeout of a collective."""
_MOST_BEAT_S = 10.0

_log = logging.getLogger("expertmesh.engine")


@dataclass
class EngineRanks:
    """Ranks of an engine, as seen from one of them."""

    degrees: ServingDegrees  # parallel degrees of the model
    groups: ServingGroups  # process groups of this rank
    sizes: StepSizes  # sizes of the current step
    world: World

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.groups.everyone.rank == 0

    def check(self, config: EngineConfig) -> None:
        """Raise ConfigError if options are incompatible with the degrees."""
        if config.deterministic and not self.degrees.is_whole:
            raise ConfigError(
                "deterministic",
                True,
                "needs whole products, and tp_degree or es_degree above 1 cuts them",
                "use ep_degree alone",
            )


def share(model: Any, config: ParallelConfig, world: World) -> EngineRanks:
    """Shard a GPT over ranks, in place; call `as_plain` once it has its weights. Every rank must call."""
    world.check_moves("cpu")  # steps are host tensors, on any compute device
    degrees, groups, sizes = spread_for_engine(model, config, world)
    return EngineRanks(degrees, groups, sizes, world)


def open_shared(run: Run, config: ParallelConfig, *, ranks: Ranks | None = None, **place: Any) -> LoadedModel:
    """Open a model of which each rank reads and holds its part. Every rank must call.

    Args:
        ranks: the ranks; None: from torchrun, or of torch's group.
    """
    if ranks is None:
        device = device_of(run, place.get("device"))
        ranks = Ranks(world_of(config, device_type=device.type))
    if ranks.world is None:
        raise ConfigError(ONE_PROCESS)
    found: list[EngineRanks] = []

    def cut(model: nn.Module) -> None:
        assert ranks is not None and ranks.world is not None
        found.append(share(model, config, ranks.world))

    opened = open_model(run, ranks=ranks, share=cut, **place)
    return replace(opened, shared=found[0])


def as_parallel(value: Any) -> ParallelConfig:
    """Checked `parallel` argument of an engine."""
    if isinstance(value, ParallelConfig):
        return value
    check_type("parallel", value, Mapping, "a ParallelConfig, or its options as a dictionary")
    return ParallelConfig(**value)


@dataclass(frozen=True)
class _KnownSequence:
    """Sequence as known by the other ranks."""

    number: int
    blocks: list[int]


class Wire:
    """Broadcast of messages from rank 0, as JSON. `group`: all ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def send(self, *message: Any) -> None:
        """Send a kind of message, with its values, to all other ranks."""
        text = json.dumps(message, separators=(",", ":")).encode()
        data = len(text).to_bytes(_LENGTH, "little") + text
        self._broadcast(bytearray(data[:_BYTES].ljust(_BYTES)))
        if len(data) > _BYTES:
            self._broadcast(bytearray(data[_BYTES:]))

    def receive(self) -> list[Any]:
        """Wait for the next message from rank 0."""
        data = self._broadcast(bytearray(_BYTES))
        size = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        if size > _BYTES:
            data = data + self._broadcast(bytearray(size - _BYTES))
        message: list[Any] = json.loads(data[_LENGTH:size])
        return message

    def _broadcast(self, data: bytearray) -> bytearray:
        broadcast_(torch.frombuffer(data, dtype=torch.uint8), self._group, where="the next step")
        return data


class StepWriter:
    """Encoder of steps; remembers the block tables that the other ranks know."""

    def __init__(self) -> None:
        self._known: dict[Sequence, _KnownSequence] = {}
        self._count = 0

    def message(self, parts: tuple[Step, ...], batches: list[StepBatch]) -> tuple[list[int], list[Any]]:
        """Numbers of sequences that have ended, and a step of all groups, for `StepReader.batches`."""
        gone = [s for s in self._known if s.is_guessed or s.state is State.FINISHED]
        numbers = [self._known.pop(s).number for s in gone]
        groups = [
            (
                batch.copies,
                batch.rows,
                [
                    (*self._table(chunk.sequence), one.start, one.root, list(one.ids))
                    for chunk, one in zip(part.chunks, batch.chunks, strict=True)
                ],
            )
            for part, batch in zip(parts, batches, strict=True)
        ]
        return numbers, groups

    def _table(self, sequence: Sequence) -> tuple[int, int, list[int]]:
        """Number of a sequence, number of unchanged blocks of its table, and the other blocks."""
        known = self._known.get(sequence)
        if known is None:
            self._count += 1
            known = self._known[sequence] = _KnownSequence(self._count, [])
        before, now = known.blocks, sequence.blocks
        same = next(
            (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
            min(len(before), len(now)),
        )
        before[same:] = now[same:]
        return known.number, same, now[same:]


class StepReader:
    """Decoder of steps; keeps the block tables."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def batches(self, gone: list[int], groups: list[Any]) -> list[StepBatch]:
        """Step of each group."""
        for number in gone:
            self._tables.pop(number, None)
        return [
            StepBatch(tuple(starmap(self._chunk, chunks)), tuple(rows), tuple(map(tuple, copies)))
            for copies, rows, chunks in groups
        ]

    def _chunk(self, number: int, same: int, blocks: list[int], start: int, root: int, ids: list[int]) -> BatchChunk:
        table = self._tables.setdefault(number, [])
        table[same:] = blocks
        return BatchChunk(ids, start, list(table), root)


@dataclass(frozen=True)
class _Idle:
    """Attention context of the dummy token of a group without tokens; it attends to nothing."""

    positions: Tensor
    keeps: bool = True

    def attend(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_Thd: Tensor,
        v_Thd: Tensor,
        *,
        arithmetic: OpSet,
        rule: Any = None,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        return q_THd.new_zeros(q_THd.shape[0], q_THd.shape[1] * v_Thd.shape[2])


class RankedRunner(Runner):
    """Runner of one rank's part of every step. On rank 0 the engine calls `run`; other ranks are in `follow`.

    Args:
        model: this rank's part of the model.
        cache: KV cache of this rank's heads, for the sequences of its group.
    """

    def __init__(self, model: Any, cache: PagedCache, ranks: EngineRanks, config: EngineConfig) -> None:
        super().__init__(model, cache)
        self.ranks = ranks
        self.placed: RedundantExperts | None = None  # experts with slots for redundant copies; None: without EPLB
        if config.enable_eplb:
            self.placed = RedundantExperts(
                model,
                ranks.degrees,
                ranks.groups.everyone,
                nodes=ranks.world.nodes(),
                num_redundant=config.num_redundant_experts,
            )
        self._interval, self._steps = config.eplb_step_interval, 0
        self._before: list[list[int]] = [[0] * len(one) for one in self.expert_load]
        self.lost: CollectiveError | None = None  # error by which ranks were lost; None: all are connected
        self._wire = Wire(ranks.groups.everyone)
        self._writer, self._reader = StepWriter(), StepReader()
        self._load: list[list[int]] = [[0] * len(one) for one in self.expert_load]
        self._batches: list[StepBatch] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._talked = threading.Event()
        self._beat_s = min(ranks.world.timeout_s / _BEATS, _MOST_BEAT_S)
        if ranks.leads:
            threading.Thread(target=self._beat, name="sign of life", daemon=True).start()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Context of one exchange with the other ranks at a time; after a failure there are no more."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            if self._over.is_set():
                raise ConfigError("the engine is closed; make another")
            try:
                yield
            except BaseException as error:
                # after any error the other ranks are in a step that cannot continue
                self.lost = (
                    error
                    if isinstance(error, CollectiveError)
                    else CollectiveError(f"rank 0: a step failed there: {text_of(error)}")
                )
                self._over.set()
                raise
            finally:
                self._talked.set()

    @torch.no_grad()
    def run(self, step: Step) -> RunnerOutput:
        """Send the step to all ranks, and compute this rank's part."""
        assert isinstance(step, JointStep)
        made = [batch_of(part) for part in step.parts]
        batches, rows = [batch for batch, _ in made], []
        for _, some in made:
            rows += some
        wants = any(c.sequence.request.params.return_routed_experts for c in step.chunks)
        with self._together():
            if self.placed is not None and self._steps and self._steps % self._interval == 0:
                self._wire.send("place")
                self._place()
            self._steps += 1
            self._wire.send("step", wants, *self._writer.message(step.parts, batches))
            logits_RV, all_ids = self._part(batches, wants_experts=wants)
        numbers = RowNumbers(rows)
        parts = [*numbers.sampling.parts, *numbers.parts]
        tensors = packed(parts, self.device)[1]
        size = len(numbers.sampling.parts)
        return numbers.results(
            logits_RV,
            numbers.sampling.batch(tensors[:size]),
            tensors[size:],
            WantedExperts(step.chunks, all_ids),
            agreed=self._from_rank0,
        )

    @torch.no_grad()
    def follow(self) -> None:
        """Compute this rank's part of every step until rank 0 closes the engine."""
        while True:
            match self._wire.receive():
                case ["stop"]:
                    self._over.set()
                    return
                case ["step", wants_experts, gone, groups]:
                    self._part(self._reader.batches(gone, groups), wants_experts=wants_experts)
                case ["load"]:
                    self._sum_load()
                case ["place"]:
                    self._place()
                case ["adapter", name, folder, root]:
                    self._load_as_told(name, folder, root)
                case ["no adapter", name] if self.adapters is not None:
                    with suppress(ConfigError):  # loading failed on this rank
                        self.adapters.unload(name)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load an adapter on all ranks, each with the factors of its experts; see `Engine.load_adapter`."""
        loaded = self._room_for_adapters().load(name, folder)
        try:
            with self._together():
                self._wire.send("adapter", name, str(loaded.folder.absolute()), loaded.root)
                failed = self._count_failed(False)
        except BaseException:  # the other ranks do not have it
            super().unload_adapter(name)
            raise
        if failed:
            self.unload_adapter(name)
            raise ConfigError(
                f"adapter {name!r}: {failed} of the other ranks cannot read {loaded.folder}, as they report; copy it "
                "to this path on every host"
            )

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all ranks; see `Engine.unload_adapter`."""
        super().unload_adapter(name)
        with self._together():
            self._wire.send("no adapter", name)

    def _load_as_told(self, name: str, folder: str, root: int) -> None:
        """Load an adapter that rank 0 has loaded."""
        failed = False
        try:
            self._room_for_adapters().load(name, folder, root=root)
        except Exception as error:  # any error: rank 0 waits for the count
            failed = True
            rank = self.ranks.groups.everyone.rank
            _log.warning("rank %d: adapter %r was not loaded: %s", rank, name, text_of(error))
        self._count_failed(failed)

    def _count_failed(self, failed: bool) -> int:
        """Number of ranks on which loading failed."""
        own = torch.tensor(int(failed), device=self.device)
        return int(all_reduce(own, self.ranks.groups.everyone, where="an adapter"))

    def _adapted(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Context with adapters: experts receive the tokens of all groups, each group's padded to the largest group."""
        if self.adapters is None:
            return nullcontext()
        each = self.ranks.sizes.most_tokens
        of_experts = [
            run._replace(first=run.first + number * each, stop=run.stop + number * each)
            for number, one in enumerate(self._batches)
            for run in runs_of(self.adapters, one)
        ]
        return self.adapters.on(runs_of(self.adapters, batch), tuple(of_experts))

    def _place(self) -> None:
        """Rebalance experts by the load since the last call."""
        assert self.placed is not None
        self._sum_load()
        new = [
            [now - before for now, before in zip(own, known, strict=True)]
            for own, known in zip(self._load, self._before, strict=True)
        ]
        self._before = self._load
        self.placed.rebalance([one[:-1] for one in new])

    def _part(self, batches: list[StepBatch], *, wants_experts: bool) -> tuple[Tensor, list[Tensor]]:
        """Compute this rank's part of a step; on rank 0 returns logits of all groups' rows and, if requested, expert
        ids of all tokens."""
        groups, sizes = self.ranks.groups, self.ranks.sizes
        own = batches[groups.number]
        counts = [sum(len(chunk.ids) for chunk in batch.chunks) for batch in batches]
        sizes.most_tokens, sizes.rows = max(1, *counts), [len(batch.rows) for batch in batches]
        self._batches = batches
        if own.chunks:
            logits_RV, ids_of_layers, _ = self.compute(own)[0]
        else:
            logits_RV, ids_of_layers = self._idle(own)
        if not wants_experts or groups.row.rank or not ids_of_layers:
            return logits_RV, ids_of_layers
        widths = [ids.shape[1] for ids in ids_of_layers]
        flat = gather_home(torch.cat(ids_of_layers, 1), groups, counts, where="experts of tokens")
        return logits_RV, [] if flat is None else list(flat.split(widths, 1))

    def _idle(self, batch: StepBatch) -> tuple[Tensor, list[Tensor]]:
        """Join the collectives of a step without tokens."""
        self.cache.copy(batch.copies)
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        with self._adapted(batch):
            output = self.model(
                one,
                token_mask_BS=one > 0,
                context=_Idle(one),
                logit_rows_R=one[:0],
                capacity_factor=self.model.config.moe.dropless_factor,
                losses=False,
            )
        return output.logits_BSV, [stats.topk_expert_ids_TK[:0] for stats in output.stats]

    def loads(self) -> list[list[int]]:
        """Tokens that each expert has served on all ranks; during a step, the last known numbers."""
        if not self._lock.acquire(blocking=False):
            return self._load
        self._lock.release()
        with suppress(CollectiveError, ConfigError), self._together():
            self._wire.send("load")
            self._sum_load()
        return self._load

    def _sum_load(self) -> None:
        """Sum the loads over ranks; ranks of a tensor group count the same tokens."""
        if not self.expert_load:
            return
        sizes = [len(one) for one in self.expert_load]
        group, tp = self.ranks.groups.everyone, self.ranks.degrees.tp
        total = all_reduce(torch.cat(self.expert_load), group, where="load of experts") // tp
        self._load = [one.tolist() for one in total.split(sizes)]

    def check_together(self) -> None:
        """Raise CollectiveError if other ranks were lost, as heartbeats detect."""
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        if self.ranks.leads:
            with suppress(CollectiveError, ConfigError), self._together():
                self._wire.send("stop")
        self._over.set()
        self._talked.set()

    def _beat(self) -> None:
        """Send heartbeats while no steps are sent."""
        while not self._over.is_set():
            self._talked.clear()
            if not self._talked.wait(self._beat_s) and not self._over.is_set():
                with suppress(CollectiveError, ConfigError), self._together():
                    self._wire.send("alive")
