"""Memory as autograd and the allocator see it: what is saved for the backward, and the peak of a call."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.profiler import profile


def saved_bytes(run: Callable[[], object], *, parameters: Iterable[Tensor] = ()) -> int:
    """Bytes of all storages that autograd saves during a call, each counted once, those of the parameters left out.

    Args:
        run: the call. Its result is held until the storages are counted.
        parameters: tensors that live anyway.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = run()
    for parameter in parameters:
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    total = sum(saved.values())
    del held
    return total


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that a call on the CPU holds at a time beyond those held before it, results included.

    Counts what PyTorch's allocator hands out, in the order of the profiler's memory events; memory that libraries
    take for themselves is not among them.
    """
    # The class below torch.profiler's: that one makes objects of all events at its end, most of the time of a call.
    with profile(profile_memory=True) as seen:
        held = run()
    assert seen.kineto_results is not None
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del held
    return peak
