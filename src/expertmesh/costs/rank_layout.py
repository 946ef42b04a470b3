"""Layout of a training step over ranks, and the workload: the inputs of the models of time and memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from expertmesh.config.cluster import Precision
from expertmesh.config.run import OptimConfig, Optimizer, RunConfig, StateDtype

Checkpointing = Literal["none", "experts", "moe", "full"]
Recomputed = Literal["layernorm", "moe_act", "mla_up_proj", "mlp", "core_attn"]
"""Parts of a layer that Megatron can recompute alone, by its names."""
Logits = Literal["whole", "in_place", "in_chunks"]
"""Logits with an FP32 copy and its gradient; with a gradient in their place; or a part of the tokens at a time."""
Stage = Literal["most", "first", "last"]
"""Pipeline stage whose memory is meant: Megatron logs its last rank's, which lies in the last stage."""
Stack = Literal["2021", "eager", "graphs", "fused", "whole_graph"]
States = Literal[
    "ours",
    "bf16_moments",
    "int8_moments",
    "fp16_scaled_moments",
    "torchao_int8_moments",
    "torchao_int4_moments",
    "fsdp2",
    "pure_bf16",
    "megatron",
    "megatron_bf16_gradients",
    "megatron_bf16_moments",
    "deepspeed",
    "fairseq",
]
OURS: Mapping[States, StateDtype] = {
    "ours": "float32",
    "bf16_moments": "bfloat16",
    "int8_moments": "int8",
    "fp16_scaled_moments": "fp16-scaled",
    "torchao_int8_moments": "torchao-int8",
    "torchao_int4_moments": "torchao-int4",
}
"""States of this project by `optim.state_dtype`: dense weights are gathered in FP32, rows kept as here."""
IMBALANCE = 1.15
"""Rows of the fullest rank over the mean in natural routing: 1.1 to 1.25 (docs/planner.md)."""
ONE_HOT_MASK_BYTES = 25
"""Bytes that one-hot dispatch moves and keeps per token and row: Tutel's T5, three sizes."""
Exchange = Literal["flat", "hierarchical"]


@dataclass(frozen=True)
class RankLayout:
    """Degrees of parallelism and batch of a run.

    Attributes:
        checkpointing: part that is recomputed in the backward: none, the hidden rows of experts, whole MoE layers with
            their all-to-all (moe), or whole layers (full).
    """

    num_ranks: int  # number of ranks, N
    tp_degree: int = 1  # ranks that share sequences, their tokens and the dense matrices
    pp_degree: int = 1  # pipeline stages; to reproduce published runs, this project has none
    virtual_stages: int = 1  # virtual stages of each pipeline stage
    cp_degree: int = 1  # ranks that share a sequence's attention; to reproduce published runs
    # ranks that tokens travel over; the rest of the experts' weights is gathered, or kept as a copy
    route_degree: int = 1
    es_degree: int | None = None  # slices of each expert on these ranks; None: as few as the ranks allow
    dp_replicate_degree: int = 1  # copies of the model that are not sharded over one another
    zero_stage: int = 3  # 1 to 3
    offload: bool = False  # whether states lie in the host's memory
    checkpointing: Checkpointing = "none"
    recomputed: tuple[Recomputed, ...] = ()  # parts of layers that other software recomputes beside
    layer_routes: tuple[int, ...] = ()  # route_degree of each MoE layer, where they differ; empty: all have the same
    replicated_experts: int = 0  # hot experts of a layer whose weights come to the tokens
    micro_batch: int = 1  # sequences of a data-parallel rank in one pass
    accumulation: int = 1  # passes in one step
    overlap_degree: int = 1  # number of parts that tokens travel in
    all_to_all: Exchange = "flat"  # flat or hierarchical

    @staticmethod
    def slices(num_experts: int, num_ranks: int) -> int:
        """Number of slices into which a layer's experts must be cut to lie on so many ranks."""
        return num_ranks // math.gcd(num_experts, num_ranks)

    def slices_of(self, num_experts: int) -> int:
        """Number of slices of an expert among the ranks that tokens travel over."""
        if self.es_degree is not None:
            return math.gcd(self.es_degree, self.route_degree)
        return self.slices(num_experts, self.route_degree)

    def route_of(self, moe_layer: int) -> int:
        """The route_degree of one MoE layer, counted from 0 among them."""
        return self.layer_routes[moe_layer] if self.layer_routes else self.route_degree

    @property
    def stage_ranks(self) -> int:
        """Number of ranks that hold the layers of one pipeline stage."""
        return self.num_ranks // self.pp_degree

    @property
    def dp_degree(self) -> int:
        """Data-parallel degree: number of groups of ranks with different sequences."""
        return self.stage_ranks // (self.tp_degree * self.cp_degree)

    @property
    def shard_degree(self) -> int:
        """Number of ranks over which the dense parameters of one tensor-parallel part are sharded."""
        return self.stage_ranks // (self.dp_replicate_degree * self.tp_degree)

    @property
    def num_replicas(self) -> int:
        """Number of ranks over which the experts' weights that a rank computes with are sharded: r_e."""
        return self.stage_ranks // (self.dp_replicate_degree * self.route_degree)

    @property
    def passes(self) -> int:
        """Operations of a layer's step over its forward: 1 for the forward, 2 for the backward, 1 more where it is
        recomputed."""
        return 4 if self.checkpointing == "full" else 3

    def tokens_per_step(self, seq_len: int) -> int:
        """Tokens of a step, on all ranks."""
        return self.dp_degree * self.micro_batch * self.accumulation * seq_len

    def tokens_per_pass(self, seq_len: int) -> float:
        """Tokens of a rank in one pass, T."""
        return self.micro_batch * seq_len / (self.tp_degree * self.cp_degree)

    def fullest(self, rows: float, work: "Workload") -> float:
        """Rows per token of the rank with most, of their mean: where tokens stay, each rank has its own rows."""
        return rows * work.capacity_factor * (work.imbalance if self.route_degree > 1 else 1)


