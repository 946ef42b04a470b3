"""Replacement for fairseq's `MOELayer`, `Top1Gate` and `Top2Gate`: same signatures, semantics and state dicts.

Change `from fairseq.modules.moe import MOELayer, Top1Gate, Top2Gate` to `from expertmesh.integrations.fairseq import
...`; fairseq itself is not needed. Gates always compute in FP32, evaluation is deterministic (no sampling of the second
expert), and padding is excluded from losses and capacity.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.comm.world import World
from expertmesh.config.no_counterpart import line
from expertmesh.config.values import type_of
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import FirstOutput
from expertmesh.moe.foreign_names import keep_where_refused
from expertmesh.moe.layer import MoELayer
from expertmesh.ops.router_linear import router_linear
from expertmesh.parallel.experts.dispatcher import spread_experts


class _Gate(nn.Module):
    """Gate of a `MOELayer`: its linear map and the routing options."""

    top_k: int

    def __init__(self, model_dim: int, num_experts: int, eval_fraction: float, factor: float) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.capacity_factor = factor
        # fairseq's value is a share of all tokens per expert; a capacity factor is a ratio to the even share
        fraction = eval_fraction * num_experts / self.top_k
        self.eval_capacity_factor = fraction if eval_fraction > 0 else factor
        self.options: dict[str, Any] = {}


class Top1Gate(_Gate):
    """Gate with one expert per token, weighted by its probability (Switch Transformer).

    Args:
        moe_eval_capacity_token_fraction: rows per expert in evaluation, as a share of all tokens; 0: as in training.

    Example:
        >>> gate = Top1Gate(64, num_experts=8)
    """

    top_k = 1

    def __init__(
        self,
        model_dim: int,  # size of a token (D)
        num_experts: int,  # E
        use_fp32: bool = False,  # no effect; the gate always computes in FP32
        input_noise_type: str | None = None,  # None; other values are not supported
        capacity_factor: float = 1.0,  # rows per expert as a ratio of the even share, in training
        moe_eval_capacity_token_fraction: float = 0.25,
    ) -> None:
        super().__init__(model_dim, num_experts, moe_eval_capacity_token_fraction, capacity_factor)
        if input_noise_type is not None:
            way_out = "leave it out, or use MoELayer(input_jitter=...)"
            raise ConfigError(line(f"input_noise_type={input_noise_type!r}", way_out))
        self.options = {
            "normalize_weights": "none",
            "drop_policy": "first",
            "balance_loss": "switch",
        }


class Top2Gate(_Gate):
    """Gate with two experts per token, and the balance loss of the first choices (GShard).

    Args:
        second_expert_policy: "sampling" (Gumbel noise on the second choice in training) or "all" (the second best);
            "random" is not supported.
        normalize_gate_prob_before_dropping: the two weights sum to one before capacity is applied; False: the kept
            weights do, afterwards.

    Example:
        >>> gate = Top2Gate(64, num_experts=8, second_expert_policy="all")
    """

    top_k = 2

    def __init__(
        self,
        model_dim: int,  # size of a token (D)
        num_experts: int,  # E
        use_fp32: bool = False,  # no effect; the gate always computes in FP32
        second_expert_policy: str = "sampling",
        normalize_gate_prob_before_dropping: bool = False,
        moe_eval_capacity_token_fraction: float = 0.25,  # see `Top1Gate`
        batch_prioritized_routing: bool = False,  # tokens with the largest weights are served first
    ) -> None:
        super().__init__(model_dim, num_experts, moe_eval_capacity_token_fraction, 1.0)
        if second_expert_policy not in ("sampling", "all"):
            raise ConfigError(f"second_expert_policy={second_expert_policy!r}: must be 'sampling' or 'all'; choose one")
        self.options = {
            "normalize_weights": "topk" if normalize_gate_prob_before_dropping else "kept",
            "drop_policy": "priority" if batch_prioritized_routing else "first",
            "balance_loss": "gshard",
            "router_noise": "gumbel_after_first" if second_expert_policy == "sampling" else "none",
        }


class MOELayer(nn.Module):
    """MoE layer with the interface of fairseq's `MOELayer`.

    On several ranks every rank passes its own experts, as in fairseq: rank r passes experts r e to (r + 1) e - 1. State
    dicts have fairseq's names, `gate.wg.weight` and `experts.0...` for this rank's experts.

    Args:
        experts: nn.ModuleList of this rank's experts; each maps (n, D) to (n, D), or to a tuple whose first entry is
            (n, D).

    Example:
        >>> experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(8))
        >>> y, l_aux = MOELayer(Top2Gate(64, 8), experts, args=None)(torch.randn(16, 2, 64))
    """

    def __init__(
        self,
        gate: nn.Module,  # a `Top1Gate` or `Top2Gate`
        experts: nn.ModuleList | nn.Module,
        args: Any = None,  # ignored
        group: Any = None,  # process group that shares the experts; None: torch's default group if it is initialised
        all2all_group: Any = None,  # ignored; tokens are exchanged in `group`
    ) -> None:
        super().__init__()
        if not isinstance(gate, _Gate):
            raise ConfigError(f"gate is {type_of(gate)}; use Top1Gate or Top2Gate of expertmesh.integrations.fairseq")
        own = experts if isinstance(experts, nn.ModuleList) else nn.ModuleList([experts])
        world = World(group) if dist.is_initialized() else None
        size, position = (1, 0) if world is None else (world.size, world.position)
        num_experts = gate.wg.out_features
        if len(own) * size != num_experts:
            raise ConfigError(
                f"experts has {len(own)} modules on each of {size} ranks, and the gate {num_experts} experts; they "
                "must be as many"
            )
        first = position * len(own)
        self.gate, self.experts = gate, own
        layer = MoELayer(
            dim=gate.wg.in_features,
            hidden_dim=gate.wg.in_features,
            num_experts=num_experts,
            top_k=gate.top_k,
            router=_Logits(gate.wg),
            experts=lambda e: FirstOutput(own[e - first] if first <= e < first + len(own) else None),
            capacity_factor=gate.capacity_factor,
            eval_capacity_factor=gate.eval_capacity_factor,
            min_capacity=1,
            aux_loss_weight=1.0,
            **gate.options,
        )
        if world is not None:
            spread_experts(layer, world)
            # DeepSpeed's engine looks for it in modules, of which the layer is none
            self.set_deepspeed_parallelism = layer.set_deepspeed_parallelism
        for parameter in own.parameters():
            parameter.expert = True  # type: ignore[attr-defined]
        self._hidden = (layer,)  # in a tuple: its modules are registered above, under fairseq's names
        self.metadata: dict[str, Tensor] = {}
        self.register_load_state_dict_pre_hook(keep_where_refused)

    def train(self, mode: bool = True) -> "MOELayer":
        """Switch between training and evaluation."""
        super().train(mode)
        self._hidden[0].train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "MOELayer":
        self._hidden[0]._apply(fn, recurse)
        return self

    def forward(self, *input: Tensor, input_padding_mask: Tensor | None = None, **unused: Any) -> tuple[Tensor, Tensor]:
        """Route every token through its experts.

        Args:
            input: one tensor (S, B, D), or of any shape (..., D).
            input_padding_mask: (S, B) or (B, S) bool, True for padding.
            unused: ignored.

        Returns:
            The output, of the input's shape, and the balance loss, 1.0 for uniform routing.
        """
        if len(input) != 1:
            raise ConfigError(f"{len(input)} inputs: must be one; give one tensor")
        mask = input_padding_mask
        if mask is not None and mask.shape != input[0].shape[:-1]:
            if mask.dim() != 2 or mask.T.shape != input[0].shape[:-1]:
                raise ConfigError(
                    f"input_padding_mask has shape {tuple(mask.shape)}; it must be {tuple(input[0].shape[:-1])}"
                )
            mask = mask.T
        y, stats = self._hidden[0](input[0], token_mask=None if mask is None else ~mask.bool())
        counts_E = stats.num_tokens_per_expert_E
        self.metadata = {
            "tokens_per_expert": counts_E,
            "unused_expert_count": (counts_E == 0).sum(),
            "overflow": 100 * stats.num_dropped / counts_E.sum().clamp(min=1),
        }
        return y, stats.aux_loss


class _Logits(nn.Module):
    """Router made of a gate's linear map."""

    def __init__(self, wg: nn.Linear) -> None:
        super().__init__()
        self.wg = wg

    def forward(self, x_TD: Tensor) -> Tensor:
        return router_linear(x_TD, self.wg.weight)
