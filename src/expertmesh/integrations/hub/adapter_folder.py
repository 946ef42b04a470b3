"""Export of a run's adapters as a folder of peft, compared with the merged and the served model before it is done."""

import shutil
from pathlib import Path

import torch
from torch import Tensor

from expertmesh import lora
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.grown_rows import TrainedTokens, is_token_rows, trained_tokens
from expertmesh.checkpoints.merged_adapters import is_factor, read_factor_pairs
from expertmesh.checkpoints.peft_writing import ExpertLayout, TrainedAdapter, write_peft_folder
from expertmesh.checkpoints.source import TensorSource, read_into
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.output_file import complete_folder, new_folder
from expertmesh.engine.request_adapters import Adapters
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub.exports import origin_of
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.moe.layer import grouped_layers
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import TOKENIZER, Run, checkpoint_weights, find_base
from expertmesh.spec.adapter_targets import kind_of
from expertmesh.text.tokenizer import EXTRAS

_TOKENS = 64
_AGREEING = 0.9
"""Share of the tokens whose logits must agree: a rounded weight may route a token to other experts."""


def adapters_of(checkpoint: Path) -> dict[str, TrainedAdapter]:
    """Adapters of a run's checkpoint, by the names of the adapted parameters."""
    _, options = _base_of(checkpoint)
    learned = Checkpoint(checkpoint, prefix="model.")
    if more := [name for name in learned.tensors if not (is_factor(name) or is_token_rows(name))]:
        raise ConfigError(
            f"{checkpoint}: {more[0]} has learned too, and peft's folder holds adapters only; convert it without "
            "adapter_only"
        )
    pairs = read_factor_pairs(learned).items()
    return {name: TrainedAdapter(a, b, options.scaling(a.shape[-2])) for name, (a, b) in pairs}


def tokens_of(checkpoint: Path) -> TrainedTokens:
    """Rows of tokens that learned beside a checkpoint's adapters."""
    return trained_tokens(Checkpoint(checkpoint, prefix="model."), _base_of(checkpoint)[0].grown)


def _base_of(checkpoint: Path) -> tuple[Run, AdapterConfig]:
    """Base and options of a checkpoint's adapters."""
    found = find_base(checkpoint)
    if found is None:
        raise ConfigError(
            f"{checkpoint}: has no adapters, all of its weights are in it; convert it without adapter_only"
        )
    return found


def write_adapter_folder(checkpoint: Path, target: Path, *, layout: ExpertLayout = "fused", check: bool = True) -> int:
    """Write the adapters of a checkpoint, and return their number; the folder appears only when its logits were found
    to equal the run's."""
    found, tokens = adapters_of(checkpoint), tokens_of(checkpoint)
    base, _ = _base_of(checkpoint)
    model = base.config.model
    assert isinstance(model, ModelConfig)
    origin = origin_of(checkpoint.parent.parent)
    with complete_folder(new_folder("to", target)) as partial:
        count = write_peft_folder(
            partial,
            model,
            found,
            base=str(base.path),
            layout=layout,
            hub_name=str if origin is None else origin.hub_name,
            tokens=tokens,
        )
        if tokens.ids:
            _write_tokenizer(checkpoint.parent.parent, partial)
        if check:  # an engine's requests have adapters of their own, and one vocabulary
            check_logits(checkpoint, checkpoint_weights(checkpoint), served=None if tokens.ids else partial)
    return count


def _write_tokenizer(run_dir: Path, folder: Path) -> None:
    """Copy a run's tokenizer, with its added tokens, into a folder of adapters."""
    if (extras := run_dir / EXTRAS).is_dir():
        leave = shutil.ignore_patterns("config.json", "generation_config.json")
        shutil.copytree(extras, folder, ignore=leave, dirs_exist_ok=True)
    shutil.copyfile(run_dir / TOKENIZER, folder / TOKENIZER)


def check_logits(checkpoint: Path, merged: TensorSource, *, served: Path | None = None) -> None:
    """Check that a base with its adapters, merged weights, and an engine's adapters give the same logits for 64 tokens.

    Args:
        served: folder of peft that the engine reads; None: it is not compared.
    """
    found, tokens = adapters_of(checkpoint), tokens_of(checkpoint)
    base, _ = _base_of(checkpoint)
    opened = open_model(base, device="cpu")
    model = opened.model
    assert isinstance(model.vocab_size, int)
    ids = torch.randint(model.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0))
    ids = ids[: min(_TOKENS, opened.decoder.max_seq_len)]

    def logits() -> Tensor:
        with torch.no_grad(), opened.precision.autocast():
            return model(ids[None]).logits_BSV[0].double()

    all_logits = {}
    if served is not None and "output.weight" not in found:  # a head's adapter is not served
        adapters = Adapters(model, opened.precision.compute_dtype)
        root = adapters.load("written", served).root
        with adapters.on(adapters.runs([(len(ids), root)])):
            all_logits["served"] = logits()
    sizes = {name: lora.Size(one.a.shape[-2], one.scaling) for name, one in found.items()}
    shared = any(kind_of(name) == "experts" and one.a.ndim == 2 for name, one in found.items())
    lora.attach(model, sizes, shared=shared)
    for name, adapter in lora.adapters(model).items():
        with torch.no_grad():
            adapter.a.copy_(found[name].a.view(adapter.a.shape))
            adapter.b.copy_(found[name].b.view(adapter.b.shape))
    for name, rows in tokens.rows.items():
        with torch.no_grad():
            model.get_parameter(name)[list(tokens.ids)] = rows.to(opened.precision.master_dtype)
    expected = logits()
    lora.remove(model)
    for _, _, experts in grouped_layers(model):
        if experts.format != "dense":
            experts.convert("dense")
    read_into(merged, model.state_dict())
    all_logits["merged"] = logits()
    types = [tensor.dtype for tensor in merged.tensors.values()]
    narrow = any(one.itemsize < 4 for one in (*types, opened.precision.compute_dtype))
    tolerance = 3e-2 if narrow else 1e-3
    scale = expected.abs().amax(-1)
    for name, own in all_logits.items():
        error_T = (own - expected).abs().amax(-1) / scale
        if (error_T < tolerance).double().mean() < _AGREEING:
            raise CheckpointError(
                f"{checkpoint}: {name} logits differ from those of its adapters by {float(error_T.max()):.2g} of the "
                "largest; nothing was written: report it, with the model's config.json"
            )
