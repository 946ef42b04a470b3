"""The experts' arithmetic once more, token by token: the oracle of `ops.moe_mlp` and a plain rival to measure it by."""

import torch
from torch import Tensor

from tests.oracle.loop_layer import loop_mlp


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
    given = {"w_in": w_in_EGFD, "w_out": w_out_EDF, "b_in": b_in_EGF, "b_out": b_out_ED}
    params = {name: value for name, value in given.items() if value is not None}
    tokens = []
    for t in range(x_TD.shape[0]):
        y = x_TD[t] * 0.0  # stays part of the graph when all choices are empty
        for j in range(weights_TK.shape[1]):
            e = int(expert_ids_TK[t, j])
            if e < w_in_EGFD.shape[0]:
                out = loop_mlp(x_TD[t], params, "", activation, e)
                y = y + out * weights_TK[t, j].to(x_TD.dtype)
        tokens.append(y)
    return torch.stack(tokens) if tokens else x_TD * 1.0
