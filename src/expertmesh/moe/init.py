"""Initial weights as a function of (seed, parameter name, expert) only, not of device, layout or order."""

import hashlib

import torch
from torch import Tensor, nn


def _generator(seed: int, name: str, index: int | None) -> torch.Generator:
    key = f"{seed}/{name}" if index is None else f"{seed}/{name}/{index}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def init_normal_(param: Tensor, *, std: float, seed: int, name: str, per_expert: bool) -> None:
    """Fill a parameter in place with N(0, std^2), the same values on any device and rank count.

    The numbers are drawn in FP32 on the CPU by one generator per (seed, name, expert), then cast and copied, so
    that a model has the same weights wherever and however it is laid out. Nothing is drawn for a meta tensor. A DTensor
    is filled in this rank's part without communication: of experts only the local ones are drawn, other parameters are
    drawn whole, one after the other.

    Args:
        param: any shape; with per_expert, axis 0 counts experts and each gets a generator of its own.
    """
    if param.is_meta:
        return
    if not per_expert:
        _fill_whole(param, _draw(param.shape, seed, name, None).mul_(std))
        return
    local, first, window = _own_experts(param)
    for index, rows in enumerate(local, start=first):
        rows.copy_(_draw(param.shape[1:], seed, name, index).mul_(std)[window])


def _draw(shape: torch.Size, seed: int, name: str, index: int | None) -> Tensor:
    return torch.randn(shape, generator=_generator(seed, name, index), dtype=torch.float32)


def _is_spread(param: Tensor) -> bool:
    return hasattr(param, "placements")  # a DTensor, whose module is slow to import


def _fill_whole(param: Tensor, values: Tensor) -> None:
    if not _is_spread(param):
        param.copy_(values)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(param, DTensor)
    values = values.to(param.device, param.dtype)
    parts = distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
    param.to_local().copy_(parts.to_local())


def _own_experts(param: Tensor) -> tuple[Tensor, int, tuple[slice, ...]]:
    """(e, ...) local part of a stack of experts, index of its first expert, and the window of each expert's tensor that
    it holds."""
    if not _is_spread(param):
        return param, 0, ()
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    (chunk,) = param.__create_chunk_list__()
    window = tuple(slice(start, start + size) for start, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
    return param.to_local(), chunk.offsets[0], window


def draw_seed() -> int:
    """A fresh 63-bit seed from torch's default generator, so that torch.manual_seed governs unseeded layers."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu").item())


def reset_custom_modules(module: nn.Module, *, seed: int, name: str) -> None:
    """Call `reset_parameters` of every submodule that has it, each with its own seed. The global generator is not
    changed."""
    for path, child in module.named_modules():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(_generator(seed, f"{name}.{path}", None).initial_seed())
                reset()
