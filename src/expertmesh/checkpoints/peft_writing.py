"""Writing of low-rank adapters as a folder of peft, which peft, vLLM and our engine read."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.checkpoints.grown_rows import TrainedTokens
from expertmesh.checkpoints.peft_folder import (
    CONFIG,
    IN_HUB,
    INDICES,
    ROWS,
    WEIGHTS,
    ModuleRows,
    places_of,
)
from expertmesh.checkpoints.safetensors import FileTensor, write_file
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.model_spec import Parameter

ExpertLayout = Literal["fused", "per-expert"]
"""Adapters of experts on transformers' tensors of all experts, as peft trains them, or on each expert's matrices, for
vLLM.

vLLM knows one rank and one scale of all adapters, so per-expert ones are padded with zeros.
"""
PREFIX = "base_model.model."
SHARED = "shared_over_experts"
"""Name in the metadata of the weights; "True": the adapters of all experts are one."""
_LAYER = re.compile(r"model\.layers\.\d+\.")


class TrainedAdapter(NamedTuple):
    """Adapter of one of our parameters."""

    a: Tensor  # (E, r, K), or (r, K) for one matrix, or where all experts share it
    b: Tensor  # (E, *rows, r), or (*rows, r)
    scaling: float  # s


_NONE = TrainedTokens()


def write_peft_folder(
    folder: Path,
    config: ModelConfig,
    adapters: Mapping[str, TrainedAdapter],  # by the names of our parameters
    *,
    base: str | None,  # the model that they are for, as peft finds it; None: not known
    layout: ExpertLayout = "fused",  # see `ExpertLayout`. An adapter that all experts share is written once per expert.
    hub_name: Callable[[str], str] = str,
    tokens: TrainedTokens = _NONE,  # rows of tokens that learned beside the adapters
) -> int:
    """Write adapters into a folder that exists; returns their number, by peft's modules and parameters.

    Args:
        hub_name: returns the name of a tensor in the architecture's files from its name in the spec.
    """
    spec, places = gpt_spec(config), places_of(config)
    if layout == "per-expert":
        adapters = _alike(adapters)
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, tuple[int, float]] = {}
    modules, parameters = dict[str, None](), dict[str, None]()
    both = len({name.rpartition(".")[2] for name in adapters if spec.by_name[name].is_expert}) == 2
    for name, adapter in adapters.items():
        one, rank = spec.by_name[name], adapter.a.shape[-2]
        is_fused = one.is_expert and layout == "fused"
        if is_fused and name.endswith("w_in") and one.shape[1] != 2:
            raise ConfigError(
                f"activation={config.activation}: peft's format names gated experts only; keep the adapters in a "
                "checkpoint"
            )
        for module in _modules(one, hub_name, is_fused=is_fused):
            a, b = _theirs(adapter, places[module])
            target, path = _LAYER.sub("", module), module
            if is_fused:
                parameters[target] = None
                path = module.rpartition(".")[0]
                if both and name.endswith("w_in"):  # peft's wrapper of down_proj is the outer one
                    path += ".base_layer"
            elif layout == "fused" and name.endswith(("w_in", "w_out")):
                # peft 0.21 takes modules of these names for the experts' in most families, but not parameters
                parameters[f"{target}.weight"] = None
            else:
                target = target.rpartition(".")[2] if one.is_expert else target
                modules[target] = None
            kinds[target] = rank, adapter.scaling * rank
            tensors[f"{PREFIX}{path}.lora_A.weight"] = a
            tensors[f"{PREFIX}{path}.lora_B.weight"] = b
    count, indices = len(tensors) // 2, dict[str, list[int]]()
    for name, rows in tokens.rows.items():
        (module,) = _modules(spec.by_name[name], hub_name, is_fused=False)
        indices[module.rpartition(".")[2]] = list(tokens.ids)
        tensors[f"{PREFIX}{module}{ROWS}"] = rows
    files = [FileTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    of_experts = [one for name, one in adapters.items() if spec.by_name[name].is_expert]
    shared = bool(of_experts) and all(one.a.ndim == 2 for one in of_experts)
    texts = {"format": "pt", SHARED: str(shared)}
    write_file(folder / WEIGHTS, files, iter(tensors.values()), texts)
    values = _values(kinds, base=base, modules=modules, parameters=parameters)
    values |= {INDICES: indices} if indices else {}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    return count


def _alike(adapters: Mapping[str, TrainedAdapter]) -> dict[str, TrainedAdapter]:
    """The adapters with one rank and scale, the largest; the same additions but for rounding."""
    rank = max(one.a.shape[-2] for one in adapters.values())
    scaling = max(one.scaling for one in adapters.values())
    found = {}
    for name, one in adapters.items():
        more, factor = rank - one.a.shape[-2], one.scaling / scaling
        b = one.b if factor == 1.0 else one.b * factor
        found[name] = TrainedAdapter(F.pad(one.a, (0, 0, 0, more)), F.pad(b, (0, more)), scaling)
    return found


def _values(
    kinds: Mapping[str, tuple[int, float]],
    *,
    base: str | None,
    modules: Iterable[str],
    parameters: Iterable[str],
) -> dict[str, Any]:
    """The values of adapter_config.json; ranks and numerators that are not the most frequent become patterns."""
    ranks, alphas = (Counter(one[place] for one in kinds.values()) for place in (0, 1))
    r, alpha = (found.most_common(1)[0][0] for found in (ranks, alphas))
    targets = sorted(parameters, reverse=True)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        **({"target_parameters": targets} if targets else {}),
        "rank_pattern": {_pattern(name): own for name, (own, _) in kinds.items() if own != r},
        "alpha_pattern": {_pattern(name): own for name, (_, own) in kinds.items() if own != alpha},
        "bias": "none",
        "lora_dropout": 0.0,
    }


def _pattern(target: str) -> str:
    """Pattern of a module, also where its weight is the target."""
    return rf"{re.escape(target)}(\.weight)?"


def _modules(one: Parameter, hub_name: Callable[[str], str], *, is_fused: bool) -> list[str]:
    """Modules of transformers, or parameters of experts, that one of our parameters is."""
    if is_fused:
        path, _, ours = one.name.rpartition(".")
        return ["model." + path.replace(".moe.", ".mlp.") + f".{IN_HUB[ours]}"]
    experts = range(one.shape[0] if one.is_expert else 1)
    names = [hub_name(name).removesuffix(".weight") for name in one.hub]
    return [name.format(expert=expert) for expert in experts for name in names]


def _theirs(adapter: TrainedAdapter, places: list[ModuleRows]) -> tuple[Tensor, Tensor]:
    """Factors of a module: A (r, K) and B (N, r); of E experts A (E r, K), expert-major, and B (N, r E), rank-major."""
    a, b = adapter.a, adapter.b
    a_erK = a[None] if a.ndim == 2 else a
    b_eNr = b[None].flatten(1, -2) if a.ndim == 2 else b.flatten(1, -2)
    first, rank = places[0], a.shape[-2]
    experts = sorted({place.expert for place in places})
    at = {expert: expert if len(a_erK) > 1 else 0 for expert in experts}
    found = b.new_zeros(first.num_rows, rank, first.num_experts)
    for place in places:
        column = place.expert if first.num_experts > 1 else 0
        found[place.module_rows, :, column] = b_eNr[at[place.expert]][place.ours]
    return torch.cat([a_erK[at[expert]] for expert in experts]), found.flatten(1)
