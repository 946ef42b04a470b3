"""Initial weights that depend on (seed, parameter name, expert) only, not on device, layout or order."""

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
    that a model has the same weights wherever and however it is laid out. Nothing is drawn for a meta tensor.

    Args:
        param: any shape; with per_expert, axis 0 counts experts and each gets a generator of its own.
        std: standard deviation.
        seed: of the whole model.
        name: full name of the parameter, unique in the model.
        per_expert: one generator per index of axis 0.
    """
    if param.is_meta:
        return
    if not per_expert:
        values = torch.randn(
            param.shape, generator=_generator(seed, name, None), dtype=torch.float32
        )
        param.copy_(values.mul_(std))
        return
    for index, rows in enumerate(param):
        values = torch.randn(
            rows.shape, generator=_generator(seed, name, index), dtype=torch.float32
        )
        rows.copy_(values.mul_(std))


def draw_seed() -> int:
    """A fresh 63-bit seed from torch's default generator, so that torch.manual_seed governs unseeded layers."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu").item())


def reset_custom_modules(module: nn.Module, *, seed: int, name: str) -> None:
    """Call `reset_parameters` of every submodule that has it, under a seed of its own; the global generator is left alone.

    Args:
        module: of the user.
        seed: of the whole model.
        name: of the module in the model.
    """
    for path, child in module.named_modules():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            with torch.random.fork_rng():
                torch.manual_seed(_generator(seed, f"{name}.{path}", None).initial_seed())
                reset()
