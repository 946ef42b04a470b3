"""Routed experts offloaded to files or host memory, copied into a few device slots when tokens choose them.

A step synchronises once to read its choice, copies all missing experts, and computes on the slots. Results are bitwise
the same as with resident experts where the same backend computes. A step that needs more experts than there are slots
(a long prompt) bypasses them: its experts are copied for this step only, and the slots do not change. While a layer
computes, the next layer's experts are prefetched: its router is run on this layer's tokens, which differ little from
its own input (Eliseev and Mazur 2023, arXiv 2312.17238).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from expertmesh.moe.expert_slots import ExpertSlots, PagingCounts
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.route_metadata import check_range_of_ids

Read = Callable[[str, int, Tensor], None]
"""Function (name, expert, into) that copies one expert's part of a tensor, by its name in the state dict of the
experts."""


@cache
def _worker() -> ThreadPoolExecutor:
    """Prefetch thread, a single one because disk or bus limit it."""
    return ThreadPoolExecutor(1, thread_name_prefix="expertmesh-fetch")


class ExpertPaging:
    """Tensors of `num_slots` of a layer's E experts, in any format; for inference only.

    `like` are the experts, usually on the meta device, of which sizes, dtypes and options are read, and `first_expert`
    the number of the first in the layer, if another process has those before it.
    """

    def __init__(
        self,
        like: Any,
        *,
        num_slots: int,
        read: Read,
        device: torch.device | str,
        first_expert: int = 0,
    ) -> None:
        self.num_experts, self.activation = like.num_experts, like.activation
        self.format = like.format
        self._is_cast = like.arithmetic.batch_invariant
        self.num_slots, self._read, self.first_expert = num_slots, read, first_expert
        self.slots, self.counts = ExpertSlots(num_slots), PagingCounts()
        # router, top_k and slots of the next layer, for prefetching
        self.ahead: tuple[Callable[[Tensor], object], int, ExpertPaging] | None = None
        self._coming: tuple[Future[None], frozenset[int]] | None = None
        self._shapes = {name: (t.shape[1:], t.dtype) for name, t in like.state_dict().items()}
        self._tensors = self._empty(num_slots, device)
        sizes = (t[0].nbytes for t in self._tensors.values())
        self.bytes_of_expert = sum(sizes)

    def _empty(self, count: int, device: torch.device | str) -> dict[str, Tensor]:
        return {
            name: torch.empty(count, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._shapes.items()
        }

    @torch.no_grad()
    def weights(self, x_TD: Tensor, expert_ids_TK: Tensor) -> ExpertWeights:
        """Weights of the experts that a step chooses; synchronises with the device once."""
        coming = self._arrived()
        E = self.num_experts
        found: list[int] = expert_ids_TK.unique().tolist()  # the only synchronisation
        if found:
            check_range_of_ids(found[0], found[-1], E)
        needed = [e for e in found if e < E]
        self.counts.useful += len(coming.intersection(needed))
        weights = self._past_the_slots(needed) if len(needed) > self.num_slots else self._in_slots(needed)
        self._fetch_ahead(x_TD)
        # tokens may come in the wider type of the products
        return weights.to(x_TD.dtype) if self._is_cast else weights

    def _in_slots(self, needed: list[int]) -> ExpertWeights:
        missing = self.slots.place(needed)
        self.counts.hits += len(needed) - len(missing)
        self.counts.misses += len(missing)
        self._copy(missing)
        return self._weights(self._tensors, {e: self.slots.slot_of(e) for e in needed})

    def in_slots(self) -> ExpertWeights:
        """Weights of the slots, by their number."""
        return self._weights(self._tensors, {}).by_slot()

    def _past_the_slots(self, needed: list[int]) -> ExpertWeights:
        """Copy the experts of one step beside the slots; experts that have a slot are copied from there."""
        self.counts.bypasses += 1
        tensors = self._empty(len(needed), self._device)
        for place, e in enumerate(needed):
            if e in self.slots:
                self.counts.hits += 1
                for name, tensor in tensors.items():
                    tensor[place].copy_(self._tensors[name][self.slots.slot_of(e)])
                continue
            self.counts.misses += 1
            self.counts.bytes_copied += self.bytes_of_expert
            for name, tensor in tensors.items():
                self._read(name, e, tensor[place])
        return self._weights(tensors, {e: place for place, e in enumerate(needed)})

    def _copy(self, placed: Sequence[tuple[int, int]]) -> None:
        """Copy experts into their slots; if a copy fails, all of them lose their slots."""
        try:
            for e, slot in placed:
                for name, tensor in self._tensors.items():
                    self._read(name, e, tensor[slot])
        except BaseException:
            for e, _ in placed:
                self.slots.forget(e)
            raise
        self.counts.bytes_copied += len(placed) * self.bytes_of_expert

    def _weights(self, tensors: dict[str, Tensor], slot_of: dict[int, int]) -> ExpertWeights:
        slots = [slot_of.get(e, 0) for e in range(self.num_experts)]
        slot_of_expert_E = torch.tensor(slots, device=self._device)
        stacks = {name: (tensor,) for name, tensor in tensors.items()}
        return ExpertWeights.of_names(stacks, self.activation, self.format, slot_of_expert_E)

    @property
    def _device(self) -> torch.device:
        return self._tensors["w_in"].device

    def _fetch_ahead(self, x_TD: Tensor) -> None:
        """Prefetch the next layer's experts while this layer computes."""
        if self.ahead is None:
            return
        router, top_k, experts = self.ahead
        if x_TD.shape[0] * top_k > experts.num_slots:
            return
        logits_TE = router(x_TD)
        if isinstance(logits_TE, Tensor):
            experts.fetch(logits_TE.topk(top_k, dim=-1).indices.unique().tolist())

    def fetch(self, guessed: list[int]) -> None:
        """Start copying experts, by number in the layer, that the next call may need; that call waits for the
        copies."""
        self._arrived()
        local = [e - self.first_expert for e in guessed]
        here = [e for e in local if 0 <= e < self.num_experts]
        missing = self.slots.place(here[: self.num_slots])
        if not missing:
            return
        self.counts.fetched_ahead += len(missing)
        self._coming = (
            _worker().submit(self._copy_quietly, missing),
            frozenset(e for e, _ in missing),
        )

    @torch.no_grad()
    def _copy_quietly(self, missing: list[tuple[int, int]]) -> None:
        self._copy(missing)

    def _arrived(self) -> frozenset[int]:
        """Wait for prefetched experts and return them; errors of their files are raised here."""
        coming, self._coming = self._coming, None
        if coming is None:
            return frozenset()
        coming[0].result()
        return coming[1]
