"""An engine over ranks: rank 0 has the requests and plans every step, and tells the others in a few numbers what to compute.

    rank 0: Scheduler of each group -> StepBatch of each group -> broadcast -> its own group's part -> logits of all rows -> draw
    others:                                                       receive   -> their group's part   -> rows of hidden states to rank 0

A step is one broadcast of integers. Tables of blocks are sent once and then only what is new of them. Between steps rank 0 says now and
then that it is there, so that no rank's patience ends while nobody asks anything.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.comm.collectives import all_reduce, broadcast_
from expertmesh.comm.group import RankGroup
from expertmesh.comm.world import World
from expertmesh.config.engine import EngineConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.engine.groups import JointStep
from expertmesh.engine.kv_cache import PagedCache
from expertmesh.engine.request import Sequence, State
from expertmesh.engine.runner import (
    BatchChunk,
    Runner,
    RunnerOutput,
    StepBatch,
    batch_of,
    runs_of,
    wanted_experts,
)
from expertmesh.engine.scheduler import Step
from expertmesh.errors import CheckpointError, CollectiveError, ConfigError, text_of
from expertmesh.models.sharing import spread_for_engine
from expertmesh.ops.op_set import OpSet
from expertmesh.parallel.experts.coordinated import ServingGroups, StepSizes
from expertmesh.parallel.placed_experts import PlacedExperts
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.serving import ONE_PROCESS, ServingDegrees, gather_home, world_of
from expertmesh.runs.open import LoadedModel, device_of, open_model
from expertmesh.runs.run_dir import Run

_WORDS = 512
"""Of a message; a longer one has a second part."""
_STEP, _ALIVE, _LOAD, _STOP, _PLACE, _ADAPTER, _NO_ADAPTER = range(7)
_BEATS = 8
"""Signs of life within the time after which a collective fails."""
_MOST_BEAT_S = 10.0


@dataclass
class EngineRanks:
    """The ranks that answer together, as one of them sees them.

    Attributes:
        degrees: how they share the model.
        groups: of this rank.
        sizes: of the step that is computed.
        world: all of them.
    """

    degrees: ServingDegrees
    groups: ServingGroups
    sizes: StepSizes
    world: World

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.groups.everyone.rank == 0

    def check(self, config: EngineConfig) -> None:
        """Raise ConfigError where options ask for what these degrees do not give."""
        if config.deterministic and not self.degrees.is_whole:
            raise ConfigError(
                "deterministic",
                True,
                "needs whole products, and tp_degree or es_degree above 1 cuts them",
                "use ep_degree alone",
            )


def share(model: Any, config: ParallelConfig, world: World) -> EngineRanks:
    """Cut a GPT over ranks, in place; `as_plain` is due when it has its weights. Every rank must call.

    Raises:
        ConfigError: the model is none that ranks can share, the degrees do not fit, or the ranks' group moves no tensors of the host.
    """
    world.check_moves("cpu")  # steps are numbers there, whatever computes
    degrees, groups, sizes = spread_for_engine(model, config, world)
    return EngineRanks(degrees, groups, sizes, world)


def open_shared(
    run: Run, config: ParallelConfig, *, ranks: Ranks | None = None, **place: Any
) -> LoadedModel:
    """A model of which each rank reads and has its part, `shared` among them. Every rank must call.

    Args:
        run: its folder.
        config: how they share it.
        ranks: the ranks; None: those that torchrun started, or of torch's group.
        **place: see `open_model`.

    Raises:
        ConfigError: see `share`.
        CheckpointError: there are no usable weights.
        PeerError: another rank failed.
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
    """Options of how ranks share a model, as a caller gives them.

    Raises:
        ConfigError: they are none.
    """
    if isinstance(value, ParallelConfig):
        return value
    if isinstance(value, Mapping):
        return ParallelConfig(**value)
    raise ConfigError(
        f"parallel is a {type(value).__name__}; give a ParallelConfig, or its options as a dictionary"
    )


@dataclass(frozen=True)
class _KnownSequence:
    """A sequence as the other ranks know it."""

    number: int
    blocks: list[int]


