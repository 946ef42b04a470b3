"""`parallelize`: shard a model over ranks, experts with `ExpertStorage`, dense parameters with FSDP2."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from expertmesh.comm.mesh import (
    DenseDegrees,
    data_mesh,
    dense_degrees,
    dense_mesh,
    divisors,
    expert_degrees,
)
from expertmesh.comm.world import World
from expertmesh.config.dispatch_options import AS_USUAL, DispatchOptions
from expertmesh.config.run import ParallelConfig
from expertmesh.config.values import check_type, type_of
from expertmesh.costs.communication import USUAL_NETWORK, Network
from expertmesh.errors import ConfigError, named
from expertmesh.moe.check_arguments import check_module
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.adaptive import adapt, may_choose
from expertmesh.parallel.experts.dispatcher import ExpertDispatcher, spread_experts
from expertmesh.parallel.experts.fits import check_spread
from expertmesh.parallel.experts.prefetch import Prefetcher
from expertmesh.parallel.experts.route_split import RouteSplit, make_split
from expertmesh.parallel.experts.storage import Keep
from expertmesh.parallel.experts.tuning_cache import (
    Topology,
    load_network,
    load_plans,
    network_path,
    plan_keeper,
    plans_path,
)
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.tensor import TensorPlan, apply_plan, check_plan, tensor_group

_KEEP: dict[int, Keep] = {1: "until_step", 2: "until_step", 3: "regather"}

_OF_EXPERTS = (
    *("ep_degree", "es_degree", "route_degree", "expert_order"),
    *("overlap_degree", "all_to_all", "replicated_experts", "dispatch_dtype"),
)
"""Options of `ParallelConfig` that need a model with experts."""


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    *,
    world: World | None = None,
    blocks: Iterable[nn.Module] = (),
    tensor_plan: TensorPlan | None = None,
    adaptive: bool = False,
    bytes_beside: float = 0.0,
    plans: Path | None = None,
) -> World:
    """Shard a model over all ranks of a world, in place. Every rank must call.

    The model must hold the same parameters on all ranks (same seed). Each rank then computes its own part of the batch,
    and the loss of the batch is the **sum** of the ranks' losses: divide by the tokens of the whole batch, not by this
    rank's. Gradients come out summed. Build the optimizer afterwards, register it with `follow_optimizer`, and clip
    with `expertmesh.parallel.clip`.

    Args:
        model: any module; each `MoELayer` with grouped experts inside has them spread.
        config: degrees, see `ParallelConfig`.
        world: the ranks; None: all of torch.distributed, with tensors where the model is.
        blocks: modules whose dense parameters are gathered together, one after the other (the layers of a
            transformer); the model's other parameters make one more block.
        tensor_plan: the plan of tensor parallelism, needed with a tp_degree above 1, module names to styles of
            `torch.distributed.tensor.parallel` or `expertmesh.parallel.tensor`, see `TensorPlan`. Modules without a
            style run on this rank's tokens with whole parameters.
        adaptive: same as `config.adaptive`: each layer chooses its dispatch options by its load.
        bytes_beside: memory of a rank that is reserved for other long-lived allocations; adaptive dispatch does not use
            it.
        plans: file in which adaptive dispatch keeps its plans beside the user's cache, and which it begins with if it
            is there; read and written by rank 0. None: the cache alone.

    Returns:
        The world; it counts communicated bytes, and `World.close` ends its groups.

    Raises:
        ConfigError: the degrees do not fit the ranks or the model, the model is sharded or wrapped already, has a
            parameter with no dimension, or has different parameters on another rank. The model is then unchanged.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )  # torchrun and init_process_group("gloo") on several ranks
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.moe = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0)
        ...
        ...     def forward(self, x):
        ...         y, stats = self.moe(x)
        ...         return x + y, stats
        >>> model = Model()
        >>> world = em.parallelize(model, em.RunConfig(parallel={"zero_stage": 2}).parallel)
        >>> y, stats = model(torch.randn(5, 8))
        >>> torch.distributed.destroy_process_group()
    """
    _check_whole(model, config)
    if adaptive and not config.adaptive:
        config = config.updated({"adaptive": True})
    if world is None:
        world = World(device_type=model_device_type(model), timeout_s=config.timeout_s)
    degrees = degrees_of(config, num_ranks=world.size)
    _check_same(model, world)
    blocks, moe_layers = (
        _blocks_of(model, blocks),
        [m for m in model.modules() if isinstance(m, MoELayer)],
    )
    if degrees.tp > 1:
        check_plan(model, tensor_plan or {}, num_ranks=degrees.tp)
    topology, network = _spread_layers(moe_layers, config, world, degrees)
    if config.adaptive and topology is not None:
        on_host = config.offload and world.device_type != "cpu"
        own = resting_bytes(model, num_parts=degrees.dp_shard)
        taken = 0.0 if on_host else own + bytes_beside
        _adapt(moe_layers, config, world, topology, network, resting_bytes=taken, own=plans)
    experts = {p for layer in moe_layers for p in layer.experts.parameters()}
    if degrees.tp > 1:
        tensor_mesh = dense_mesh(world, degrees)["tp"]
        apply_plan(model, tensor_mesh, tensor_group(world, degrees.tp), tensor_plan or {})
    mesh = data_mesh(world, degrees)
    policy = CPUOffloadPolicy(pin_memory=world.device_type == "cuda")
    for module in [*blocks, model]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=config.zero_stage == 3,
            ignored_params=experts,
            offload_policy=policy if config.offload else OffloadPolicy(),
            shard_placement_fn=partial(_axis_of_shards, num_parts=degrees.dp_shard),
        )
    _sum_gradients(model)
    return world


def _blocks_of(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Checked list of blocks; raises ConfigError for a block that is not a module inside the model."""
    found, inside = list(blocks), set(model.modules())
    for index, block in enumerate(found):
        if not isinstance(block, nn.Module) or block not in inside or block is model:
            raise ConfigError(
                f"blocks: number {index}, {type_of(block)}, is no module inside the model; give the model's layers"
            )
    return found


