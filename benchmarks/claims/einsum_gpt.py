"""A GPT with experts on plain PyTorch: one-hot dispatch by einsum, as GShard and DeepSpeed's training layer have it, and a KV cache.

What a sparse engine is compared with. No page tables, no kernels of this project; the weights are those of an `em.GPT`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import expertmesh as em


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm with the weights of a norm of ours."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def mlp(x: Tensor, w_in_GFD: Tensor, w_out_DF: Tensor) -> Tensor:
    """SwiGLU of (..., D)."""
    gate, up = F.linear(x, w_in_GFD[0]), F.linear(x, w_in_GFD[1])
    return F.linear(F.silu(gate) * up, w_out_DF)


def turn(x_BSHd: Tensor, positions_S: Tensor, base: float) -> Tensor:
    """Rotary positions of queries or keys."""
    half = torch.arange(0, x_BSHd.shape[-1], 2, dtype=torch.float32)
    angles_S1d = torch.outer(positions_S, base ** (-half / x_BSHd.shape[-1]))[:, None]
    cos, sin = angles_S1d.cos(), angles_S1d.sin()
    first, second = x_BSHd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def einsum_experts(x_TD: Tensor, moe: Any) -> Tensor:
    """The routed experts' output for (T, D); each expert has as many places as the fullest one needs, so nothing is dropped."""
    options, num_experts = moe.options, moe.num_experts
    probs_TE = F.linear(x_TD, moe.router.proj.weight).softmax(-1)
    weight_TK, expert_TK = probs_TE.topk(moe.top_k)
    if moe.top_k > 1:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    weight_TK = weight_TK * options.weight_scale
    chosen_KTE = F.one_hot(expert_TK, num_experts).transpose(0, 1)
    place_KTE = (chosen_KTE.flatten(0, 1).cumsum(0) - 1).view_as(chosen_KTE)
    place_KT = (place_KTE * chosen_KTE).sum(-1)
    capacity = int(place_KT.max()) + 1
    slot_KTC = F.one_hot(place_KT, capacity).to(x_TD.dtype)
    mask_KTE = chosen_KTE.to(x_TD.dtype)
    combine_TEC = torch.einsum("tk,kte,ktc->tec", weight_TK, mask_KTE, slot_KTC)
    dispatch_TEC = (combine_TEC != 0).to(x_TD.dtype)
    rows_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x_TD)
    w_in_EGFD, w_out_EDF = moe.experts.w_in, moe.experts.w_out
    gate_ECF = torch.einsum("ecd,efd->ecf", rows_ECD, w_in_EGFD[:, 0])
    up_ECF = torch.einsum("ecd,efd->ecf", rows_ECD, w_in_EGFD[:, 1])
    out_ECD = torch.einsum("ecf,edf->ecd", F.silu(gate_ECF) * up_ECF, w_out_EDF)
    return torch.einsum("tec,ecd->td", combine_TEC, out_ECD)


def feed_forward(x_TD: Tensor, block: Any) -> Tensor:
    """A dense layer, or experts, with PR-MoE's residual MLP where there is one."""
    if block.moe is None:
        return mlp(x_TD, block.ffn.w_in, block.ffn.w_out)
    y_TD, moe = einsum_experts(x_TD, block.moe), block.moe
    if moe.residual_mlp is None:
        return y_TD
    mix_T2 = moe.residual_coefficient(x_TD).softmax(-1)
    residual_TD = mlp(x_TD, moe.residual_mlp.w_in, moe.residual_mlp.w_out)
    return mix_T2[:, :1] * y_TD + mix_T2[:, 1:] * residual_TD


class EinsumGPT:
    """Decoding of a batch of sequences of one length.

    Args:
        model: whose weights are used; SwiGLU experts, softmax routing, one matrix for embedding and output.
    """

    def __init__(self, model: em.GPT) -> None:
        self.model, self.config = model, model.config
        self.cache: list[Tensor] = []
        self.length = 0

    def begin(self, batch: int, max_len: int) -> None:
        """Forget all sequences, and make room for new ones."""
        c = self.config
        shape = (2, batch, max_len, c.kv_heads, c.head_size)
        self.cache = [torch.empty(shape) for _ in range(c.num_layers)]
        self.length = 0

    @torch.inference_mode()
    def logits(self, ids_BS: Tensor) -> Tensor:
        """(B, V) after the next S tokens of each sequence."""
        B, S = ids_BS.shape
        c, positions_S = self.config, torch.arange(self.length, self.length + S).float()
        self.length += S
        x_BSD = self.model.embedding(ids_BS)
        for block, cache in zip(self.model.layers, self.cache, strict=True):
            layer: Any = block
            qkv = layer.attention.qkv(rms_norm(x_BSD, layer.attention_norm))
            group = c.num_heads // c.kv_heads
            parts = qkv.view(B, S, c.kv_heads, group + 2, c.head_size).split([group, 1, 1], dim=3)
            q, k, v = (part.flatten(2, 3) for part in parts)
            if c.qk_norm:
                q = rms_norm(q, layer.attention.q_norm)
                k = rms_norm(k, layer.attention.k_norm)
            cache[0, :, self.length - S : self.length] = turn(k, positions_S, c.rope_base)
            cache[1, :, self.length - S : self.length] = v
            k, v = cache[:, :, : self.length].transpose(2, 3)
            q = turn(q, positions_S, c.rope_base).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=S > 1, enable_gqa=True)
            x_BSD = x_BSD + layer.attention.out(y.transpose(1, 2).reshape(B, S, -1))
            h_TD = rms_norm(x_BSD, layer.ffn_norm).flatten(0, 1)
            x_BSD = x_BSD + feed_forward(h_TD, layer).view_as(x_BSD)
        last_BD = rms_norm(x_BSD[:, -1], self.model.final_norm)
        return F.linear(last_BD, self.model.embedding.weight)

    def step(self, ids_BS: Tensor) -> Tensor:
        """(B, 1) tokens drawn after these."""
        return torch.multinomial(self.logits(ids_BS).softmax(-1), 1)
