"""The layers that `benchmarks.layer` compares with ours, all with our weights, router included: (T, D) -> (T, D)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peer_parts import Case, OwnWeights, absent, activate, through_einsums
from benchmarks.race.adapters import PACKAGES, one_process, why_missing
from torch import Tensor, nn

from expertmesh import MoELayer


class EinsumMoE(OwnWeights):
    """Dispatch and combine as dense einsums."""

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        def of_rows(rows_ECD: Tensor) -> Tensor:
            a_ECF = activate(rows_ECD @ self.w_in.transpose(1, 2), self.case)
            return a_ECF @ self.w_out.transpose(1, 2)

        return through_einsums(x_TD, ids_TK, weights_TK, self.case.num_experts, of_rows)


class OneHotMoE(OwnWeights):
    """Rows placed by a running count over a one-hot matrix (T * K, E), then one product per expert, and index_add."""

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        case = self.case
        ids_N = ids_TK.flatten()
        one_hot_NE = F.one_hot(ids_N, case.num_experts)
        place_N = (one_hot_NE.cumsum(0) * one_hot_NE).sum(1) - 1
        counts_E = one_hot_NE.sum(0)
        row_N = (counts_E.cumsum(0) - counts_E)[ids_N] + place_N
        slot_R = torch.empty_like(row_N).scatter_(0, row_N, torch.arange(len(row_N), device=x_TD.device))
        token_R = slot_R // case.top_k
        parts = x_TD[token_R].split(counts_E.tolist())
        y_RD = torch.cat(
            [
                F.linear(activate(F.linear(x, w_in), case), w_out)
                for x, w_in, w_out in zip(parts, self.w_in, self.w_out, strict=True)
            ]
        )
        weighted_RD = y_RD * weights_TK.flatten()[slot_R, None].to(y_RD.dtype)
        return torch.zeros_like(x_TD).index_add(0, token_R, weighted_RD)


class GroupedMM(OwnWeights):
    """`torch.nn.functional.grouped_mm` over rows sorted by expert, the weights applied to the rows; never waits for the
    GPU."""

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        case = self.case
        expert_R, slot_R = ids_TK.flatten().sort(stable=True)
        # not bincount, whose result the host must wait for
        every_E = torch.arange(case.num_experts, device=x_TD.device, dtype=expert_R.dtype)
        ends_E = torch.searchsorted(expert_R, every_E, right=True, out_int32=True)
        token_R = slot_R // case.top_k
        h_RH = F.grouped_mm(x_TD[token_R], self.w_in.transpose(1, 2), offs=ends_E)
        y_RD = F.grouped_mm(activate(h_RH, case), self.w_out.transpose(1, 2), offs=ends_E)
        weighted_RD = y_RD * weights_TK.flatten()[slot_R, None].to(y_RD.dtype)
        slots_ND = torch.empty_like(weighted_RD).index_copy(0, slot_R, weighted_RD)
        return slots_ND.view(*ids_TK.shape, -1).sum(1)


class _GeluExpert(nn.Module):
    """One expert as DeepSpeed takes it."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(dim, hidden_dim, bias=False)
        self.w_out = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(F.gelu(self.w_in(x)))


