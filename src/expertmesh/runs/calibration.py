"""What tokens of a text put into the experts' matrices: how much an error in each of their columns counts.

The error that rounding makes in an output is sum_k x_k dw_k, and its square on average sum_k E[x_k^2] dw_k^2 where columns do not
go together: so scales are chosen for squared errors that count by the mean square of what the column is multiplied by (the idea of
activation-aware quantisation, Lin et al. 2023, arXiv 2306.00978, without changing any other weight).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.moe.experts import GroupedExperts
from expertmesh.ops.activation import inner_name, num_branches, pointwise_
from expertmesh.runs.open import LoadedModel

TOKENS = 1 << 15
"""Of the text, at most."""
_FEW = 16
"""Tokens by which the mean of all experts counts beside those of one, which may have seen none."""


def importance_of(opened: LoadedModel, text: Path) -> Mapping[str, Tensor]:
    """The mean square of what each column of the experts is multiplied by.

    Args:
        opened: the model.
        text: a file of text, of the kind that the model will read.

    Returns:
        (E, D) and (E, F) by the names of w_in and w_out in the state dict.

    Raises:
        ConfigError: the file is no text, or has fewer tokens than one sequence.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "calibration", text, f"is no text ({error})", "name a UTF-8 file"
        ) from error
    config: Any = opened.run.config
    length: int = min(config.data.seq_len, config.model.max_seq_len)
    ids = opened.text.tokenizer.encode(content, add_special_tokens=False).ids[:TOKENS]
    if len(ids) < length:
        raise ConfigError(
            "calibration",
            text,
            f"has {len(ids)} tokens, and a sequence {length}",
            "name a longer one",
        )
    seen: dict[str, _Seen] = {}
    hooks = []
    for name, module in opened.model.named_modules():
        if isinstance(module, GroupedExperts):
            seen[name] = _Seen(module)
            hooks.append(module.register_forward_pre_hook(seen[name]))
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    try:
        with torch.no_grad(), opened.precision.autocast():
            for batch in rows.to(opened.precision.device).split(8):
                opened.model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for name, one in seen.items():
        found[f"{name}.w_in"], found[f"{name}.w_out"] = one.means()
    return found


class _Seen:
    """Sums of squares over the tokens of each expert of a layer."""

    def __init__(self, experts: GroupedExperts) -> None:
        self.experts = experts
        E, _, F, D = experts.w_in.shape
        self.count_E, self.x_ED, self.a_EF = torch.zeros(E), torch.zeros(E, D), torch.zeros(E, F)

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """What a forward of the experts is given."""
        x_TD, ids_TK, weights_TK = args[:3]
        one = self.experts.weights().slices()[0]
        for e in ids_TK.unique().tolist():
            if e >= len(self.count_E):
                continue
            tokens, slots = (ids_TK == e).nonzero(as_tuple=True)
            x_nD = x_TD[tokens].float()
            h_nH = torch.nn.functional.linear(x_nD, one.w_in(e, torch.float32))
            if one.b_in_EGF is not None:
                h_nH += one.b_in_EGF[e].flatten().float()
            gate, *up = h_nH.chunk(num_branches(one.activation), 1)
            a_nF = pointwise_(gate, inner_name(one.activation))
            for branch in up:
                a_nF = a_nF * branch
            a_nF = a_nF * weights_TK[tokens, slots, None].float()
            self.count_E[e] += len(tokens)
            self.x_ED[e] += x_nD.square().sum(0).cpu()
            self.a_EF[e] += a_nF.square().sum(0).cpu()

    def means(self) -> tuple[Tensor, Tensor]:
        """(E, D) and (E, F)."""
        count_E1, total = self.count_E[:, None], self.count_E.sum().clamp_min(1)
        return tuple(
            (sums + _FEW * sums.sum(0) / total) / (count_E1 + _FEW)
            for sums in (self.x_ED, self.a_EF)
        )  # type: ignore[return-value]
