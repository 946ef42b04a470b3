"""Checks that the experts of a layer can be sharded with given options, before anything is changed."""

from collections.abc import Sequence
from typing import cast, get_args

from expertmesh.comm.mesh import ExpertDegrees, expert_degrees
from expertmesh.config.dispatch_options import AS_USUAL, AllToAll, DispatchDtype, DispatchOptions
from expertmesh.config.run import ExpertOrder
from expertmesh.config.values import WHOLE, Number, check_choice
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import ExpertList
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.modules import MODULES_STAY, check_modules, module_degrees
from expertmesh.parallel.experts.packed_shards import PACKED_STAY, check_packed
from expertmesh.parallel.experts.route_split import make_split
from expertmesh.parallel.experts.storage import ADAPTERS_STAY, Keep, check_shards


def check_spread(
    layer: MoELayer,  # the layer before it is sharded
    num_ranks: int,  # number of ranks of the world
    *,
    num_replicas: int = 1,  # replicas of the experts
    es_degree: int | None = None,  # slices of each expert
    order: ExpertOrder = "slices_inner",  # assignment of parts to ranks
    keep: Keep = "until_backward",  # lifetime of gathered weights
    dispatch: DispatchOptions = AS_USUAL,
    has_exchange: bool = False,  # whether the exchange is given, and not chosen by `all_to_all`
    nodes: Sequence[int] | None = None,  # node of each rank
    dispatch_dtype: DispatchDtype = "same",  # dtype of dispatched tokens
    offload: bool = False,  # whether parameters rest in host memory
) -> ExpertDegrees:
    """Degrees of a layer's experts on the ranks of one replica; see `spread_experts` for the arguments."""
    name = f"layer {layer.layer_index}"
    if hasattr(layer.dispatcher, "storage"):  # an `ExpertDispatcher`, whose module imports this one
        raise ConfigError(
            f"the experts of layer {layer.layer_index} are spread already; spread a layer, or a model with it, once"
        )
    if num_replicas < 1 or num_ranks % num_replicas:
        raise ConfigError(f"num_replicas={num_replicas}: must divide the {num_ranks} ranks; choose a divisor")
    check_choice("order", order, get_args(ExpertOrder))
    check_choice("keep", keep, get_args(Keep))
    each = num_ranks // num_replicas
    if (experts := layer.grouped) is not None:
        if experts.paging is not None:
            raise ConfigError(
                f"{name}: its experts are in slots, which are of one process; give em.Engine(..., parallel=) the "
                "folder, or spread"
                " experts without slots"
            )
        degrees = expert_degrees(
            each,
            num_experts=layer.num_experts,
            hidden_dim=experts.shape[2],
            es_degree=es_degree,
            order=order,
        )
        if experts.format == "dense":
            check_shards(experts, degrees, offload=offload, layer=name)
            stay = "" if experts.adapters is None else ADAPTERS_STAY
        else:
            check_packed(experts, degrees, offload=offload, layer=name)
            stay = PACKED_STAY
    else:
        degrees = module_degrees(
            each,
            num_experts=layer.num_experts,
            es_degree=es_degree,
            route_degree=dispatch.route_degree,
            offload=offload,
        )
        check_modules(cast(ExpertList, layer.experts), degrees)
        stay = MODULES_STAY
    make_split(degrees, dispatch.route_degree)
    check_dispatch(dispatch_dtype, nodes=nodes, num_ranks=num_ranks)
    check_options(dispatch, num_experts=layer.num_experts, stay=stay, has_exchange=has_exchange)
    return degrees


def check_dispatch(dispatch_dtype: str, *, nodes: Sequence[int] | None, num_ranks: int) -> None:
    """Check options of a dispatcher; see `ExpertDispatcher`."""
    check_choice("dispatch_dtype", dispatch_dtype, get_args(DispatchDtype))
    if nodes is not None and len(nodes) != num_ranks:
        raise ConfigError(
            f"nodes={tuple(nodes)}: must name the node of each of the {num_ranks} ranks; leave it out to have "
            "those of torchrun"
        )


def check_options(dispatch: DispatchOptions, *, num_experts: int, stay: str, has_exchange: bool) -> None:
    """Check dispatch options. `dispatch`: options of a call, or the defaults of a dispatcher."""
    fix = "use 1 to send all tokens at once"
    Number(1, fix=fix, types=WHOLE, optional=True).check("overlap_degree", dispatch.overlap_degree)
    if not 0 <= (dispatch.replicated_experts or 0) <= num_experts:
        raise ConfigError(
            f"replicated_experts={dispatch.replicated_experts}: must be from 0 to the {num_experts} experts; choose "
            "fewer"
        )
    if dispatch.replicated_experts and stay:
        raise ConfigError(
            f"replicated_experts={dispatch.replicated_experts} with {stay}: they stay where they are; leave it out"
        )
    if dispatch.all_to_all is not None:
        check_choice("all_to_all", dispatch.all_to_all, get_args(AllToAll))
    if has_exchange and dispatch.all_to_all not in (None, "flat"):
        raise ConfigError(
            f"all_to_all={dispatch.all_to_all} with exchanges: a given exchange sends tokens in its own way; leave "
            "one out"
        )
