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

import torch
from torch import Tensor, nn

from expertmesh.moe.expert_slots import ExpertSlots, PagingCounts
from expertmesh.moe.experts import ExpertParameters, GroupedExperts, call_of_module
from expertmesh.moe.quantized_experts import QuantizedExperts
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.route_metadata import check_range_of_ids

Read = Callable[[str, int, Tensor], None]
"""Function (name, expert, into) that copies one expert's part of a tensor, by its name in the state dict of the experts."""


@cache
def _worker() -> ThreadPoolExecutor:
    """Prefetch thread, a single one because disk or bus limit it."""
    return ThreadPoolExecutor(1, thread_name_prefix="expertmesh-fetch")


class PagedExperts(nn.Module):
    """E experts of which `num_slots` are on the device; for inference only. The state dict is empty.

    Args:
        like: the experts to replace, usually on the meta device; sizes, dtypes and options are read.
        num_slots: number of experts on the device.
        read: copies an expert's tensor.
        device: the device of the slots.
        first_expert: number in the layer of the first of them, if another process has those before it.

    Attributes:
        counts: hits, misses and copies so far.
        ahead: router, top_k and experts of the next layer, for prefetching; None: no prefetching.
    """

    def __init__(
        self,
        like: GroupedExperts | QuantizedExperts,
        *,
        num_slots: int,
        read: Read,
        device: torch.device | str,
        first_expert: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts, self.activation, self.backend = (
            like.num_experts,
            like.activation,
            like.backend,
        )
        self.arithmetic = like.arithmetic
        self.format = getattr(like, "format", "dense")
        self.num_slots, self._read, self.first_expert = num_slots, read, first_expert
        self.slots, self.counts = ExpertSlots(num_slots), PagingCounts()
        self.ahead: tuple[Callable[[Tensor], object], int, PagedExperts] | None = None
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
    def forward(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None,
        parameters: ExpertParameters | None = None,
    ) -> Tensor:
        """Compute as `GroupedExperts.forward` does, without gradients; synchronises with the device once."""
        assert parameters is None, "experts in slots keep their own parameters"
        coming = self._arrived()
        E = self.num_experts
        found: list[int] = expert_ids_TK.unique().tolist()  # the only synchronisation
        if found:
            check_range_of_ids(found[0], found[-1], E)
        needed = [e for e in found if e < E]
        self.counts.useful += len(coming.intersection(needed))
        if len(needed) > self.num_slots:
            weights = self._past_the_slots(needed)
        else:
            weights = self._in_slots(needed)
        self._fetch_ahead(x_TD)
        if self.arithmetic.batch_invariant:  # tokens may come in the wider type of the products
            weights = weights.to(x_TD.dtype)
        call = call_of_module(self, x_TD, weights_TK, weights, expert_ids_TK)
        return compute(call, max_rows=max_rows)

    def _in_slots(self, needed: list[int]) -> ExpertWeights:
        missing = self.slots.place(needed)
        self.counts.hits += len(needed) - len(missing)
        self.counts.misses += len(missing)
        self._copy(missing)
        return self._weights(self._tensors, {e: self.slots.slot_of(e) for e in needed})

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
        b_in, b_out = tensors.get("b_in"), tensors.get("b_out")
        scales = [
            (tensors[name],) if name in tensors else () for name in ("w_in_scale", "w_out_scale")
        ]
        return ExpertWeights(
            (tensors["w_in"],),
            (tensors["w_out"],),
            self.activation,
            () if b_in is None else (b_in,),
            b_out,
            self.format,
            scales[0],
            scales[1],
            torch.tensor(slots, device=self._device),
        )

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
        """Start copying experts, by number in the layer, that the next call may need; that call waits for the copies."""
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
