"""Memory of training: exact for weights, gradients and optimizer on any number of ranks, estimated for activations."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from expertmesh.config.run import Optimizer, ParallelConfig, StateDtype
from expertmesh.spec.model_spec import ModelSpec, Parameter, num_elements
from expertmesh.spec.moments import moment_bytes

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of training on one process, by purpose.

    Attributes:
        weights_bytes: the parameters as the optimizer keeps them: FP32, or FP64 in an FP64 run.
        compute_copy_bytes: their copies in BF16 or FP16, where the run computes in one of these.
        gradients_bytes: in the dtype of the weights.
        optimizer_bytes: both AdamW moments; one for matrices that Muon updates.
        activations_bytes: activations that one micro-batch keeps for the backward pass, estimated.
    """

    weights_bytes: int
    compute_copy_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return (
            self.weights_bytes
            + self.compute_copy_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


def num_moments(parameter: Parameter, optimizer: Optimizer) -> int:
    """Number of moments that an optimizer keeps of a parameter: 2 of AdamW, 1 for a matrix that Muon updates."""
    return 1 if optimizer == "muon" and parameter.is_matrix else 2


def optimizer_bytes(
    parameter: Parameter,
    part: Sequence[int],
    *,
    optimizer: Optimizer,
    state_dtype: StateDtype,
    master: int,
) -> int:
    """Bytes of an optimizer's moments of a part of a parameter.

    Args:
        parameter: the parameter.
        part: sizes of the part.
        optimizer: adamw or muon.
        state_dtype: type of its moments.
        master: bytes of an element of the parameter.
    """
    each = moment_bytes(parameter.shape, part, state_dtype, master=master)
    return num_moments(parameter, optimizer) * each


@dataclass(frozen=True)
class RankMemory:
    """Bytes of parameters and their states on the rank of a training run that has most.

    Attributes:
        parameters_bytes: the rank's part of the parameters.
        gradients_bytes: their gradients, of the same dtype and size.
        optimizer_bytes: both AdamW moments; one for matrices that Muon updates.
        gathered_dense_bytes: whole dense parameters beside the parts, at most at a time.
        gathered_experts_bytes: gathered expert weights, at most at a time.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_dense_bytes: int
    gathered_experts_bytes: int

    @property
    def rest_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what a rank holds between steps."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """Parameters, gradients, optimizer state and gathered weights."""
        return self.rest_bytes + self.gathered_dense_bytes + self.gathered_experts_bytes


def rank_memory(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    num_ranks: int,
    dtype: str = "float32",
    optimizer: Optimizer = "adamw",
    state_dtype: StateDtype = "float32",
) -> RankMemory:
    """Memory of parameters, gradients and optimizer state on each rank (docs/parallelism.md, "Memory").

    With W = dp_shard x tp ranks that hold one copy, a rank holds between steps, four times (weights and gradients in the
    parameters' dtype, and two moments in their own, see `spec/moments.py`):

    * experts: 1 / W of all;
    * dense parameters that tensor parallelism cuts: 1 / (tp dp_shard); the others 1 / dp_shard. The first axis that dp_shard
      divides is cut; where there is none, the first axis, in pieces of ceil(size / dp_shard).

    Gathered beside that, at most:

    * of dense parameters, 1 / tp of those outside the layers and of two neighbouring layers (one where dp_shard is 1, which
      FSDP2 copies all the same), or of all layers where zero_stage is 1 or 2; with tp > 1 the vocabulary's matrices whole;
    * of experts, 1 / route_degree of two neighbouring MoE layers in the compute dtype, or of all where zero_stage is 1 or 2;
      none where route_degree = W; and replicated_experts of each layer, from its forward to its backward.

    Args:
        spec: the model's parameters.
        parallel: degrees that fit the model and the ranks.
        num_ranks: the number of ranks of the world.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
        optimizer: adamw or muon.
        state_dtype: type of its moments.

    Returns:
        Bytes by purpose.
    """
    compute = DTYPE_BYTES[dtype]
    master, tp = max(compute, 4), parallel.tp_degree
    dp_shard = parallel.dp_shard_degree or num_ranks // (parallel.dp_replicate_degree * tp)
    W, kept = dp_shard * tp, parallel.zero_stage < 3
    held, moments, outside = 0, 0, 0
    dense, experts, num_experts = Counter[int](), Counter[int](), dict[int, int]()
    for parameter in spec:
        sizes = _largest_sizes(parameter, dp_shard=dp_shard, tp=tp)
        if parameter.is_expert:
            sizes = _sizes_of_experts(parameter, parallel, num_ranks=W)
        held += math.prod(sizes)
        moments += optimizer_bytes(
            parameter, sizes, optimizer=optimizer, state_dtype=state_dtype, master=master
        )
        if parameter.is_expert:
            assert parameter.layer is not None and parameter.expert_axis is not None
            experts[parameter.layer] += parameter.num_elements
            num_experts[parameter.layer] = parameter.shape[parameter.expert_axis]
            continue
        whole = parameter.num_elements // (tp if _tensor_axis(parameter, tp) is not None else 1)
        if parameter.layer is None:
            # Parameters outside the layers are cut for storage only: their user gathers them.
            outside += whole + (parameter.num_elements if whole < parameter.num_elements else 0)
        else:
            dense[parameter.layer] += whole
    layers = list(dense.values())
    most = sum(layers) if kept else _most_at_once(layers, 2 if dp_shard > 1 else 1)
    shares, hot = [], 0
    for index, (layer, elements) in enumerate(experts.items()):
        ep_degree = parallel.ep_degree_of(index, num_moe_layers=len(experts))
        slices = parallel.es_degree or W // math.gcd(num_experts[layer], W)
        route = parallel.route_degree or W if ep_degree is None else ep_degree * slices
        hot += 0 if route == 1 else parallel.replicated_experts * elements // num_experts[layer]
        shares.append(0 if route == W else elements // route)
    return RankMemory(
        parameters_bytes=held * master,
        gradients_bytes=held * master,
        optimizer_bytes=moments,
        gathered_dense_bytes=(outside + most) * master,
        gathered_experts_bytes=(hot + (sum(shares) if kept else _most_at_once(shares, 2)))
        * compute,
    )


def memory_by_size(
    spec: ModelSpec,
    *,
    activation_elements: int,
    parallel: ParallelConfig,
    num_ranks: int,
    dtype: str,
    optimizer: Optimizer = "adamw",
    state_dtype: StateDtype = "float32",
) -> tuple[MemoryEstimate, RankMemory | None]:
    """Memory of training a model, estimated from its parameters' sizes alone.

    Args:
        spec: the model's parameters.
        activation_elements: elements that one micro-batch keeps for the backward pass.
        parallel: degrees that fit the ranks.
        num_ranks: the number of ranks of the world.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
        optimizer: adamw or muon.
        state_dtype: type of its moments.

    Returns:
        Memory of one process that trains alone, and of each of several ranks; None for one rank.
    """
    compute = DTYPE_BYTES[dtype]
    master = max(compute, 4)
    weights = spec.num_parameters * master
    alone = MemoryEstimate(
        weights_bytes=weights,
        compute_copy_bytes=spec.num_parameters * compute if compute < master else 0,
        gradients_bytes=weights,
        optimizer_bytes=sum(
            optimizer_bytes(
                one, one.shape, optimizer=optimizer, state_dtype=state_dtype, master=master
            )
            for one in spec
        ),
        activations_bytes=activation_elements * compute,
    )
    if num_ranks == 1:
        return alone, None
    parts = parallel.dp_shard_degree or num_ranks // parallel.dp_replicate_degree
    part = weights // parts
    layers = spec.dense_layers
    most = _most_at_once(layers, 2) if parallel.zero_stage == 3 else sum(layers)
    each = RankMemory(
        parameters_bytes=part,
        gradients_bytes=part,
        optimizer_bytes=rank_memory(
            spec,
            parallel,
            num_ranks=num_ranks,
            dtype=dtype,
            optimizer=optimizer,
            state_dtype=state_dtype,
        ).optimizer_bytes,
        gathered_dense_bytes=(num_elements(spec.layers[None]) + most) * master,
        gathered_experts_bytes=0,
    )
    return alone, each


def _most_at_once(sizes: Sequence[int], number: int) -> int:
    """Largest sum of `number` neighbouring sizes."""
    return max((sum(sizes[i : i + number]) for i in range(len(sizes))), default=0)


def _tensor_axis(parameter: Parameter, tp: int) -> int | None:
    axis = parameter.tensor_axis
    return axis if axis is not None and tp > 1 and parameter.shape[axis] % tp == 0 else None


def largest_part(parameter: Parameter, *, dp_shard: int, tp: int) -> int:
    """Elements of a dense parameter on the rank that has most.

    Args:
        parameter: the parameter.
        dp_shard: number of ranks over which it is sharded.
        tp: ranks of tensor parallelism.
    """
    return math.prod(_largest_sizes(parameter, dp_shard=dp_shard, tp=tp))


def _sizes_of_experts(
    parameter: Parameter, parallel: ParallelConfig, *, num_ranks: int
) -> list[int]:
    """Sizes of a rank's part of an experts' parameter: E is cut; where ranks are left, F, or the last axis of one without F."""
    assert parameter.expert_axis is not None
    local, axis = list(parameter.shape), parameter.expert_axis
    slices = parallel.es_degree or num_ranks // math.gcd(local[axis], num_ranks)
    local[axis] //= num_ranks // slices
    sliced = parameter.axes.index("hidden") if "hidden" in parameter.axes else len(local) - 1
    local[sliced] //= slices
    return local


def _largest_sizes(parameter: Parameter, *, dp_shard: int, tp: int) -> list[int]:
    """Sizes of a dense parameter's part on the rank that has most."""
    taken = _tensor_axis(parameter, tp)
    local = [size // tp if axis == taken else size for axis, size in enumerate(parameter.shape)]
    free = [axis for axis in range(len(local)) if axis != taken]
    cut = next((axis for axis in free if local[axis] % dp_shard == 0), 0)
    local[cut] = -(-local[cut] // dp_shard)
    return local
