"""Samples of one's own: of any type, of tensors and datasets, told apart by what is in them."""

import pytest
import torch

from expertmesh.data.samples import data_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
@pytest.mark.parametrize("of_dataset", [False, True])
def test_samples_of_any_type_are_told_apart(dtype, of_dataset):
    """Those that come from a module, with a gradient, too."""
    keys = set()
    for last in (0, 1):
        x = torch.ones(40, 3)
        x[39, 2] = last
        x = x.to(dtype).requires_grad_(dtype.is_floating_point)
        data = data_of([(row, 1.0) for row in x] if of_dataset else x, None, seed=0)
        (whole,) = data.validation(None, 9)
        assert whole[0].dtype == dtype and len(whole[0]) == data.num_validation == 2
        assert data.description.startswith("list: 38" if of_dataset else "tensors: 38")
        keys.add(data.key)
    assert len(keys) == 2