def layout_of(
    config: RunConfig,
    num_ranks: int,  # number of ranks of the world
    *,
    experts: Sequence[int] = (),  # number of experts of each MoE layer
    recomputes_h: bool = False,  # whether the experts' hidden rows are recomputed
) -> RankLayout:
    """Layout of a run on ranks that its degrees fit; where its batch does not, of the rank with most sequences."""
    parallel, train = config.parallel, config.train
    copies, tp = parallel.dp_replicate_degree, parallel.tp_degree
    shard = parallel.dp_shard_degree or max(num_ranks // (copies * tp), 1)
    W, routes = shard * tp, []
    for index, num_experts in enumerate(experts):
        ep_degree = parallel.ep_degree_of(index, num_moe_layers=len(experts))
        slices = parallel.es_degree or RankLayout.slices(num_experts, W)
        routes.append(parallel.route_degree or W if ep_degree is None else ep_degree * slices)
    recomputed: Checkpointing = "experts" if recomputes_h and experts else "none"
    return RankLayout(
        num_ranks,
        tp_degree=tp,
        route_degree=max(routes, default=1),
        es_degree=parallel.es_degree,
        dp_replicate_degree=copies,
        zero_stage=parallel.zero_stage,
        offload=parallel.offload,
        checkpointing="full" if train.activation_checkpointing else recomputed,
        layer_routes=tuple(routes) if len(set(routes)) > 1 else (),
        replicated_experts=parallel.replicated_experts,
        micro_batch=-(-train.samples_per_pass // max(num_ranks // tp, 1)),
        accumulation=train.batch_size // train.samples_per_pass,
        overlap_degree=parallel.overlap_degree,
        all_to_all="hierarchical" if parallel.all_to_all == "hierarchical" else "flat",
    )


@dataclass(frozen=True)
class Workload:
    """Sequences, precision and software of a training step.

    Attributes:
        stack: software of 2021; today's PyTorch with a launch per operation (eager); with CUDA graphs of parts of a
            layer (graphs); with these, fused operators and a fused dispatch (fused); with one graph of all passes
            (whole_graph).
    """

    seq_len: int  # tokens of a sequence, S
    precision: Precision = "bfloat16"  # precision of the products
    stack: Stack = "eager"
    # states kept of each parameter: this project's by their moments (`OURS`), or another software's
    states: States = "ours"
    optimizer: Optimizer = "adamw"  # optimizer of this project's states
    imbalance: float = 1.0  # rows of the fullest rank over the mean; 1: forced balance
    merges: bool = True  # whether a token with several experts on a rank is sent there once
    one_hot: bool = False  # whether tokens are dispatched by products with one-hot matrices, as in stacks of 2021
    capacity_factor: float = 1.0  # rows per expert over the mean, padded; 1: dropless, or nothing to pad
    logits: Logits = "whole"  # form of the logits of other software
    eight_bit_dispatch: bool = False  # whether tokens are dispatched in 8 bits
    on_gpu: bool = True  # whether the devices are GPUs, which also hold a context, buffers of collectives and fragments

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return {"float32": 4, "float64": 8}.get(self.precision, 2)

    @property
    def saved_bytes(self) -> int:
        """Bytes of an element of a product's input that other software saves: products in FP8 save their rounded
        input."""
        return 1 if self.precision == "float8" else self.element_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of an element of this project's weights, gradients and residual stream."""
        return max(self.element_bytes, 4)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of an element of a gathered dense weight."""
        return self.master_bytes if self.states in OURS else self.element_bytes


def workload_of(optim: OptimConfig, seq_len: int, precision: Precision, *, on_gpu: bool) -> Workload:
    """Workload of a run with natural routing."""
    states = next(name for name, dtype in OURS.items() if dtype == optim.state_dtype)
    return Workload(
        seq_len,
        precision=precision,
        states=states,
        optimizer=optim.name,
        imbalance=IMBALANCE,
        on_gpu=on_gpu,
    )