def _check_whole(model: nn.Module, config: ParallelConfig) -> None:
    """Raise ConfigError unless the model is a module that is not yet sharded or wrapped, and `config` is a
    ParallelConfig."""
    check_module(model)
    fix = "give RunConfig(parallel={...}).parallel"
    check_type("config", config, ParallelConfig, "a ParallelConfig", fix)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "model is wrapped in DistributedDataParallel, which would average the gradients of different experts; "
            "give the"
            " module inside, parallelize sums gradients itself"
        )
    if isinstance(model, FSDPModule):
        raise ConfigError(
            f"model is {type_of(model)}, spread already; call parallelize once, on a model that fully_shard has not "
            "seen"
        )
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    experts = {p for layer in layers for p in layer.experts.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.ndim and parameter not in experts:
            raise ConfigError(
                f"model: {name} is a parameter without an axis, which cannot be cut over ranks; give it one:"
                " torch.nn.Parameter(torch.ones(1))"
            )


def _check_same(model: nn.Module, world: World) -> None:
    """Raise ConfigError unless all ranks have the same parameters, by sums of their bits; models on the meta device
    pass."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    parameters = [parameter.detach() for parameter in model.parameters()]
    if world.size == 1 or any(parameter.is_meta for parameter in parameters):
        return
    bits = (p.reshape(-1).view(words.get(p.itemsize, torch.uint8)) for p in parameters)
    found = Ranks(world).gather([int(each.sum(dtype=torch.int64)) for each in bits])
    odd = next((rank for rank, sums in enumerate(found) if sums != found[0]), None)
    if odd is not None:
        raise ConfigError(
            f"model: its parameters on rank {odd} are not those on rank 0; call torch.manual_seed with the same seed "
            "on all ranks"
            " before it is made, or load the same weights"
        )


def model_device_type(model: nn.Module) -> str | None:
    """Device type of a model's parameters; None: on the meta device, or no parameters."""
    device = next((p.device for p in model.parameters()), torch.device("meta"))
    if device.type == "cuda":
        check_current(device, torch.cuda.current_device())
    return None if device.type == "meta" else device.type


def check_current(device: torch.device, current: int) -> None:
    """Raise ConfigError for a model on another GPU than the current one."""
    if device.index not in (None, current):
        raise ConfigError(
            f"the model is on {device} and the current device is cuda:{current}; call "
            f"torch.cuda.set_device({device.index}) "
            "before the process group is made"
        )


def _spread_layers(
    moe_layers: list[MoELayer],
    config: ParallelConfig,
    world: World,
    degrees: DenseDegrees,
) -> tuple[Topology | None, Network]:
    """Shard the experts of all layers; returns topology and network, the topology only if a cost model needs it."""
    prefetcher = Prefetcher()
    per_node, adaptive = config.ranks_per_node, config.adaptive
    nodes = None if per_node is None else [rank // per_node for rank in range(world.size)]
    models_cost = bool(moe_layers) and (adaptive or config.all_to_all == "auto")
    topology, network = _network(world, nodes) if models_cost else (None, USUAL_NETWORK)
    for name in _OF_EXPERTS:
        value = getattr(config, name)
        if not moe_layers and value != type(config).model_fields[name].default:
            raise ConfigError(
                f"parallel.{name}",
                value,
                "has no effect in a model without experts",
                "leave it out",
            )
    if adaptive and not any(map(may_choose, moe_layers)):
        raise ConfigError(
            "parallel.adaptive",
            True,
            "has no effect in a model without grouped experts that have no adapters",
            "leave it out",
        )
    common: dict[str, Any] = {
        "num_replicas": degrees.dp_replicate,
        "order": config.expert_order,
        "keep": _KEEP[config.zero_stage],
        "nodes": nodes,
        "dispatch_dtype": config.dispatch_dtype,
        "offload": config.offload,
    }
    plans = [
        _plan_of(layer, index, config, degrees, num_moe_layers=len(moe_layers))
        for index, layer in enumerate(moe_layers)
    ]
    for layer, (es_degree, dispatch) in zip(moe_layers, plans, strict=True):  # all before one is changed
        check_spread(layer, world.size, es_degree=es_degree, dispatch=dispatch, **common)
    for layer, (es_degree, dispatch) in zip(moe_layers, plans, strict=True):
        spread_experts(
            layer,
            world,
            es_degree=es_degree,
            route_degree=dispatch.route_degree,
            overlap_degree=config.overlap_degree,
            all_to_all=config.all_to_all,
            replicated_experts=config.replicated_experts,
            network=network,
            prefetcher=prefetcher,
            **common,
        )
    return topology, network


def _plan_of(
    layer: MoELayer,
    index: int,
    config: ParallelConfig,
    degrees: DenseDegrees,
    *,
    num_moe_layers: int,
) -> tuple[int | None, DispatchOptions]:
    """Expert-slicing degree of a layer, and its dispatch options."""
    ep_degree = config.ep_degree_of(index, num_moe_layers=num_moe_layers)
    es_degree, route_degree = config.es_degree, config.route_degree or ep_degree
    if layer.grouped is not None:
        split = expert_split(
            config,
            degrees=degrees,
            num_experts=layer.num_experts,
            hidden_dim=layer.grouped.shape[2],
            ep_degree=ep_degree,
        )
        es_degree, route_degree = split.storage.f, split.route_degree
    dispatch = DispatchOptions(route_degree, config.overlap_degree, config.all_to_all, config.replicated_experts)
    return es_degree, dispatch


def resting_bytes(model: nn.Module, *, num_parts: int) -> float:
    """Bytes that weights, gradients and two moments will still take on a rank, for a model whose experts are
    sharded."""
    total = 0.0
    for parameter in model.parameters():
        is_cut = isinstance(parameter, DTensor)
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part_bytes = own.nbytes / (1 if is_cut else num_parts)
        total += part_bytes * (3 * parameter.requires_grad + own.is_meta)
    return total


def _sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 sum gradients over ranks instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _network(world: World, nodes: list[int] | None) -> tuple[Topology, Network]:
    """Topology of the ranks, and their links as measured on rank 0's disk, else the defaults; every rank must call."""
    topology = Topology.of(_device_name(world), world.nodes() if nodes is None else nodes)
    found = Ranks(world).on_rank0(lambda: load_network(network_path(topology)))
    return topology, found or USUAL_NETWORK


def _adapt(
    layers: list[MoELayer],
    config: ParallelConfig,
    world: World,
    topology: Topology,
    network: Network,
    *,
    resting_bytes: float,
    own: Path | None,
) -> None:
    """Let layers choose the dispatch options that the configuration leaves open, and save the plans that they settle
    on in the user's cache and in the run's `own` file."""
    ranks = Ranks(world)
    shapes = {(m.num_experts, m.dim, m.options.hidden_dim, m.options.activation) for m in layers}
    pinned = DispatchOptions(
        config.route_degree or (max(config.ep_degree) if config.ep_degree else None),
        config.overlap_degree if config.overlap_degree > 1 else None,
        "hierarchical" if config.all_to_all == "hierarchical" else None,
        config.replicated_experts or None,
    )
    model = f"{sorted(shapes, key=str)}, zero_stage {config.zero_stage}"
    if pinned != AS_USUAL:  # plans found among fewer options are stored apart
        model += f", {pinned}"
    usual = plans_path(topology, model)
    record = (usual, model) if own is None else (own, f"{topology.name}: {model}")
    keepers = [plan_keeper(*place) for place in {(usual, model), record}]

    def known() -> Mapping[str, DispatchOptions]:
        """Plans of the run, else of the cache, which become the run's."""
        if record[0].exists():
            return load_plans(*record)
        found = load_plans(usual, model)
        if own is not None:
            plan_keeper(*record)(found)
        return found

    def keep(plans: Mapping[str, DispatchOptions]) -> None:
        for keeper in keepers:
            keeper(plans)

    adapt(
        layers,
        pinned,
        network,
        num_gathers=2 if config.zero_stage == 3 else 1,
        resting_bytes=resting_bytes,
        known=ranks.on_rank0(known),
        on_settled=keep if ranks.is_leader else None,
    )


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name() if world.device_type == "cuda" else "cpu"


def follow_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Keep gathered expert weights between optimizer steps in a sharded model (zero_stage 1 and 2).

    Without this call weights are gathered in each forward: correct, but slower.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.dispatcher, ExpertDispatcher):
            layer.dispatcher.storage.follow(optimizer)


def expert_split(
    config: ParallelConfig,  # requested degrees
    *,
    degrees: DenseDegrees,  # the degrees of the dense layers
    num_experts: int,  # E
    hidden_dim: int,  # F
    ep_degree: int | None,  # the degree of expert parallelism of the layer, see `ParallelConfig.ep_degree_of`
) -> RouteSplit:
    """Storage degrees of a layer's experts, and the split that its forwards start from."""
    num_ranks = degrees.num_storage_ranks
    storage = expert_degrees(
        num_ranks,
        num_replicas=degrees.dp_replicate,
        tp_degree=degrees.tp,
        num_experts=num_experts,
        hidden_dim=hidden_dim,
        es_degree=config.es_degree,
        order=config.expert_order,
    )
    if ep_degree is None:
        return make_split(storage, config.route_degree)
    if storage.e % ep_degree:
        near = min(divisors(storage.e), key=lambda d: abs(d - ep_degree))
        raise ConfigError(
            "ep_degree",
            ep_degree,
            f"must divide the {storage.e} parts that {num_experts} experts on {num_ranks} ranks with "
            f"{named('es_degree', storage.f)} have",
            f"nearest: {near}",
        )
    return make_split(storage, ep_degree * storage.f)


def degrees_of(config: ParallelConfig, *, num_ranks: int) -> DenseDegrees:
    """Factors of the number of ranks for the dense layers."""
    if config.dispatch_dtype != "same" and num_ranks == 1:
        raise ConfigError(
            "parallel.dispatch_dtype",
            config.dispatch_dtype,
            "is for dispatch between ranks, and there is one rank",
            "start several with torchrun, or leave it out",
        )
    return dense_degrees(
        num_ranks,
        dp_replicate=config.dp_replicate_degree,
        dp_shard=config.dp_shard_degree,
        tp=config.tp_degree,
    )


def _axis_of_shards(parameter: nn.Parameter, *, num_parts: int) -> Shard:
    """Axis along which FSDP2 shards: the first that divides evenly and is not cut by tensor parallelism, else 0."""
    taken = parameter.placements if isinstance(parameter, DTensor) else ()
    free = [axis for axis in range(parameter.ndim) if not any(p.is_shard(axis) for p in taken)]
    even = [axis for axis in free if parameter.shape[axis] % num_parts == 0]
    # Only the first axis may be cut unevenly.
    return Shard(even[0] if even else 0)