class Wire:
    """Messages of integers from rank 0 to all others.

    Args:
        group: all ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def send(self, words: list[int]) -> None:
        """Tell all other ranks.

        Raises:
            CollectiveError: one is gone or late.
        """
        first = torch.zeros(_WORDS, dtype=torch.int64)
        first[0] = len(words)
        head = words[: _WORDS - 1]
        first[1 : 1 + len(head)] = torch.tensor(head, dtype=torch.int64)
        self._broadcast(first)
        if len(words) >= _WORDS:
            self._broadcast(torch.tensor(words[_WORDS - 1 :], dtype=torch.int64))

    def receive(self) -> list[int]:
        """What rank 0 tells next; waits for it.

        Raises:
            CollectiveError: it is gone or late.
        """
        first = torch.empty(_WORDS, dtype=torch.int64)
        self._broadcast(first)
        length, *words = first.tolist()
        if length >= _WORDS:
            rest = torch.empty(length - _WORDS + 1, dtype=torch.int64)
            self._broadcast(rest)
            words += rest.tolist()
        return words[:length]

    def _broadcast(self, words: Tensor) -> None:
        broadcast_(words, self._group, where="the next step")


class StepWriter:
    """Puts steps into words; remembers what the others know of block tables."""

    def __init__(self) -> None:
        self._known: dict[Sequence, _KnownSequence] = {}
        self._count = 0

    def words(
        self, parts: tuple[Step, ...], batches: list[StepBatch], *, experts: bool
    ) -> list[int]:
        """One step of all groups.

        Args:
            parts: of each group.
            batches: of the same groups.
            experts: whether rank 0 wants to know the experts of tokens.
        """
        gone = [s for s in self._known if s.is_guessed or s.state is State.FINISHED]
        words = [_STEP, int(experts), len(gone), *(self._known.pop(s).number for s in gone)]
        words.append(len(parts))
        for part, batch in zip(parts, batches, strict=True):
            words += [len(batch.copies), *(block for pair in batch.copies for block in pair)]
            words += [len(batch.rows), *batch.rows, len(batch.chunks)]
            for chunk, one in zip(part.chunks, batch.chunks, strict=True):
                words += self._table(chunk.sequence)
                words += [one.start, one.root, len(one.ids), *one.ids]
        return words

    def _table(self, sequence: Sequence) -> list[int]:
        """The number of a sequence, how many blocks of its table are as before, and the others."""
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
        return [known.number, same, len(now) - same, *now[same:]]


class StepReader:
    """Takes steps from words; keeps the block tables."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def batches(self, words: list[int]) -> tuple[list[StepBatch], bool]:
        """The step of each group, and whether rank 0 wants to know the experts of tokens."""
        left = iter(words)

        def some(count: int | None = None) -> list[int]:
            return [next(left) for _ in range(next(left) if count is None else count)]

        _, experts = some(2)
        for number in some():
            self._tables.pop(number, None)
        return [self._batch(some) for _ in range(next(left))], bool(experts)

    def _batch(self, some: Callable[..., list[int]]) -> StepBatch:
        pairs = some(2 * some(1)[0])
        rows = tuple(some())
        chunks = []
        for _ in range(some(1)[0]):
            number, same = some(2)
            table = self._tables.setdefault(number, [])
            table[same:] = some()
            start, root = some(2)
            chunks.append(BatchChunk(some(), start, list(table), root))
        return StepBatch(tuple(chunks), rows, tuple(zip(pairs[::2], pairs[1::2], strict=True)))


def _text(words: list[int]) -> str:
    """A text that was sent as its bytes."""
    return bytes(words).decode()


