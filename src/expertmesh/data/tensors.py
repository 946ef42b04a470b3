"""Tensors in memory as the data of a run, shuffled for each epoch, and their base class `IndexedData`."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.data.order import shuffled, spread_batches
from expertmesh.errors import ConfigError


class IndexedData:
    """Base class of data with indexed samples; a subclass makes batches in `_take`."""

    files: Mapping[str, Path] = {}

    def __init__(self, training: Any, validation: Any, sizes: tuple[int, int], *, seed: int, source: str) -> None:
        self._training, self._validation, self._seed = training, validation, seed
        self._num_training, self.num_validation = sizes
        self.description = f"{source}: {sizes[0]:,} training and {sizes[1]:,} validation samples"

    def batch(self, first_sample: int, num_samples: int) -> Any:
        """Training samples first_sample ... first_sample + num_samples - 1."""
        total = self._num_training
        which = shuffled(first_sample, num_samples, total=total, seed=self._seed)
        return self._take(self._training, which)

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[Any]:
        """Batches of at most max_samples validation samples (None: all), evenly spaced."""
        for which in spread_batches(self.num_validation, max_samples, batch_size):
            yield self._take(self._validation, which)

    def _take(self, side: Any, which: list[int]) -> Any:
        raise NotImplementedError


class TensorData(IndexedData):
    """Tensors whose first axis is the sample, as the data of a run; a batch is a tuple of as many tensors.

    Args:
        training: tensors of the training samples, for example inputs and targets, of equal lengths.
        validation: tensors of the validation samples, as many.
        seed: seed of the order.
        source: description of the samples.

    Raises:
        ConfigError: a side is empty, its tensors have different lengths, or the sides have different numbers of
            tensors.
    """

    def __init__(
        self,
        training: Sequence[Tensor],
        validation: Sequence[Tensor],
        *,
        seed: int,
        source: str = "tensors",
    ) -> None:
        digest = hashlib.sha256()
        for name, side in (("training", training), ("validation", validation)):
            lengths = {num_samples(tensor) for tensor in side}
            if len(lengths) != 1 or 0 in lengths:
                raise ConfigError(
                    f"{name} tensors of {sorted(lengths)} samples: must be equally many and at least 1; check their "
                    "first axes"
                )
            for tensor in side:
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
                digest.update(tensor_bytes(tensor))
        if len(training) != len(validation):
            raise ConfigError(
                f"data: {len(training)} training and {len(validation)} validation tensors: must be equally many; give "
                "the same of both"
            )
        self.key = digest.hexdigest()
        sizes = len(training[0]), len(validation[0])
        super().__init__(tuple(training), tuple(validation), sizes, seed=seed, source=source)

    def _take(self, side: tuple[Tensor, ...], which: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[which] for tensor in side)


def num_samples(tensor: Tensor) -> int:
    """Length of a tensor's first axis; 0 for a scalar."""
    return len(tensor) if tensor.ndim else 0


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any type on any device, contiguous, as a file has them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
