"""Adapters of layers that need a GPU, with our weights: Liger-Kernel, SonicMoE, ScatterMoE, Tutel: (T, D) -> (T, D).

Each calls what its users call. Where a package routes in its own way, `routing` says how, so that results can be checked.
"""

import importlib

import torch
import torch.nn.functional as F
from benchmarks.peer_parts import Case, OwnWeights, absent, activate
from torch import Tensor, nn

from expertmesh import MoELayer


class LigerMoE(OwnWeights):
    """Liger-Kernel's fused experts (Triton) behind the router that all share."""

    def forward(self, x_TD: Tensor) -> Tensor:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        weights_TK, ids_TK = self.routing(x_TD)
        return LigerFusedMoEFunction.apply(
            x_TD, self.w_in, self.w_out, ids_TK.to(torch.int32), weights_TK
        )


class SonicMoE(OwnWeights):
    """SonicMoE's layer with its own router, which is BF16: logits of the layer's type, softmax over the K best."""

    def __init__(self, layer: MoELayer, case: Case) -> None:
        super().__init__(layer, case)
        self.take(self.router.detach(), self.w_in.detach(), self.w_out.detach())

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
            self.w_in.permute(
                1, 2, 0
            ),  # (2 F, D, E), E slowest in memory: as its own layer gives it
            None,
            self.w_out.permute(1, 2, 0),
            None,
            self.case.top_k,
            torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU,
            not torch.is_grad_enabled(),
            concat_layout=True,
        )
        return y_TD


class ScatterMoE(OwnWeights):
    """ScatterMoE's two parallel linear layers (Triton) behind the router that all share."""

    def forward(self, x_TD: Tensor) -> Tensor:
        from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

        weights_TK, ids_TK = self.routing(x_TD)
        order = flatten_sort_count(ids_TK, num_experts=self.case.num_experts)
        h_NH = parallel_linear(
            x_TD, self.w_in.transpose(1, 2), self.case.top_k, *order, grouped_out=True
        )
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

    def __init__(self, layer: MoELayer, case: Case) -> None:
        super().__init__(layer, case)
        from tutel import moe

        _one_process(case.device)
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
        self.take(self.router.detach(), self.w_in.detach(), self.w_out.detach())

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        """As for all, but the second weight is a transposed copy, and biases, which it always has, are zero."""
        super().take(
            router_ED.to(self.case.dtype), w_in_EHD, w_out_EDF.transpose(1, 2).contiguous()
        )
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


def _one_process(device: str) -> None:
    """A process group of one, which Tutel asks for; its own way to one makes every exit of the process a success."""
    import torch.distributed as dist  # another library's layer needs the group, not ours

    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def why_missing(package: str, case: Case) -> str | None:
    """Why a GPU package cannot run this case here, or None: not installed, no GPU, wrong type, or what its import says."""
    why = absent(package)
    if why is not None:
        return why
    if not case.device.startswith("cuda"):
        return "runs on GPUs only"
    if case.dtype == torch.float32 and package in _HALF_ONLY:
        return "takes no FP32"
    try:
        importlib.import_module(package)
    except Exception as error:  # whatever a foreign package raises: the others still race
        return f"does not import: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


_HALF_ONLY = ("sonicmoe", "scattermoe", "tutel")
"""Packages without FP32 experts, or whose FP32 is something else here (Tutel routes in the layer's type)."""
OWN_ROUTER = (SonicMoE, TutelMoE)
"""Adapters that route by BF16 logits: some tokens go elsewhere, so results are not to be compared token by token."""
PACKAGES = {
    "swiglu": {
        "Liger-Kernel fused MoE": ("liger_kernel", LigerMoE),
        "SonicMoE": ("sonicmoe", SonicMoE),
        "ScatterMoE": ("scattermoe", ScatterMoE),
    },
    "gelu": {"ScatterMoE": ("scattermoe", ScatterMoE), "Tutel": ("tutel", TutelMoE)},
}
"""By activation: name in tables, package, adapter."""
