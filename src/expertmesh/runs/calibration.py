"""Calibration of expert quantisation: statistics of the experts' inputs on a text, which weigh errors in each column.

Rounding makes an error sum_k x_k dw_k in an output, whose mean square is sum_kl E[x_k x_l] dw_k dw_l. Scales are chosen
for squared errors weighted by E[x_k^2] (the idea of activation-aware quantisation, Lin et al. 2023, arXiv 2306.00978,
without changing other weights). With memory for all E[x_k x_l], later columns compensate the errors of earlier ones.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.data.encoding import NotTextError
from expertmesh.data.files import TextFile
from expertmesh.data.formats import Reading, ending_of, rows_of
from expertmesh.data.json_records import JSON
from expertmesh.data.records import TEXT, NoRecordsError
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops.activation import inner_name, num_branches, pointwise_
from expertmesh.ops.dtypes import without_autocast
from expertmesh.runs.open import LoadedModel
from expertmesh.runs.precision import Precision

TOKENS = 1 << 15
"""Largest number of tokens of the text."""
MOST_BYTES = 4 << 30
"""Default limit of the bytes of all experts' mean products."""
_FEW = 16
"""Weight, in tokens, of the mean over all experts in each expert's mean, since an expert may have seen no token."""


def importance_of(
    opened: LoadedModel,
    text: Path,
    *,
    most_bytes: int = MOST_BYTES,
    on_read: Callable[[Precision], None] | None = None,
) -> Mapping[str, Tensor]:
    """Mean squares of the inputs of each expert column, or mean products of all pairs of columns.

    `text` is a text of the kind that the model will read, or a JSON file of texts, packed or not. Beyond `most_bytes`
    for all mean products, mean squares are returned. `on_read` is told the precision once the text is known to be long
    enough.

    Returns:
        (E, D) and (E, F), or (E, D, D) and (E, F, F), by the names of w_in and w_out in the state dict.
    """
    config: Any = opened.run.config
    length: int = min(config.data.seq_len, config.model.max_seq_len)
    ids: list[int] = []
    try:
        for one in _texts(text):
            ids += opened.text.tokenizer.encode(one, add_special_tokens=False).ids
            if len(ids) >= TOKENS:
                break
    except (OSError, NotTextError) as error:
        raise ConfigError("calibration", text, f"is no text ({error})", "name a text") from None
    except NoRecordsError as error:
        raise ConfigError(
            "calibration",
            text,
            f"is no file of texts ({error.seen})",
            "name one whose objects have text",
        ) from None
    ids = ids[:TOKENS]
    if len(ids) < length:
        raise ConfigError(
            "calibration",
            text,
            f"has {len(ids)} tokens, and a sequence {length}",
            "name a longer one",
        )
    if on_read is not None:
        on_read(opened.precision)
    layers = {f"{name}.experts": experts for name, _, experts in grouped_layers(opened.model)}
    sizes = [m.w_in.shape for m in layers.values()]
    pairs = sum(4 * E * (D * D + F * F) for E, _, F, D in sizes) <= most_bytes
    seen: dict[str, _InputSums] = {}
    hooks = []
    for name, module in layers.items():
        seen[name] = _InputSums(module, pairs=pairs)
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
    for name, sums in seen.items():
        found[f"{name}.w_in"], found[f"{name}.w_out"] = sums.means()
    return found


def _texts(path: Path) -> Iterator[str]:
    """Texts of a file: the records of a JSON file, or the whole of another one."""
    ending = ending_of(path.name)
    if ending is None:
        yield TextFile(path)()
        return
    rows = rows_of(path, Reading()) if ending in JSON else None
    if rows is None:
        raise ConfigError("calibration", path, f"ends in {ending}, which is not read here", "name a text, or JSON")
    for row in rows:
        if row.kind != TEXT:
            raise ConfigError("calibration", path, f"holds a {row.kind}", "name a file of texts")
        yield row()


class _InputSums:
    """Forward pre-hook that sums squares, or products of pairs, of inputs over the tokens of each expert of a layer."""

    def __init__(self, experts: GroupedExperts, *, pairs: bool) -> None:
        self.experts, self.pairs = experts, pairs
        E, _, F, D = experts.w_in.shape
        self.count_E = torch.zeros(E)
        self.of_x, self.of_a = (torch.zeros(E, *[size] * (2 if pairs else 1)) for size in (D, F))

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the inputs of a forward of the experts, in FP32."""
        with without_autocast(args[0].device):
            self._add(*args[:3])

    def _add(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
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
            self.of_x[e] += self._sums(x_nD)
            self.of_a[e] += self._sums(a_nF)

    def _sums(self, rows: Tensor) -> Tensor:
        return (rows.T @ rows if self.pairs else rows.square().sum(0)).cpu()

    def means(self) -> tuple[Tensor, Tensor]:
        """Means for (w_in, w_out)."""
        total = self.count_E.sum().clamp_min(1)

        def mean(sums: Tensor) -> Tensor:
            count = self.count_E.view(-1, *[1] * (sums.dim() - 1))
            return (sums + _FEW * sums.sum(0) / total) / (count + _FEW)

        return mean(self.of_x), mean(self.of_a)
