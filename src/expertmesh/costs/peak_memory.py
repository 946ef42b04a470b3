"""Memory of a rank in training, by part, at the peak of a step."""

from dataclasses import dataclass, fields, replace
from functools import cache

from expertmesh.costs.memory import largest_part
from expertmesh.costs.rank_layout import OURS, RankLayout, States, Workload
from expertmesh.costs.sizes import LayerSizes, ModelSizes
from expertmesh.costs.step_time import ONE_HOT_MASK_BYTES

GIB = 2**30
CONTEXT_BYTES = 0.5 * GIB
"""Bytes of a CUDA context and its kernels."""
NCCL_BYTES = 0.37 * GIB
"""Bytes of the buffers of one set of communicators (ai-dynamo/aiconfigurator: 342 to 392 MiB)."""
FRAGMENTS = 0.05
"""Fragmentation as a share of live bytes, with expandable segments; three times as much without (docs/planner.md)."""
LOGITS_CHUNKS = 8
"""Number of parts in which logits are computed where they are never whole."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter.

    Attributes:
        weight: bytes of the weight between steps.
        gradient: bytes of its gradient.
        optimizer: bytes of its moments, and of a master copy where the weight is rounded.
        shards_weights: whether weights and gradients are sharded over data-parallel ranks; False: optimizer states alone.
    """

    weight: float
    gradient: float
    optimizer: float
    shards_weights: bool = True


STATES: dict[States, StateBytes] = {
    "ours": StateBytes(4, 4, 8),
    "bf16_moments": StateBytes(4, 4, 4),
    "int8_moments": StateBytes(4, 4, 2.125),
    "fsdp2": StateBytes(4, 4, 8),
    "fairseq": StateBytes(2, 2, 4),
    "megatron": StateBytes(2, 4, 12, shards_weights=False),
    "deepspeed": StateBytes(2, 2, 12, shards_weights=False),
}
"""Bytes by software. ours: weights, gradients and both moments in FP32; fairseq: FP16 without a master copy; megatron, deepspeed: ZeRO-1."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank at the peak of a step, on the device and on the host.

    Attributes:
        weights_bytes: parameters between steps.
        gradients_bytes: their gradients.
        optimizer_bytes: moments and master copies.
        gathered_bytes: whole weights beside the parts.
        activations_bytes: activations kept for the backward.
        dispatch_bytes: rows in dispatch, and masks of one-hot dispatch.
        logits_bytes: logits with their gradient.
        communication_bytes: the context and the buffers of collectives.
        allowance_bytes: fragmentation.
        reused_bytes: memory counted twice above: logits are freed before a layer is recomputed.
        host_bytes: offloaded states of one rank.
        checkpoint_bytes: a rank's part of a checkpoint, which one copy of the model writes.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    gathered_bytes: float
    activations_bytes: float
    dispatch_bytes: float
    logits_bytes: float
    communication_bytes: float
    allowance_bytes: float
    reused_bytes: float = 0.0
    host_bytes: float = 0.0
    checkpoint_bytes: float = 0.0

    @property
    def live_bytes(self) -> float:
        """Bytes of tensors, as `torch.cuda.max_memory_allocated` shows them."""
        rest = {"communication_bytes", "allowance_bytes", "host_bytes", "reused_bytes"}
        rest.add("checkpoint_bytes")
        names = [f.name for f in fields(self) if f.name not in rest]
        return sum(getattr(self, name) for name in names) - self.reused_bytes

    @property
    def device_bytes(self) -> float:
        """Bytes that the device must have in all."""
        return self.live_bytes + self.communication_bytes + self.allowance_bytes

    @property
    def states_bytes(self) -> float:
        """Bytes held between steps: weights, gradients and optimizer states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def peak_memory(sizes: ModelSizes, layout: RankLayout, work: Workload) -> PeakMemory:
    """Peak memory of the rank that has most.

    Args:
        sizes: sizes of the model.
        layout: layout of the run.
        work: sequences, precision and software.
    """
    states, b = STATES[work.states], work.element_bytes
    stages, tp = layout.pp_degree, layout.tp_degree
    dense = sizes.dense_parameters / stages / tp
    experts = sizes.expert_parameters / stages / layout.route_degree
    own = _dense_part(sizes, layout.shard_degree, tp) / stages + experts / layout.num_replicas
    held = own if states.shards_weights else dense + experts
    parts = {
        "weights_bytes": held * states.weight,
        "gradients_bytes": held * states.gradient,
        "optimizer_bytes": own * states.optimizer,
    }
    host = sum(parts.values()) if layout.offload else 0.0
    if layout.offload:
        parts = dict.fromkeys(parts, 0.0)
    gathered = _gathered(sizes, layout, work)
    T = layout.micro_batch * work.seq_len / (tp * layout.cp_degree)
    flight = 1.0
    if stages > 1:  # passes in flight, whose activations the first stage keeps
        flight = min(stages, layout.accumulation) * (1 + (layout.virtual_stages > 1) / stages)
    kept, again, dispatch = _activations(sizes, layout, work, T)
    kept *= flight / stages
    logits = T * sizes.vocab_size * (b + 8) / (LOGITS_CHUNKS if work.chunks_logits else 1)
    found = PeakMemory(
        **parts,
        gathered_bytes=gathered,
        activations_bytes=kept + again,
        dispatch_bytes=dispatch,
        logits_bytes=logits,
        communication_bytes=CONTEXT_BYTES + NCCL_BYTES * (1 + (layout.num_ranks > 1)),
        allowance_bytes=0.0,
        reused_bytes=min(logits, again + dispatch),
        host_bytes=host,
        checkpoint_bytes=held * states.weight + own * states.optimizer,
    )
    return replace(found, allowance_bytes=FRAGMENTS * found.live_bytes)


