"""Expert slicing for inference: all ranks run the same tokens, each with a part of every layer's experts."""

from collections.abc import Callable

from torch import Tensor, nn

from expertmesh.comm.collectives import broadcast_
from expertmesh.comm.world import World
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.dispatcher import ExpertDispatcher, spread_experts
from expertmesh.parallel.experts.exchange import AllReduceExchange
from expertmesh.parallel.experts.fits import check_spread


def spread_for_inference(model: nn.Module, world: World, *, es_degree: int | None = None) -> None:
    """Shard the experts of a model over ranks that all receive the same tokens, in place. Every rank must call.

    Expert slicing (DeepSpeed-MoE, Rajbhandari et al. 2022, arXiv 2201.05596, 5.2.2): each of W ranks reads and computes
    1 / W of every chosen expert, so latency falls with W while experts dominate. All other modules run on every rank.
    One exchange per layer adds the partial outputs in FP32 and in rank order, so all ranks have the same bits. Requires
    `torch.no_grad()`.

    Args:
        model: any module, with the same parameters on all ranks or on the meta device; each `MoELayer` inside is
            sharded.
        world: the ranks.
        es_degree: slices of each expert; None: the number of ranks if it divides the experts' hidden size (equal work
            on all ranks, whichever experts are chosen), else as few as possible.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )  # torchrun and init_process_group("gloo") on several ranks
        >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0)
        >>> spread_for_inference(layer, World())
        >>> with torch.no_grad():
        ...     y, stats = layer(torch.randn(5, 8))
        >>> torch.distributed.destroy_process_group()
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    slices = [_slices(layer, world.size) if es_degree is None else es_degree for layer in layers]
    for layer, number in zip(layers, slices, strict=True):  # all before one is changed
        check_spread(layer, world.size, es_degree=number)
    for layer, number in zip(layers, slices, strict=True):
        spread_experts(layer, world, es_degree=number, exchanges=AllReduceExchange)


def _slices(layer: MoELayer, num_ranks: int) -> int | None:
    """Number of ranks if it divides the experts' hidden size, else None."""
    return num_ranks if layer.grouped and layer.grouped.shape[2] % num_ranks == 0 else None


def broadcast_from_rank0(model: object) -> Callable[[Tensor], Tensor]:
    """Function that replaces chosen tokens on all ranks with rank 0's; the identity for a model in one process.

    Ranks compute the same bits on equal processors. On different processors a tie may be broken differently; ranks that
    continue with different tokens would then deadlock.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    dispatchers = (module.dispatcher for module in modules if isinstance(module, MoELayer))
    found = next((d for d in dispatchers if isinstance(d, ExpertDispatcher) and d.tokens_are_replicated), None)
    if found is None or found.storage.world.size == 1:
        return lambda choices: choices
    group = found.storage.world.all_ranks()

    def from_rank0(choices: Tensor) -> Tensor:
        choices = choices.contiguous()
        broadcast_(choices, group, where="the chosen tokens")
        return choices

    return from_rank0
