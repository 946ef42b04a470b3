"""Adapters of layers that need a GPU, with our weights, (T, D) -> (T, D). Versions and sources are in `peers.toml`.

Each calls what its users call. Where a package routes in its own way, `routing` says how, so that results can be
checked.
"""

import importlib
import sys

import torch
import torch.nn.functional as F
from benchmarks.peer_parts import Case, OwnWeights, absent, activate
from torch import Tensor, nn


class LigerMoE(OwnWeights):
    """Liger-Kernel's fused experts (its portable Triton kernels) behind the router that all share."""

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        return LigerFusedMoEFunction.apply(x_TD, self.w_in, self.w_out, ids_TK.to(torch.int32), weights_TK)


class LigerCuteMoE(OwnWeights):
    """Liger's CuTe kernels, in a group of one, behind the router that all share; gate and up are copies, one each."""

    def build(self) -> None:
        import torch.distributed as dist
        from liger_cute_kernels import MoEConfig, configure
        from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe

        case = self.case
        one_process(case.device)
        sizes = MoEConfig(
            max_tokens=case.num_tokens,
            hidden_size=case.dim,
            num_experts=case.num_experts,
            top_k=case.top_k,
            num_hosts=1,
            gpus_per_host=1,
        )
        configure(bootstrap_group=dist.group.WORLD, device=torch.device(case.device), moe=sizes)
        self.layer = LigerExpertParallelFusedMoe()

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        super().take(router_ED, w_in_EHD, w_out_EDF)
        gate, up = w_in_EHD.chunk(2, 1)
        self.gate, self.up = nn.Parameter(gate.contiguous()), nn.Parameter(up.contiguous())

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        E = self.case.num_experts
        return self.layer(x_TD, ids_TK, weights_TK, self.gate, self.up, self.w_out, E)

    def weight_grads(self) -> tuple[Tensor, Tensor]:
        return torch.cat([self.gate.grad, self.up.grad], 1), self.w_out.grad


