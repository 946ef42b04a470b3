"""Checkpoints of DeepSpeed's engine: a file of the shared parameters, and one for each expert of each layer."""

from pathlib import Path

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.torch_file import load_torch_file
from expertmesh.config.values import check_type
from expertmesh.errors import ConfigError
from expertmesh.integrations.deepspeed.door import MoE

_EXPERT = "deepspeed_moe.experts.deepspeed_experts."
_SHARED = "mp_rank_00_model_states.pt"


def load_expert_files(folder: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """The state dict of a whole model, from what `engine.save_checkpoint` wrote on any number of ranks.

    Args:
        folder: the folder of the checkpoints.
        tag: the checkpoint; None: the newest, which the file `latest` names.

    Returns:
        Names as in DeepSpeed, experts counted over all ranks: for `load_state_dict` on one process.

    Example:
        >>> import tempfile
        >>> moe = MoE(4, nn.Linear(4, 4), num_experts=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_expert_files(moe, folder, "step1")
        ...     moe.load_state_dict(load_expert_files(folder))
        <All keys matched successfully>
    """
    folder = Path(folder)
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            raise ConfigError(f"{folder}: has no file latest; give the tag, the name of a folder in it")
        tag = latest.read_text().strip()
    if not (folder / tag / _SHARED).is_file():
        raise ConfigError(f"{folder / tag}: has no {_SHARED}; give a folder that engine.save_checkpoint wrote")
    state: dict[str, Tensor] = dict(load_torch_file(folder / tag / _SHARED)["module"])
    for path in sorted((folder / tag).glob("*expert_*_mp_rank_00_model_states.pt")):
        state |= load_torch_file(path)
    return state


def save_expert_files(model: nn.Module, folder: str | Path, tag: str) -> None:
    """Write a model on one process as `engine.save_checkpoint` does, without optimizer: its engine loads it on any
    `ep_size`."""
    check_type("model", model, nn.Module, "a torch.nn.Module")
    if Path(tag).name != tag:
        raise ConfigError(f"tag={tag!r}: must be the name of a folder; leave out / and ..")
    target = Path(folder) / tag
    state, layers = (
        model.state_dict(),
        [(n, m) for n, m in model.named_modules() if isinstance(m, MoE)],
    )
    target.mkdir(parents=True, exist_ok=True)
    for number, (name, layer) in enumerate(layers):
        if getattr(layer._layer.dispatcher, "storage", None) is not None:
            raise ConfigError(
                f"{name}: its experts are spread over ranks; save with the engine, or a model that was not spread"
            )
        begin = f"{name}.{_EXPERT}" if name else _EXPERT
        experts: dict[int, dict[str, Tensor]] = {}
        for key in [key for key in state if key.startswith(begin)]:
            expert = int(key.removeprefix(begin).partition(".")[0])
            experts.setdefault(expert, {})[key] = state.pop(key).detach().clone()
        for expert, own in experts.items():
            torch.save(own, target / f"layer_{number}_expert_{expert}_{_SHARED}")
    shared = {name: value.detach().clone() for name, value in state.items()}
    counts = [layer.num_experts for _, layer in layers]
    record = {"module": shared, "num_experts": counts, "dp_world_size": 1, "mp_world_size": 1}
    record |= {"global_steps": 0, "global_samples": 0, "skipped_steps": 0, "ds_version": ""}
    torch.save(record, target / _SHARED)
    (Path(folder) / "latest").write_text(tag)
