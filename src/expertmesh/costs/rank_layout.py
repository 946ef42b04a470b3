"""Layout of a training step over ranks, and the workload: the inputs of the models of time and memory."""

import math
from dataclasses import dataclass
from typing import Literal

from expertmesh.config.cluster import Precision

Checkpointing = Literal["none", "experts", "moe", "full"]
Stack = Literal["2021", "eager", "graphs", "fused"]
States = Literal[
    "ours", "bf16_moments", "int8_moments", "fsdp2", "megatron", "deepspeed", "fairseq"
]
OURS: dict[States, str] = {"ours": "float32", "bf16_moments": "bfloat16", "int8_moments": "int8"}
"""States of this project, with their `optim.state_dtype`: dense weights are gathered in FP32, rows kept as here."""
Exchange = Literal["flat", "hierarchical"]


@dataclass(frozen=True)
class RankLayout:
    """Degrees of parallelism and batch of a run.

    Attributes:
        num_ranks: number of ranks, N.
        tp_degree: ranks that share sequences, their tokens and the dense matrices.
        pp_degree: pipeline stages; to reproduce published runs, this project has none.
        virtual_stages: virtual stages of each pipeline stage.
        cp_degree: ranks that share a sequence's attention; to reproduce published runs.
        route_degree: ranks that tokens travel over; the rest of the experts' weights is gathered, or kept as a copy.
        es_degree: slices of each expert on these ranks; None: as few as the ranks allow.
        dp_replicate_degree: copies of the model that are not sharded over one another.
        zero_stage: 1 to 3.
        offload: whether states lie in the host's memory.
        checkpointing: part that is recomputed in the backward: none, the hidden rows of experts, whole MoE
            layers with their all-to-all (moe), or whole layers (full).
        micro_batch: sequences of a data-parallel rank in one pass.
        accumulation: passes in one step.
        overlap_degree: number of parts that tokens travel in.
        all_to_all: flat or hierarchical.
    """

    num_ranks: int
    tp_degree: int = 1
    pp_degree: int = 1
    virtual_stages: int = 1
    cp_degree: int = 1
    route_degree: int = 1
    es_degree: int | None = None
    dp_replicate_degree: int = 1
    zero_stage: int = 3
    offload: bool = False
    checkpointing: Checkpointing = "none"
    micro_batch: int = 1
    accumulation: int = 1
    overlap_degree: int = 1
    all_to_all: Exchange = "flat"

    @staticmethod
    def slices(num_experts: int, num_ranks: int) -> int:
        """Number of slices into which a layer's experts must be cut to lie on so many ranks."""
        return num_ranks // math.gcd(num_experts, num_ranks)

    def slices_of(self, num_experts: int) -> int:
        """Number of slices of an expert among the ranks that tokens travel over."""
        return self.es_degree or self.slices(num_experts, self.route_degree)

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
        """Operations of a layer's step over its forward: 1 for the forward, 2 for the backward, 1 more where it is recomputed."""
        return 4 if self.checkpointing == "full" else 3

    def tokens_per_step(self, seq_len: int) -> int:
        """Tokens of a step, on all ranks."""
        return self.dp_degree * self.micro_batch * self.accumulation * seq_len


@dataclass(frozen=True)
class Workload:
    """Sequences, precision and software of a training step.

    Attributes:
        seq_len: tokens of a sequence, S.
        precision: precision of the products.
        stack: software of 2021; today's PyTorch with a launch per operation (eager); with CUDA graphs of parts of a layer
            (graphs); with these, fused operators and a fused dispatch (fused).
        states: states kept of each parameter; see `peak_memory.STATES`.
        imbalance: rows of the fullest rank over the mean; 1: forced balance.
        merges: whether a token with several experts on a rank is sent there once.
        one_hot: whether tokens are dispatched by products with one-hot matrices, as in stacks of 2021.
        capacity_factor: rows per expert over the mean, padded; 1: dropless, or nothing to pad.
        chunks_logits: whether logits are computed for a part of the tokens at a time.
        eight_bit_dispatch: whether tokens are dispatched in 8 bits.
    """

    seq_len: int
    precision: Precision = "bfloat16"
    stack: Stack = "eager"
    states: States = "ours"
    imbalance: float = 1.0
    merges: bool = True
    one_hot: bool = False
    capacity_factor: float = 1.0
    chunks_logits: bool = False
    eight_bit_dispatch: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return 4 if self.precision == "float32" else 2

    @property
    def gathered_bytes(self) -> int:
        """Bytes of an element of a gathered dense weight."""
        return 4 if self.states in OURS else self.element_bytes
