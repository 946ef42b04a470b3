"""Weights of a base with low-rank adapters merged into them while they are read, part by part."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from expertmesh.checkpoints.box import Box
from expertmesh.checkpoints.grown_rows import is_token_rows, token_rows_of
from expertmesh.checkpoints.source import Stored, TensorSource, read_whole
from expertmesh.config.adapter import AdapterConfig
from expertmesh.moe.module_adapters import add_low_rank

_PART = ".adapters."


class AdaptedModel:
    """The tensors of a base, W + s B A where there is an adapter, and with the rows of tokens that learned; a
    `TensorSource`.

    W + s B A is made for the part that is read, one expert after the other.
    """

    def __init__(
        self,
        base: TensorSource,
        learned: TensorSource,
        config: AdapterConfig,
        tokens: Sequence[int] = (),  # tokens whose rows learned
    ) -> None:
        self._base, self._learned, self._config, self._tokens = base, learned, config, tokens
        # factors whose parts are read one after the other
        self._last: tuple[str, list[Tensor]] = ("", [])

    @property
    def path(self) -> Path:
        """The folder of the adapters."""
        return self._learned.path

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Shapes and types of the base's tensors."""
        return {name: stored for name, stored in self._base.tensors.items() if not is_token_rows(name)}

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part of a merged tensor; see `TensorSource.read`."""
        if name in self._learned.tensors:
            self._learned.read(name, box, into)
            return
        self._base.read(name, box, into)
        if (rows := token_rows_of(name)) in self._learned.tensors:
            own = read_whole(self._learned, rows)[:, box[1]]
            for place, row in enumerate(self._tokens):
                if box[0].start <= row < box[0].stop:
                    into[row - box[0].start].copy_(own[place])
        prefix = factor_prefix(name)
        if f"{prefix}.a" not in self._learned.tensors:
            return
        if self._last[0] != prefix:
            self._last = prefix, [read_whole(self._learned, f"{prefix}.{one}") for one in "ab"]
        a, b = self._last[1]
        stack, lead = into, box[:1]
        if a.ndim == 2:
            has_experts = len(box) == b.ndim + 1  # which share it
            stack, a, b = into if has_experts else into[None], a[None], b[None]
            lead, box = (slice(None),), box if has_experts else (slice(None), *box)
        a_erK, b_eNr = a[lead][:, :, box[-1]], b[(*lead, *box[1:-1])].flatten(1, -2)
        device = stack.device
        add_low_rank(stack, a_erK.to(device), b_eNr.to(device), self._config.scaling(a.shape[1]))


def factor_prefix(name: str) -> str:
    """Beginning of the names of the factors of a parameter's adapter."""
    path, _, leaf = name.rpartition(".")
    return f"{path}{_PART}{leaf}".removeprefix(".")


def is_factor(name: str) -> bool:
    """Whether a tensor is a factor of an adapter."""
    return _PART in name


def adapted_parameter(name: str) -> str:
    """Name of the parameter that a factor is of."""
    path, _, leaf = name.rpartition(".")[0].partition(_PART)
    return f"{path}.{leaf}"


def read_factor_pairs(learned: TensorSource) -> dict[str, tuple[Tensor, Tensor]]:
    """Factors (A, B) by the names of the adapted parameters, on the CPU."""
    found = {}
    for name in learned.tensors:
        if is_factor(name) and name.endswith(".a"):
            pair = (name, f"{name.removesuffix('.a')}.b")
            a, b = (read_whole(learned, one) for one in pair)
            found[adapted_parameter(name)] = a, b
    return found
