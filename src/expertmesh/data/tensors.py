"""Samples that fit into memory: tensors, shuffled for each epoch."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from expertmesh.data.order import shuffled, spread
from expertmesh.errors import ConfigError


class TensorData:
    """Tensors whose first axis is the sample, as the data of a run.

    Args:
        training: tensors of the training samples, for example inputs and targets; equally many samples in each.
        validation: the same of the samples that evaluations use.
        seed: of the order.
        source: what they are, in words.

    Raises:
        ConfigError: a side is empty, or its tensors have different numbers of samples.
    """

    files: Mapping[str, Path] = {}

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
            lengths = {len(tensor) for tensor in side}
            if len(lengths) != 1 or 0 in lengths:
                raise ConfigError(
                    f"{name} tensors of {sorted(lengths)} samples: must be equally many and at least 1; check their first axes"
                )
            for tensor in side:
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
                digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
        self._training, self._validation = tuple(training), tuple(validation)
        self._seed, self.key = seed, digest.hexdigest()
        self.description = (
            f"{source}: {len(training[0]):,} training and {len(validation[0]):,} validation samples"
        )

    def batch(self, first_sample: int, num_samples: int) -> tuple[Tensor, ...]:
        """Training samples first_sample ... first_sample + num_samples - 1; as many tensors as were given."""
        total = len(self._training[0])
        which = shuffled(first_sample, num_samples, total=total, seed=self._seed)
        return tuple(tensor[which] for tensor in self._training)

    @property
    def num_validation(self) -> int:
        """Validation samples."""
        return len(self._validation[0])

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[tuple[Tensor, ...]]:
        """Batches of at most so many validation samples (None: all), evenly spread."""
        chosen = spread(len(self._validation[0]), max_samples)
        for start in range(0, len(chosen), batch_size):
            yield tuple(tensor[chosen[start : start + batch_size]] for tensor in self._validation)
