"""Warm-up of a layer's kernels before a CUDA graph is captured, during which nothing may compile."""

from collections.abc import Iterable

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer


def warm_up(
    layer: MoELayer,
    token_counts: Iterable[int],
    *,
    dtype: torch.dtype | None = None,
    backward: bool | None = None,
) -> None:
    """Compile a layer's kernels for all token counts from the least to the most given, by running it on these and on
    powers of two between.

    Kernels are compiled at their first launch. Tile sizes depend on the number of tokens, so another number may compile
    again, which fails while a CUDA graph is captured. Call this with the fewest and the most tokens that will be
    captured. A kernel's tiles change at most once while the number of tokens doubles, so a count between two powers of
    two uses the kernels of one of them. Parameters, gradients and buffers stay as they are. With experts on several
    processes, all of them must call it with the same counts.

    Args:
        layer: the layer on its device and in its mode; evaluation and training need different kernels.
        token_counts: numbers of tokens, at least 0.
        dtype: the dtype of the tokens; None: the dtype of the experts' parameters.
        backward: whether to run the backward, too; None: in training only.

    Raises:
        ConfigError: a number of tokens is negative.

    Example:
        >>> warm_up(MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2), token_counts=[1, 4])
    """
    parameters = [p for p in layer.parameters() if p.requires_grad]
    grouped = layer.grouped
    if grouped is None:
        some: Tensor | None = next(layer.experts.parameters(), None)
    else:
        some = grouped.weights().w_in[0]
        dtype = dtype or grouped.dtype  # of a quantised base not the numbers', nor the adapters'
    device = torch.get_default_device() if some is None else some.device
    device = getattr(layer.experts, "compute_device", None) or device  # of offloaded experts
    dtype = dtype or (torch.get_default_dtype() if some is None else some.dtype)
    backward = layer.training if backward is None else backward
    for count in _with_powers_of_two(set(token_counts)):
        x_TD = torch.zeros(count, layer.dim, dtype=dtype, device=device, requires_grad=backward)
        token_ids = torch.arange(count, device=device)
        with torch.set_grad_enabled(backward):
            y_TD, stats = layer(x_TD, token_ids=token_ids)
        if backward:
            # times 0, so that buffers of main gradients stay as they are
            torch.autograd.grad(
                0.0 * _sum(y_TD, stats.aux_loss, stats.z_loss),
                [x_TD, *parameters],
                allow_unused=True,
            )


def _with_powers_of_two(counts: set[int]) -> list[int]:
    """Sorted list of the counts and of the powers of two between the least and the most."""
    least, most = min(counts, default=0), max(counts, default=0)
    if least < 0:
        raise ConfigError(f"token_counts holds {least}; it must be at least 0; leave it out")
    return sorted(counts | {n for i in range(most.bit_length()) if least < (n := 1 << i) < most})


def _sum(*terms: Tensor) -> Tensor:
    return torch.stack([term.float().sum() for term in terms]).sum()
