"""`expertmesh experts prune|join`: a trained model with fewer experts, or with the experts of two models."""

from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import model_validator

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.parse import parsed
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.config.fields import DataPlace, Folder, Operation, Positive, Spelling, Word
from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from expertmesh.training.regroup import Regrouped


class ExpertsVerb(Operation):
    """Prunes a run to the experts that its validation data use most (prune), or merges two runs of the same shape
    (join): experts are concatenated, all other weights averaged.

    examples:
      expertmesh experts prune runs/translate-multi30k --keep 4 --to runs/pruned
      expertmesh experts join runs/with-german runs/with-french --to runs/both
      expertmesh train translate-multi30k --train.init-from runs/pruned --train.run-dir runs/tuned
    """

    action: Annotated[Literal["prune", "join"], Word]
    """prune the experts of one run, or join the experts of two runs"""
    runs: Annotated[tuple[str, ...], Spelling("RUN", also=("run", "run_dir"), is_word=True, is_each=True)] = ()
    """run directories: one to prune, two to join"""
    to: Folder
    """run directory to create"""
    keep: Positive | None = None
    """number of experts to keep per layer; required by prune"""
    samples: Positive | None = None
    """number of validation samples to count expert use on, with prune (default: all)"""
    data: DataPlace = DataPlace()

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_pruning = self.action == "prune"
        if len(self.runs) != (1 if is_pruning else 2):
            raise ConfigError(
                f"experts {self.action}: got {len(self.runs)} runs; name {'one' if is_pruning else 'two'}"
            )
        if is_pruning and self.keep is None:
            raise ConfigError("experts prune: needs --keep K, for example --keep 4")
        for name in ("keep", "samples", "data.path"):
            is_idle = not is_pruning and attrgetter(name)(self) is not None
            self.require(not is_idle, name, "has no effect with join", "leave it out")
        return self


def run(argv: list[str]) -> int:
    """Create the run, print a description, and return 0."""
    options = parsed(ExpertsVerb, argv)
    with ended_by_exit(), told_of_data(), loading():
        from expertmesh.training.regroup import join, prune

        if options.action == "join":
            first, second = options.runs
            made = join(first, second, options.to)
        else:
            assert options.keep is not None
            made = prune(
                options.runs[0],
                options.to,
                keep=options.keep,
                max_samples=options.samples,
                data_path=options.data.path,
            )
    print(_described(made))
    return 0


def _described(made: "Regrouped") -> str:
    sizes = set(made.num_experts)
    each = f"{sizes.pop()}" if len(sizes) == 1 else ", ".join(map(str, made.num_experts))
    text = f"{made.path}: {len(made.num_experts)} layers of {each} experts"
    if made.kept is not None:
        text += f", which had {min(made.kept):.1%} to {max(made.kept):.1%} of their layer's choices"
    return text