@dataclass(frozen=True)
class _Idle:
    """What the one token of a group without tokens sees: nothing; it is no token of anybody."""

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
    """One rank's part of every step. On rank 0 its `run` is the engine's; the others are in `follow`.

    Args:
        model: of which each rank has its part.
        cache: of this rank's heads, for the sequences of its group.
        ranks: the ranks.
        config: of the engine.

    Attributes:
        lost: why the ranks are no longer together; None: they are.
        placed: the experts with slots for copies; None: each is where it was cut to.
    """

    def __init__(
        self, model: Any, cache: PagedCache, ranks: EngineRanks, config: EngineConfig
    ) -> None:
        super().__init__(model, cache)
        self.ranks = ranks
        self.placed: PlacedExperts | None = None
        if config.enable_eplb:
            self.placed = PlacedExperts(
                model,
                ranks.degrees,
                ranks.groups.everyone,
                nodes=ranks.world.nodes(),
                num_redundant=config.num_redundant_experts,
            )
        self._interval, self._steps = config.eplb_step_interval, 0
        self._before: list[list[int]] = [[0] * len(one) for one in self.expert_load]
        self.lost: CollectiveError | None = None
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
        """One talk with the other ranks at a time; a failed one is the last.

        Raises:
            CollectiveError: a rank is gone or late, now or before.
        """
        with self._lock:
            if self.lost is not None:
                raise self.lost
            if self._over.is_set():
                raise ConfigError("the engine is closed; make another")
            try:
                yield
            except BaseException as error:
                # whatever it was, the others are in the middle of a step that does not go on
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
        """Tell all ranks what to compute, and compute this one's part.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        assert isinstance(step, JointStep)
        made = [batch_of(part) for part in step.parts]
        batches, rows = [batch for batch, _ in made], []
        for _, some in made:
            rows += some
        wants = any(c.sequence.request.params.return_routed_experts for c in step.chunks)
        with self._together():
            if self.placed is not None and self._steps and self._steps % self._interval == 0:
                self._wire.send([_PLACE])
                self._place()
            self._steps += 1
            self._wire.send(self._writer.words(step.parts, batches, experts=wants))
            logits_RV, all_ids = self._part(batches, wants_experts=wants)
        return self._result(logits_RV, rows, wanted_experts(step, all_ids))

    @torch.no_grad()
    def follow(self) -> None:
        """Compute this rank's part of every step until rank 0 ends.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        while True:
            words = self._wire.receive()
            if words[0] == _STOP:
                self._over.set()
                return
            if words[0] == _STEP:
                batches, experts = self._reader.batches(words)
                self._part(batches, wants_experts=experts)
            elif words[0] == _LOAD:
                self._sum_load()
            elif words[0] == _PLACE:
                self._place()
            elif words[0] == _ADAPTER:
                self._load_as_told(words)
            elif words[0] == _NO_ADAPTER and self.adapters is not None:
                with suppress(ConfigError):  # it could not be read here
                    self.adapters.unload(_text(words[1:]))

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """See `Engine.load_adapter`; each rank reads it, and keeps the factors of its experts.

        Raises:
            ConfigError: it is no such adapter, or another rank cannot read it.
            CheckpointError: see there.
            CollectiveError: a rank is gone or late.
        """
        loaded = self._room_for_adapters().load(name, folder)
        told = json.dumps([name, str(loaded.folder.absolute()), loaded.root])
        with self._together():
            self._wire.send([_ADAPTER, *told.encode()])
            failed = self._count_failed(False)
        if failed:
            self.unload_adapter(name)
            raise ConfigError(
                f"adapter {name!r}: {failed} of the other ranks cannot read {loaded.folder}; let it lie under this path on every host"
            )

    def unload_adapter(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        super().unload_adapter(name)
        with self._together():
            self._wire.send([_NO_ADAPTER, *name.encode()])

    def _load_as_told(self, words: list[int]) -> None:
        """Read an adapter that rank 0 has read."""
        name, folder, root = json.loads(_text(words[1:]))
        failed = False
        try:
            self._room_for_adapters().load(name, folder, root=root)
        except (ConfigError, CheckpointError, OSError):  # rank 0 says it
            failed = True
        self._count_failed(failed)

    def _count_failed(self, failed: bool) -> int:
        """On how many ranks something has failed."""
        own = torch.tensor(int(failed), device=self.device)
        return int(all_reduce(own, self.ranks.groups.everyone, where="an adapter"))

    def _adapted(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Experts see the tokens of all groups, each group's behind as many places as the one with most tokens has."""
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
        """Move experts to where the load since the last time wants them."""
        assert self.placed is not None
        self._sum_load()
        new = [
            [now - before for now, before in zip(own, known, strict=True)]
            for own, known in zip(self._load, self._before, strict=True)
        ]
        self._before = self._load
        self.placed.rebalance([one[:-1] for one in new])

    def _part(
        self, batches: list[StepBatch], *, wants_experts: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """This rank's part of a step; on rank 0 the logits of all groups' rows and, if wanted, the expert ids of all their tokens."""
        groups, sizes = self.ranks.groups, self.ranks.sizes
        own = batches[groups.number]
        counts = [sum(len(chunk.ids) for chunk in batch.chunks) for batch in batches]
        sizes.most_tokens, sizes.rows = max(1, *counts), [len(batch.rows) for batch in batches]
        self._batches = batches
        if own.chunks:
            logits_RV, ids_of_layers = self.compute(own)
            self._count(ids_of_layers)
        else:
            logits_RV, ids_of_layers = self._idle(own)
        if not wants_experts or groups.row.rank or not ids_of_layers:
            return logits_RV, ids_of_layers
        widths = [ids.shape[1] for ids in ids_of_layers]
        flat = gather_home(torch.cat(ids_of_layers, 1), groups, counts, where="experts of tokens")
        return logits_RV, [] if flat is None else list(flat.split(widths, 1))

    def _idle(self, batch: StepBatch) -> tuple[Tensor, list[Tensor]]:
        """Take part in what all ranks do together, with no token."""
        self.cache.copy(batch.copies)
        one = self._tensor([0])
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

    def _lasting(self) -> list[Tensor]:
        """None: copies of experts move between ranks, which no version counts."""
        return []

    def loads(self) -> list[list[int]]:
        """Tokens that each expert has served on all ranks; where a step is under way, those of the last time."""
        if not self._lock.acquire(blocking=False):
            return self._load
        self._lock.release()
        with suppress(CollectiveError, ConfigError), self._together():
            self._wire.send([_LOAD])
            self._sum_load()
        return self._load

    def _sum_load(self) -> None:
        """Add up what the ranks have counted; those of a tensor group counted the same tokens."""
        if not self.expert_load:
            return
        sizes = [len(one) for one in self.expert_load]
        group, tp = self.ranks.groups.everyone, self.ranks.degrees.tp
        total = all_reduce(torch.cat(self.expert_load), group, where="load of experts") // tp
        self._load = [one.tolist() for one in total.split(sizes)]

    def check_together(self) -> None:
        """Raise CollectiveError where the other ranks have been lost, which a sign of life tells, too."""
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """Let the other ranks end."""
        if self.ranks.leads:
            with suppress(CollectiveError, ConfigError), self._together():
                self._wire.send([_STOP])
        self._over.set()
        self._talked.set()

    def _beat(self) -> None:
        """Tell the others now and then that there is nothing to do."""
        while not self._over.is_set():
            self._talked.clear()
            if not self._talked.wait(self._beat_s) and not self._over.is_set():
                with suppress(CollectiveError, ConfigError), self._together():
                    self._wire.send([_ALIVE])
