"""Export of a model's weights to one safetensors file, from a checkpoint of any number of ranks.

The file is written tensor by tensor, so memory holds one tensor at a time.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from expertmesh.checkpoints.manifest import find_damage
from expertmesh.checkpoints.safetensors import FileTensor, write_file
from expertmesh.checkpoints.source import read_whole
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.input_folder import check_only_files
from expertmesh.config.output_file import complete, output_file, remove_leftovers
from expertmesh.errors import CheckpointError, ConfigError, command, named
from expertmesh.runs.run_dir import checkpoint_weights, find_run, load_run
from expertmesh.training.state import read_run_state


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    checkpoint: Path
    step: int  # optimizer steps of the checkpoint
    num_tensors: int  # number of tensors in the file
    num_bytes: int  # size of the file


def export(source: Path, output: Path, *, overwrite: bool = False) -> Exported:
    """Write the weights of a checkpoint to one safetensors file, which appears only when it is complete.

    Names are as in `GPT.state_dict`, dtypes as trained. The header has `step`, `recipe` and `config` (a `RunConfig` as
    JSON).

    Args:
        source: a run directory, whose newest good checkpoint is used, or a checkpoint.
        overwrite: whether an existing file is replaced.
    """
    _check_output(output, overwrite=overwrite)
    check_only_files(source, what=str(source))
    checkpoint = find_checkpoint(source)
    state = read_run_state(checkpoint, "step", "config")
    weights = checkpoint_weights(checkpoint)
    tensors = [FileTensor(name, kept.dtype, kept.shape) for name, kept in sorted(weights.tensors.items())]
    texts = {
        "format": "pt",
        "step": str(state["step"]),
        "recipe": str(state.get("recipe", "unknown")),
        "config": json.dumps(state["config"]),
    }
    remove_leftovers(output.resolve())
    with complete(output) as partial:
        write_file(partial, tensors, (read_whole(weights, t.name) for t in tensors), texts)
        _check_output(output, overwrite=overwrite)
    return Exported(checkpoint, int(state["step"]), len(tensors), output.stat().st_size)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.is_dir():
        raise ConfigError(
            "output",
            output,
            "is a folder",
            f"name a file, for example {output / 'model.safetensors'} (a folder for transformers: "
            f"{command('convert')})",
        )
    if str(output) == "-" or (output.exists() and not output.is_file()):
        raise ConfigError(
            "output",
            output,
            "is no regular file",
            f"name a new file, or one to replace with {named('overwrite', True)}",
        )
    if output.exists() and not overwrite:
        raise ConfigError(
            "output",
            output,
            "exists already",
            f"choose another file, or add {named('overwrite', True)}",
        )
    output_file("output", output)


def find_checkpoint(source: Path) -> Path:
    """Newest good checkpoint of a run directory, or the path itself if it is a checkpoint."""
    if not source.is_dir():
        raise ConfigError(
            f"{source}: is no folder; give a run directory, or a checkpoint inside one{how_to_fetch(source)}"
        )
    if not (source / "manifest.json").is_file() and not (source / ".metadata").is_file():
        return load_run(source).checkpoint
    problem = find_damage(source)
    if problem is not None:
        raise CheckpointError(f"checkpoint {source}: is damaged ({problem}); choose another")
    run = source.parent.parent
    if (run / "config.json").is_file():
        replace(find_run(run), weights=source).check_bound()
    return source
