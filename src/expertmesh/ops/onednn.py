"""Whether PyTorch has oneDNN."""

import torch


def has_onednn() -> bool:
    """Whether oneDNN can multiply on this machine."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
