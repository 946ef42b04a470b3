"""Counter-based random numbers: Philox4x32-10 in torch operations."""

import torch
from torch import Tensor

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and the Random123 library.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


# Opaque to torch.compile: fused, the ten rounds become one expression that a C++ compiler takes minutes for, and that
# lets it assume that the products below never overflow. Unfused, they wrap, which keeps all 64 bits.
@torch.library.custom_op("expertmesh::philox4x32", mutates_args=())
def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """Compute Philox4x32-10 of a counter of four words and a key of two.

    Args:
        c0: int64 word of the counter in [0, 2^32), broadcast with c1, c2 and c3.
        k0: scalar int64 in [0, 2^32).

    Returns:
        (..., 4) int64, uniform in [0, 2^32). Does not synchronise.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK32).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = ((product0 >> 32) & _MASK32).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = product1.bitwise_and_(_MASK32), product0.bitwise_and_(_MASK32)
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return torch.stack((c0, c1, c2, c3), -1)


@philox4x32.register_fake
def _(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    return c0.new_empty((*torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape), 4))
