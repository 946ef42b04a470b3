"""Bytes that other software keeps of each parameter, by the types of its gradient, master copy and moments."""

from collections.abc import Mapping
from dataclasses import dataclass

from expertmesh.costs.rank_layout import States


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of another software."""

    weight: int  # bytes of the weight between steps
    gradient: int  # bytes of its gradient, as it is kept and reduced
    master: int  # bytes of a master copy where the weight is rounded
    moments: int  # bytes of its moments together
    # whether weights and gradients are sharded over data-parallel ranks; False: optimizer states alone
    shards_weights: bool = True

    @property
    def optimizer(self) -> int:
        """Bytes of master copy and moments."""
        return self.master + self.moments


OTHERS: Mapping[States, StateBytes] = {
    "fsdp2": StateBytes(4, 4, 0, 8),
    "pure_bf16": StateBytes(2, 2, 0, 4),
    "fairseq": StateBytes(2, 2, 0, 4),
    "megatron": StateBytes(2, 4, 4, 8, shards_weights=False),
    "megatron_bf16_gradients": StateBytes(2, 2, 4, 8, shards_weights=False),
    "megatron_bf16_moments": StateBytes(2, 2, 4, 4, shards_weights=False),
    "deepspeed": StateBytes(2, 2, 4, 8, shards_weights=False),
}
"""States by software. pure_bf16: fine-tuning of NeMo AutoModel and others; fairseq: FP16 without a master copy;
megatron_bf16_gradients: `grad_reduce_in_fp32` off, as Megatron-Bridge's benchmarks have it; megatron_bf16_moments: the
precision-aware optimizer beside; megatron, deepspeed: ZeRO-1."""