class DeepSpeedMoE(nn.Module):
    """DeepSpeed's `MoE` over all ranks of the process group, or in a group of one that it makes.

    Args:
        layer: ours, whole; its weights are copied.
        case: shape per rank.
        drop_tokens: its capacity mode with its default factor, 1.0; else its dropless mode.
    """

    def __init__(self, layer: MoELayer, case: Case, *, drop_tokens: bool = False) -> None:
        super().__init__()
        import deepspeed
        from deepspeed.moe.layer import MoE

        one_process(case.device)
        backend = "gloo" if case.device == "cpu" else "nccl"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        self.case, self.num_ranks = case, dist.get_world_size()
        self.num_local = case.num_experts // self.num_ranks
        self.first_expert = dist.get_rank() * self.num_local
        expert = _GeluExpert(case.dim, case.hidden_dim)
        self.moe = MoE(
            case.dim,
            expert,
            num_experts=case.num_experts,
            ep_size=self.num_ranks,
            k=case.top_k,
            drop_tokens=drop_tokens,
            top2_2nd_expert_sampling=False,
        ).to(case.device, case.dtype)
        if self.num_ranks > 1:
            self.moe.set_deepspeed_parallelism()
        self.moe.deepspeed_moe.gate.wg.float()  # the router in FP32, as ours
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(layer.router.proj.weight)
            for e, own in enumerate(self._experts(), start=self.first_expert):
                own.w_in.weight.copy_(layer.experts.w_in[e, 0])
                own.w_out.weight.copy_(layer.experts.w_out[e])

    def _experts(self) -> list[_GeluExpert]:
        return list(self.moe.deepspeed_moe.experts.deepspeed_experts)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.moe(x_TD[None])[0][0]

    @property
    def router(self) -> Tensor:
        """The router's weight; its gradient is of this rank's tokens."""
        return self.moe.deepspeed_moe.gate.wg.weight

    def weight_grads(self) -> tuple[Tensor, Tensor]:
        """Of this rank's experts, (e, F, D) and (e, D, F)."""
        experts = self._experts()
        return (
            torch.stack([own.w_in.weight.grad for own in experts]),
            torch.stack([own.w_out.weight.grad for own in experts]),
        )

    def moved(self) -> tuple[int, float]:
        """Bytes of rows that the last step handed to other ranks, and the share of rows that it dropped; all ranks
        call."""
        case, gate = self.case, self.moe.deepspeed_moe.gate
        counts_E = self.moe.deepspeed_moe.exp_counts.clone()
        capacity = math.ceil(case.top_k * case.num_tokens / case.num_experts)
        dropped = (counts_E - capacity).clamp(min=0).sum() / counts_E.sum()
        if not gate.drop_tokens:
            fullest = counts_E.max()
            dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
            capacity, dropped = int(fullest), torch.zeros(())
        to_others = (case.num_experts - self.num_local) * capacity * case.dim * case.dtype.itemsize
        return 4 * to_others, float(dropped)  # out and home, forward and backward


def make_layer(case: Case) -> MoELayer:
    """Give our layer with the weights that all contenders get."""
    layer = MoELayer(
        dim=case.dim,
        hidden_dim=case.hidden_dim,
        num_experts=case.num_experts,
        top_k=case.top_k,
        activation=case.activation,
        balance_loss="none",
        seed=0,
        device=case.device,
        dtype=case.dtype,
    )
    with torch.no_grad():  # values that BF16 and FP32 both hold, so that every precision routes alike
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
    return layer


class MixtralMoE(OwnWeights):
    """Transformers' block, with its router in FP32, as ours, so that all choose the same experts."""

    def build(self, implementation: str) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        case = self.case
        config = MixtralConfig(
            hidden_size=case.dim,
            intermediate_size=case.hidden_dim,
            num_local_experts=case.num_experts,
            num_experts_per_tok=case.top_k,
            experts_implementation=implementation,
        )
        self.block = MixtralSparseMoeBlock(config).to(case.device, case.dtype)

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        super().take(router_ED, w_in_EHD, w_out_EDF)
        self.block.gate.weight = self.router
        self.block.experts.gate_up_proj, self.block.experts.down_proj = self.w_in, self.w_out

    def routing(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        _, weights_TK, ids_TK = self.block.gate(x_TD.float())
        return weights_TK, ids_TK

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        return self.block.experts(x_TD, ids_TK, weights_TK.to(x_TD.dtype))


@dataclass(frozen=True)
class Peer:
    """A layer to compare with.

    Attributes:
        name: as in the table.
        make: from our layer and the case.
        missing: why it cannot run here, or None.
        slow: timed once in training.
    """

    name: str
    make: Callable[[MoELayer, Case], nn.Module]
    missing: str | None = None
    slow: bool = False


def peers_of(case: Case, *, einsum: bool) -> list[Peer]:
    """All that compute this case, whether they can run here or not."""
    found = []
    if case.activation == "swiglu":
        for name in ("eager", "grouped_mm", *(() if case.training else ("batched_mm",))):
            slow = name == "eager" and case.training and case.num_experts > 16
            make = partial(MixtralMoE, implementation=name)
            found.append(Peer(f"transformers {name}", make, absent("transformers"), slow))
    for name, (package, make) in PACKAGES[case.activation].items():
        found.append(Peer(name, make, why_missing(package, case)))
    if case.activation == "gelu" and case.training:
        found.append(Peer("DeepSpeed MoE", DeepSpeedMoE, absent("deepspeed"), slow=True))
    found.append(Peer("torch grouped_mm", GroupedMM))
    found.append(Peer("one-hot cumsum", OneHotMoE))
    if einsum and case.training:
        found.append(Peer("einsum", EinsumMoE, slow=True))
    return found
