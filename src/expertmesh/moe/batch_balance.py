"""Balance loss over a global batch that comes in micro-batches: expert counts of earlier micro-batches are kept until
the step ends."""

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import RoutingStats


class BatchBalance:
    """Context for the micro-batches of one step: layers with balance_loss_scope="global" balance over all micro-batches
    so far.

    See `expertmesh.moe.losses.global_balance_loss` for the formula. Other layers are not affected. Call `add` after the
    backward pass of each micro-batch, because activation checkpointing computes its forward pass again.

    Example:
        >>> import torch
        >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, balance_loss_scope="global")
        >>> with BatchBalance(layer) as batch:
        ...     for x in torch.randn(3, 5, 8):
        ...         y, stats = layer(x)
        ...         ((y.square().mean() + stats.aux_loss) / 3).backward()
        ...         batch.add([stats])
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]

    def __enter__(self) -> "BatchBalance":
        """Clear the sums of earlier micro-batches."""
        self._set([None] * len(self._layers))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Clear the sums of the batch."""
        self._set([None] * len(self._layers))

    def add(self, stats: Sequence[RoutingStats]) -> None:
        """Add the counts of one micro-batch. Does not synchronise.

        Args:
            stats: the RoutingStats of every MoE layer, in the order of `model.modules()`.
        """
        if all(one.balance_sums_RE is None for one in stats):
            return
        if len(stats) != len(self._layers):
            raise ConfigError(
                f"balance_loss_scope=global: {len(stats)} RoutingStats for {len(self._layers)} MoE layers; return "
                "those of each, in"
                " their order"
            )
        sums: list[Tensor | None] = []
        for layer, one in zip(self._layers, stats, strict=True):
            earlier, new = layer.earlier_sums_RE, one.balance_sums_RE
            sums.append(earlier if new is None else new if earlier is None else earlier + new)
        self._set(sums)

    def _set(self, sums: Sequence[Tensor | None]) -> None:
        for layer, one in zip(self._layers, sums, strict=True):
            layer.earlier_sums_RE = one
