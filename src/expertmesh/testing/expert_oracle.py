"""The experts' arithmetic once more, token by token: the oracle of `ops.moe_mlp` and a plain rival to measure it by."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swiglu": F.silu,
    "gelu": F.gelu,
    "geglu": F.gelu,
    "relu": F.relu,
    "reglu": F.relu,
    "relu2": lambda h: F.relu(h) ** 2,
}


def experts_per_token(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    *,
    expert_ids_TK: Tensor,
    activation: str,
) -> Tensor:
    """Give y (T, D) as a loop over tokens and choices, in the tensors' own precision, differentiable.

    The routing weight multiplies the expert's output here, where the operator applies it to the activation; ids equal
    to E mean no expert.
    """
    act = _POINTWISE[activation]
    num_experts = w_in_EGFD.shape[0]
    tokens = []
    for t in range(x_TD.shape[0]):
        y = x_TD[t] * 0.0  # stays part of the graph when all choices are empty
        for j in range(weights_TK.shape[1]):
            e = int(expert_ids_TK[t, j])
            if e == num_experts:
                continue
            h = [branch @ x_TD[t] for branch in w_in_EGFD[e]]
            if b_in_EGF is not None:
                h = [part + bias for part, bias in zip(h, b_in_EGF[e], strict=True)]
            a = act(h[0]) * h[1] if len(h) == 2 else act(h[0])
            out = w_out_EDF[e] @ a
            if b_out_ED is not None:
                out = out + b_out_ED[e]
            y = y + out * weights_TK[t, j].to(x_TD.dtype)
        tokens.append(y)
    return torch.stack(tokens) if tokens else x_TD * 1.0
