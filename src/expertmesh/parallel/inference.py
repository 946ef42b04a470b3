"""A model that several ranks run together on the same tokens: each has a part of every layer's experts, and all of the rest."""

from collections.abc import Callable

from torch import Tensor, nn

from expertmesh.comm.collectives import broadcast_
from expertmesh.comm.world import World
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.dispatcher import ExpertDispatcher, spread_experts
from expertmesh.parallel.experts.exchange import AllReduceExchange
from expertmesh.parallel.experts.fits import check_spread


def spread_for_inference(model: nn.Module, world: World, *, es_degree: int | None = None) -> None:
    """Spread the experts of a model over ranks that are all given the same tokens, in place. Every rank must call.

    Expert slicing (DeepSpeed-MoE, Rajbhandari et al. 2022, arXiv 2201.05596, 5.2.2): with W ranks each reads and computes
    1 / W of every expert that a token chose, so that a token's latency falls with W while experts take the time. All else runs
    on every rank. One exchange per layer adds the ranks' parts, in FP32 and in the order of the ranks: all ranks have
    the same bits. Only under `torch.no_grad()`.

    Args:
        model: any module, with the same parameters on all ranks or on the meta device; each `MoELayer` inside is spread.
        world: the ranks.
        es_degree: slices of each expert; None: as many as there are ranks, where these divide the experts' hidden size (each
            rank then works as long as the others, whichever experts are chosen), else as few as possible.

    Raises:
        ConfigError: the degrees do not fit the ranks or a layer, or a layer is spread already.

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
    """As many as there are ranks, where these divide the experts' hidden size."""
    experts = layer.experts
    if isinstance(experts, GroupedExperts) and experts.w_in.shape[2] % num_ranks == 0:
        return num_ranks
    return None


def broadcast_from_rank0(model: object) -> Callable[[Tensor], Tensor]:
    """What makes all ranks of a model go on with the choices of the first one; for a model in one process, nothing.

    Ranks compute the same bits where their processors are alike. Where these differ, a tie could fall otherwise, and ranks
    that go on with other tokens would wait for each other in vain.

    Args:
        model: perhaps spread by `spread_for_inference`.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    dispatchers = (module.dispatcher for module in modules if isinstance(module, MoELayer))
    found = next((d for d in dispatchers if isinstance(d, ExpertDispatcher) and d.tokens_are_replicated), None)  # fmt: skip
    if found is None or found.storage.world.size == 1:
        return lambda choices: choices
    group = found.storage.world.all_ranks()

    def from_rank0(choices: Tensor) -> Tensor:
        choices = choices.contiguous()
        broadcast_(choices, group, where="the chosen tokens")
        return choices

    return from_rank0