class TransformerEngineMoE(OwnWeights):
    """Two of Transformer Engine's `GroupedLinear` over sorted rows.

    They take the rows per expert as a list, so the host waits for the router in every step: that is their interface.
    """

    def build(self) -> None:
        from transformer_engine.pytorch import GroupedLinear

        case = self.case

        def linear(width: int, out: int) -> nn.Module:
            return GroupedLinear(
                case.num_experts,
                width,
                out,
                bias=False,
                params_dtype=case.dtype,
                device=case.device,
            )

        self.first = linear(case.dim, case.num_branches * case.hidden_dim)
        self.second = linear(case.hidden_dim, case.dim)

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        super().take(router_ED, w_in_EHD, w_out_EDF)
        for linear, w in ((self.first, w_in_EHD), (self.second, w_out_EDF)):
            for e, weight in enumerate(w):
                setattr(linear, f"weight{e}", nn.Parameter(weight))

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        E, K = self.case.num_experts, self.case.top_k
        slot_R = ids_TK.flatten().argsort(stable=True)
        rows = ids_TK.flatten().bincount(minlength=E).tolist()
        h_RH = self.first(x_TD[slot_R // K], rows)
        y_RD = self.second(activate(h_RH, self.case), rows)
        weighted_RD = y_RD * weights_TK.flatten()[slot_R, None].to(y_RD.dtype)
        slots_ND = torch.empty_like(weighted_RD).index_copy(0, slot_R, weighted_RD)
        return slots_ND.view(*ids_TK.shape, -1).sum(1)

    def weight_grads(self) -> tuple[Tensor, Tensor]:
        def stacked(linear: nn.Module) -> Tensor:
            every = range(self.case.num_experts)
            return torch.stack([getattr(linear, f"weight{e}").grad for e in every])

        return stacked(self.first), stacked(self.second)


class SonicMoE(OwnWeights):
    """SonicMoE's layer with its own router, which is BF16: logits of the layer's type, softmax over the K best."""

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        super().take(router_ED.to(self.case.dtype), w_in_EHD, w_out_EDF)

    def routing(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TK, ids_TK = F.linear(x_TD, self.router).topk(self.case.top_k)
        return logits_TK.float().softmax(-1), ids_TK

    def forward(self, x_TD: Tensor) -> Tensor:
        from sonicmoe import moe_TC_softmax_topk_layer
        from sonicmoe.enums import ActivationType

        y_TD, _, _ = moe_TC_softmax_topk_layer(
            x_TD,
            self.router,
            *self._weights(),
            self.case.top_k,
            _stream(x_TD),
            ActivationType.SWIGLU,
            not torch.is_grad_enabled(),
            concat_layout=True,
        )
        return y_TD

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        from sonicmoe import moe_general_routing_inputs
        from sonicmoe.enums import ActivationType

        T, K = ids_TK.shape
        token_N = torch.arange(T, device=x_TD.device, dtype=torch.int32).repeat_interleave(K)
        y_TD, _ = moe_general_routing_inputs(
            x_TD,
            weights_TK.flatten(),
            token_N,
            ids_TK.flatten().to(torch.int32),
            *self._weights(),
            self.case.num_experts,
            _stream(x_TD),
            ActivationType.SWIGLU,
            not torch.is_grad_enabled(),
            concat_layout=True,
        )
        return y_TD

    def _weights(self) -> tuple[Tensor, None, Tensor, None]:
        """(2 F, D, E) and (D, F, E), E slowest in memory as its own layer has them, and no biases."""
        return self.w_in.permute(1, 2, 0), None, self.w_out.permute(1, 2, 0), None


class ScatterMoE(OwnWeights):
    """ScatterMoE's two parallel linear layers (Triton) behind the router that all share."""

    def experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

        order = flatten_sort_count(ids_TK, num_experts=self.case.num_experts)
        h_NH = parallel_linear(x_TD, self.w_in.transpose(1, 2), self.case.top_k, *order, grouped_out=True)
        return parallel_linear(
            activate(h_NH, self.case),
            self.w_out.transpose(1, 2),
            1,
            *order,
            gates=weights_TK.to(x_TD.dtype),
            grouped_in=True,
        )


class TutelMoE(OwnWeights):
    """Tutel's `moe_layer` with its built-in experts (plain GELU), dropless, in a process group of one.

    Its router is of the layer's type: with `fp32_gate` it would dispatch in FP32 to BF16 experts, which fails.
    """

    experts = None

    def build(self) -> None:
        from tutel import moe

        case = self.case
        one_process(case.device)
        with torch.device(case.device):  # it reads a buffer of its own on the host
            self.layer = moe.moe_layer(
                gate_type={"type": "top", "k": case.top_k, "capacity_factor": 0.0},  # 0: dropless
                experts={
                    "type": "ffn",
                    "count_per_node": case.num_experts,
                    "hidden_size_per_expert": case.hidden_dim,
                    "activation_fn": F.gelu,
                },
                model_dim=case.dim,
            ).to(case.dtype)

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        """As for all, but the second weight is a transposed copy, and biases, which it always has, are zero."""
        super().take(router_ED.to(self.case.dtype), w_in_EHD, w_out_EDF.transpose(1, 2).contiguous())
        gate, experts = self.layer.gates[0], self.layer.experts
        gate.wg.weight = self.router
        experts.batched_fc1_w, experts.batched_fc2_w = self.w_in, self.w_out
        E, H, D = w_in_EHD.shape
        experts.batched_fc1_bias = nn.Parameter(w_in_EHD.new_zeros(E, H))
        experts.batched_fc2_bias = nn.Parameter(w_in_EHD.new_zeros(E, D))

    def routing(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = F.linear(x_TD, self.router).softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(self.case.top_k)
        return (weights_TK / weights_TK.sum(-1, keepdim=True)).float(), ids_TK

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.layer(x_TD)

    def weight_grads(self) -> tuple[Tensor, Tensor]:
        return self.w_in.grad, self.layer.experts.batched_fc2_w.grad.transpose(1, 2)


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def one_process(device: str) -> None:
    """A process group of one, where there is none; Tutel's own way to one makes every exit of the process a success."""
    import torch.distributed as dist  # another library's layer needs the group, not ours

    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def why_missing(package: str, case: Case) -> str | None:
    """Why a GPU package cannot run this case here, or None: not installed, no GPU, wrong type, or what its import
    says."""
    why = absent(package)
    if why is not None:
        return why
    if not case.device.startswith("cuda") and not hasattr(sys.modules.get(package), STAND_IN):
        return "runs on GPUs only"
    if case.dtype == torch.float32 and package in _HALF_ONLY:
        return "takes no FP32"
    try:
        importlib.import_module(package)
    except Exception as error:  # whatever a foreign package raises: the others still race
        return f"does not import: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


STAND_IN = "stands_in_for"
"""Attribute of modules that take a package's place in a dry run."""
_HALF_ONLY = ("sonicmoe", "scattermoe", "tutel", "liger_cute_kernels", "transformer_engine")
"""Packages without FP32 experts, or whose FP32 is something else here (Tutel routes in the layer's type)."""
OWN_ROUTER = (SonicMoE, TutelMoE)
"""Adapters that route by BF16 logits: some tokens go elsewhere, so results are not to be compared token by token."""
PACKAGES = {
    "swiglu": {
        "Liger-Kernel fused MoE": ("liger_kernel", LigerMoE),
        "Liger CuTe": ("liger_cute_kernels", LigerCuteMoE),
        "SonicMoE": ("sonicmoe", SonicMoE),
        "ScatterMoE": ("scattermoe", ScatterMoE),
        "Transformer Engine": ("transformer_engine", TransformerEngineMoE),
    },
    "gelu": {
        "ScatterMoE": ("scattermoe", ScatterMoE),
        "Transformer Engine": ("transformer_engine", TransformerEngineMoE),
        "Tutel": ("tutel", TutelMoE),
    },
}
"""By activation: name in tables, package, adapter."""
