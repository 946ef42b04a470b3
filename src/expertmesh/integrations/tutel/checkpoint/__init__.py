"""Replacement for `tutel.checkpoint`: state dicts of other numbers of ranks.

`python -m expertmesh.integrations.tutel.checkpoint.gather --inputs './{rank}-of-{size}.ckpt' --input_size 2 --output
all.ckpt` joins the files of the ranks, `...checkpoint.scatter --input all.ckpt --output_size 8 --outputs
'./{rank}-of-{size}.ckpt'` parts one file, both with Tutel's options. Files are loaded with `weights_only=True`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoints.torch_file import load_torch_file
from expertmesh.errors import ConfigError

State = dict[str, Any]


def called(function: Callable[..., None], arguments: list[str] | None) -> None:
    """Call a function with the words of a command, --name value or --name=value, one for each parameter."""
    words = [part for word in (sys.argv[1:] if arguments is None else arguments) for part in word.split("=", 1)]
    known = inspect.signature(function).parameters
    given: dict[str, Any] = {}
    for flag, value in zip(words[::2], [*words[1::2], ""], strict=False):
        name = flag.removeprefix("--")
        if name not in known or not flag.startswith("--") or not value:
            raise ConfigError(f"{flag} {value}: the words are --name value, with {', '.join(known)}; correct it")
        is_number = known[name].annotation is int
        if is_number and not value.isdigit():
            raise ConfigError(f"{flag} {value}: must be a whole number; give one")
        given[name] = int(value) if is_number else value
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            raise ConfigError(f"--{name} is missing; give it")
    function(**given)


_COUNT = "_num_global_experts"


def read(path: str, namespace: str = "") -> tuple[Any, State]:
    """The contents of a file, and the state dict in it under names joined by "/"."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: is no file; give the pattern that the ranks wrote to")
    whole = state = load_torch_file(path)
    for name in filter(None, namespace.split("/")):
        if not isinstance(state, dict) or name not in state:
            raise ConfigError(f"namespace={namespace!r}: {path} has no {name!r}; choose a name in it")
        state = state[name]
    return whole, state


def put(whole: Any, namespace: str, state: State) -> Any:
    """The contents of a file with another state dict in place of that under `namespace`."""
    name, _, rest = namespace.strip("/").partition("/")
    return {**whole, name: put(whole[name], rest, state)} if name else state


def join(states: Sequence[State], default_num_global_experts: int = 0) -> State:
    """Join the state dicts of the ranks into one of all experts.

    Args:
        states: the state dicts, in the order of the ranks; shared tensors are taken of the last.
        default_num_global_experts: number of experts for files without `_num_global_experts`.

    Example:
        >>> one = {"moe._num_global_experts": torch.tensor(2), "moe.experts.w": torch.zeros(1, 3)}
        >>> join([one, one])["moe.experts.w"].shape
        torch.Size([2, 3])
    """
    counts = _counts(states[0])
    if not counts and default_num_global_experts > 0:
        layers = {n[: n.rindex(".experts.") + 1] for n in states[0] if ".experts." in n}
        counts = dict.fromkeys(layers, default_num_global_experts)
    if not counts:
        raise ConfigError(
            "the state dict has no _num_global_experts; give --default_num_global_experts, or the --namespace of the "
            "model"
        )
    joined = dict(states[-1])
    for layer, num_experts in counts.items():
        _check(num_experts, len(states))
        joined[layer + _COUNT] = torch.tensor(num_experts)
        for name in [n for n in joined if n.startswith(f"{layer}experts.")]:
            values: Tensor = torch.cat([state[name] for state in states])
            if num_experts < len(states) and values.dim() > 1:
                values = values.view(num_experts, -1, *values.shape[2:])
            joined[name] = values
    return joined


def part(state: State, size: int) -> list[State]:
    """State dicts of so many ranks, from one of all experts."""
    counts = _counts(state)
    if not counts:
        raise ConfigError(
            "the state dict has no _num_global_experts; join the ranks' files first, or give the --namespace of the "
            "model"
        )
    parts = [dict(state) for _ in range(size)]
    for layer, num_experts in counts.items():
        _check(num_experts, size)
        for name in [n for n in state if n.startswith(f"{layer}experts.")]:
            for own, values in zip(parts, _cut(name, state[name], num_experts, size), strict=True):
                own[name] = values.clone()
    return parts


def _counts(state: State) -> dict[str, int]:
    """Number of experts by prefix of the layer."""
    return {n.removesuffix(_COUNT): int(state[n]) for n in state if n.endswith(_COUNT)}


def _check(num_experts: int, size: int) -> None:
    if num_experts < 1 or (num_experts % size and size % num_experts):
        raise ConfigError(
            f"{num_experts} experts and {size} ranks: one must divide the other; choose another number of ranks"
        )


def _cut(name: str, values: Tensor, num_experts: int, size: int) -> Sequence[Tensor]:
    """Equal parts of a tensor for the ranks: whole experts, or slices of one along its first dimension after the
    experts'."""
    if values.numel() % size or (values.dim() > 1 and values.shape[0] != num_experts):
        raise ConfigError(
            f"{name} of shape {tuple(values.shape)}: cannot be parted for {size} ranks; choose another number of ranks"
        )
    if num_experts >= size or values.dim() == 1:
        return values.chunk(size)
    slices = size // num_experts
    axis = next((i for i in range(1, values.dim()) if values.shape[i] > 1), 1)
    if values.shape[axis] % slices:
        raise ConfigError(
            f"{name} of shape {tuple(values.shape)}: {slices} ranks share an expert, and must divide dimension {axis}; "
            "choose another number of ranks"
        )
    return [piece for expert in values.split(1) for piece in expert.chunk(slices, axis)]
