"""Samples of a dataset with a length and an index, as the data of a run."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from expertmesh.data.order import shuffled, spread
from expertmesh.data.tensors import TensorData
from expertmesh.errors import ConfigError

_DIGESTED = 16
_ONE_IN = 20


class Indexed(Protocol):
    """A dataset whose samples have numbers, for example a `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int:
        """Samples in it."""

    def __getitem__(self, index: int, /) -> Any:
        """One sample: tensors or numbers, alone or in tuples, lists and dictionaries."""


class SampleData:
    """Indexed datasets as the data of a run; batches are made by torch's `default_collate`.

    The key is a digest of the numbers of samples and of some samples of each side, so random augmentation counts as other data.

    Args:
        training: samples to learn from.
        validation: samples that evaluations use.
        seed: of the order.

    Raises:
        ConfigError: a side has no sample.
    """

    files: Mapping[str, Path] = {}

    def __init__(self, training: Indexed, validation: Indexed, *, seed: int) -> None:
        digest = hashlib.sha256()
        for name, side in (("training", training), ("validation", validation)):
            if len(side) < 1:
                raise ConfigError(f"{name} data: have no sample; give at least one")
            digest.update(f"{name} {len(side)} ".encode())
            for index in spread(len(side), _DIGESTED):
                for part in tree_leaves(default_collate([side[index]])):
                    data = part.numpy().tobytes() if isinstance(part, Tensor) else repr(part)
                    digest.update(data if isinstance(data, bytes) else data.encode())
        self._training, self._validation, self._seed = training, validation, seed
        self.key = digest.hexdigest()
        self.description = (
            f"{type(training).__name__}: {len(training):,} training and {len(validation):,} "
            "validation samples"
        )

    def batch(self, first_sample: int, num_samples: int) -> Any:
        """Training samples first_sample ... first_sample + num_samples - 1."""
        total = len(self._training)
        which = shuffled(first_sample, num_samples, total=total, seed=self._seed)
        return default_collate([self._training[i] for i in which])

    @property
    def num_validation(self) -> int:
        """Validation samples."""
        return len(self._validation)

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[Any]:
        """Batches of at most so many validation samples (None: all), evenly spread."""
        chosen = spread(len(self._validation), max_samples)
        for start in range(0, len(chosen), batch_size):
            part = chosen[start : start + batch_size]
            yield default_collate([self._validation[i] for i in part])


class _Part:
    """Some samples of a dataset."""

    def __init__(self, whole: Indexed, which: Sequence[int]) -> None:
        self._whole, self._which = whole, which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int, /) -> Any:
        return self._whole[self._which[index]]


def check_split(lengths: Sequence[int]) -> None:
    """Raise ConfigError unless samples can be divided into training and validation; `lengths` are those of their tensors."""
    if len(lengths) != 1:
        raise ConfigError(
            f"data: tensors of {', '.join(map(str, lengths))} samples: must be equally many; check their first axes"
        )
    if lengths[0] < _ONE_IN:
        raise ConfigError(
            f"data: {lengths[0]} samples, of which every {_ONE_IN}th is for validation: must be at least {_ONE_IN}; give more, or"
            " validation=..."
        )


def data_of(samples: Any, validation: Any, *, seed: int) -> Any:
    """What people have as `Data` of a run.

    Args:
        samples: tensors whose first axis is the sample, alone or in a tuple; an indexed dataset; or such `Data` already.
        validation: the same of the samples that evaluations use; None: every twentieth of `samples`, which is then not
            trained on.
        seed: of the order.

    Raises:
        ConfigError: it is none of these, or a side is empty.
    """
    if all(hasattr(samples, name) for name in ("batch", "validation", "key")):
        return samples
    if isinstance(samples, Tensor):
        samples = (samples,)
        validation = (validation,) if isinstance(validation, Tensor) else validation
    is_tensors = isinstance(samples, tuple | list) and all(isinstance(t, Tensor) for t in samples)
    if is_tensors:
        if validation is None:
            check_split(sorted({len(t) if t.ndim else 0 for t in samples}))
            validation = tuple(t[_ONE_IN - 1 :: _ONE_IN] for t in samples)
            samples = tuple(t[[i for i in range(len(t)) if (i + 1) % _ONE_IN]] for t in samples)
        return TensorData(samples, validation, seed=seed)
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ConfigError(
            f"data={type(samples).__name__}: has no length and index, without which a run cannot go on where it stopped; "
            "give tensors or a map-style dataset"
        )
    if validation is None:
        check_split([len(samples)])
        numbers = range(len(samples))
        validation = _Part(samples, [i for i in numbers if not (i + 1) % _ONE_IN])
        samples = _Part(samples, [i for i in numbers if (i + 1) % _ONE_IN])
    return SampleData(samples, validation, seed=seed)