@cache
def _dense_part(sizes: ModelSizes, shard_degree: int, tp_degree: int) -> float:
    """Number of dense parameters of the rank with most; an even share where their shapes are not known."""
    if not sizes.dense:
        return sizes.dense_parameters / shard_degree / tp_degree
    return sum(
        count * largest_part(parameter, dp_shard=shard_degree, tp=tp_degree)
        for parameter, count in sizes.dense
    )


def _gathered(sizes: ModelSizes, layout: RankLayout, work: Workload) -> float:
    """Bytes of gathered weights: two layers at a time where each use gathers, all layers where a step keeps them."""
    if not STATES[work.states].shards_weights:
        return 0.0
    stages, tp = layout.pp_degree, layout.tp_degree
    if layout.stage_ranks == 1:
        return 0.0
    keeps = layout.zero_stage < 3
    widest = max(block.dense_parameters for block in sizes.blocks)
    routed = [b.num_experts * b.expert_parameters for b in sizes.blocks]
    at_once = sizes.two_layers_parameters if layout.shard_degree > 1 else widest
    all_dense = sum(b.count * b.dense_parameters for b in sizes.blocks) / stages
    outside = sizes.outside_parameters / tp + (sizes.outside_parameters if tp > 1 else 0)
    whole_gradients = 0.0
    if layout.zero_stage == 1 and layout.accumulation > 1 and layout.shard_degree > 1:
        whole_gradients = 4 * (all_dense + sizes.outside_parameters) / tp
    total = (
        whole_gradients + (outside + (all_dense if keeps else at_once) / tp) * work.gathered_bytes
    )
    if layout.num_replicas > 1:
        layers = sizes.expert_parameters / stages if keeps else 2 * max(routed)
        total += layers / layout.route_degree * work.element_bytes
    elif layout.offload:  # copies of two layers' own experts, and the gradient of one
        total += max(routed) / layout.route_degree * (2 * work.element_bytes + 4)
    return total


def _activations(
    sizes: ModelSizes, layout: RankLayout, work: Workload, T: float
) -> tuple[float, float, float]:
    """Bytes (kept by all layers for one pass, of the layer that is recomputed, of dispatched rows and one-hot masks)."""
    D, b = sizes.dim, work.element_bytes
    blocks = sizes.blocks
    each = [_kept_per_token(block, D, layout, work) * T for block in blocks]
    rows = [block.rows_per_token * work.imbalance * work.capacity_factor * T for block in blocks]
    moves = layout.route_degree > 1
    on_their_way = max(r * D * b / layout.overlap_degree for r in rows) if moves else 0.0
    masks = [ONE_HOT_MASK_BYTES * T * r if work.one_hot else 0.0 for r in rows]
    if layout.checkpointing == "full":
        return sizes.num_layers * D * b * T, max(each), max(masks) + on_their_way
    kept = sum(block.count * one for block, one in zip(blocks, each, strict=True))
    masked = sum(block.count * one for block, one in zip(blocks, masks, strict=True))
    return kept, 0.0, masked + on_their_way


def _kept_per_token(block: LayerSizes, D: int, layout: RankLayout, work: Workload) -> float:
    """Bytes per token that a layer keeps: both norms' inputs and outputs, attention, pre-activations and product of the MLP."""
    b, branches = work.element_bytes, block.num_matrices - 1
    elements = (4 * D if block.attention_elements else D) + block.kept_width
    elements += (branches + 1) * block.dense_hidden
    rows = block.rows_per_token * work.imbalance * work.capacity_factor
    # Ours keeps a token once and the pre-activations of its rows; others keep its rows and their product, too.
    is_ours = work.states in OURS
    wide = (branches + (not is_ours)) * block.hidden_dim
    if layout.checkpointing in ("experts", "moe"):
        wide = 0
    arrived = D if layout.route_degree > 1 or not is_ours else 0
    if layout.checkpointing == "moe":
        arrived = 0
    return b * (elements + rows * (arrived + wide)) + 12 * block.num_experts
