"""Map-style datasets and tensors as the data of a run."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, default_collate

from expertmesh.data.order import evenly_spaced
from expertmesh.data.tensors import IndexedData, TensorData, num_samples, tensor_bytes
from expertmesh.errors import ConfigError

_DIGESTED = 16
_ONE_IN = 20


class Indexed(Protocol):
    """A map-style dataset, for example a `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """A sample: tensors or numbers, alone or in tuples, lists and dictionaries."""


class SampleData(IndexedData):
    """Map-style datasets as the data of a run, collated by torch's `default_collate`.

    The key is a digest of the sizes and of some samples of each side, so random augmentation counts as other data.
    """

    def __init__(self, training: Indexed, validation: Indexed, *, seed: int) -> None:
        digest = hashlib.sha256()
        for name, side in (("training", training), ("validation", validation)):
            if len(side) < 1:
                raise ConfigError(f"{name} data: have no sample; give at least one")
            digest.update(f"{name} {len(side)} ".encode())
            for index in evenly_spaced(len(side), _DIGESTED):
                for part in tree_leaves(default_collate([side[index]])):
                    is_tensor = isinstance(part, Tensor)
                    digest.update(tensor_bytes(part) if is_tensor else repr(part).encode())
        self.key = digest.hexdigest()
        sizes = len(training), len(validation)
        source = type(getattr(training, "dataset", training)).__name__
        super().__init__(training, validation, sizes, seed=seed, source=source)

    def _take(self, side: Indexed, which: list[int]) -> Any:
        return default_collate([side[i] for i in which])


def check_split(lengths: Sequence[int]) -> None:
    """Raise ConfigError unless samples can be split into training and validation; `lengths` are the different lengths
    of their tensors."""
    if len(lengths) != 1:
        raise ConfigError(
            f"data: tensors of {', '.join(map(str, lengths))} samples: must be equally many; check their first axes"
        )
    if lengths[0] < _ONE_IN:
        raise ConfigError(
            f"data: {lengths[0]} samples, of which every {_ONE_IN}th is for validation: must be at least {_ONE_IN}; "
            "give more, or"
            " validation=..."
        )


def data_of(samples: Any, validation: Any, *, seed: int) -> Any:
    """`Data` of a run from a user's tensors or datasets.

    Args:
        samples: tensors whose first axis is the sample, alone or in a tuple; a map-style dataset; or `Data` already.
        validation: validation samples in the same form; None: every twentieth of `samples`, which is then not trained
            on.
    """
    if all(hasattr(samples, name) for name in ("batch", "validation", "key")):
        return samples
    samples, validation = ((given,) if isinstance(given, Tensor) else given for given in (samples, validation))
    if validation is not None and _are_tensors(samples) != _are_tensors(validation):
        raise ConfigError(
            f"data={type(samples).__name__}, validation={type(validation).__name__}: must be tensors on both sides, or "
            "datasets; give the same of both"
        )
    if _are_tensors(samples):
        if validation is None:
            check_split(sorted(set(map(num_samples, samples))))
            validation = tuple(t[_ONE_IN - 1 :: _ONE_IN] for t in samples)
            samples = tuple(t[[i for i in range(len(t)) if (i + 1) % _ONE_IN]] for t in samples)
        return TensorData(samples, validation, seed=seed)
    for given in (samples, validation):
        is_indexed = all(hasattr(given, name) for name in ("__len__", "__getitem__"))
        # a tuple means several tensors; NumPy arrays in it would count as samples
        if given is not None and (not is_indexed or isinstance(given, tuple | Mapping)):
            raise ConfigError(
                f"data={type(given).__name__}: must be tensors, alone or in a tuple, or a dataset with a length and "
                "samples by number, without"
                " which a run cannot go on where it stopped; convert it, arrays with torch.from_numpy"
            )
    if validation is None:
        check_split([len(samples)])
        numbers = range(len(samples))
        validation = Subset(samples, [i for i in numbers if not (i + 1) % _ONE_IN])
        samples = Subset(samples, [i for i in numbers if (i + 1) % _ONE_IN])
    return SampleData(samples, validation, seed=seed)


def _are_tensors(given: Any) -> bool:
    return isinstance(given, tuple | list) and all(isinstance(t, Tensor) for t in given)
