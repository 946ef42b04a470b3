"""Part a checkpoint file into files of the ranks, with the options of `tutel.checkpoint.scatter`."""

import torch

from expertmesh.integrations.tutel.checkpoint import called, part, put, read
from expertmesh.integrations.tutel.system import apply_rank_size_from_pattern


def scatter(input: str, output_size: int, outputs: str, namespace: str = "") -> None:
    """Part the file `input` for `output_size` ranks, into files named by a pattern with {rank} and {size}."""
    whole, state = read(input, namespace)
    for rank, own in enumerate(part(state, output_size)):
        file = apply_rank_size_from_pattern(outputs, rank, output_size)
        torch.save(put(whole, namespace, own), file)
        print(f"{file}: the experts of rank {rank}")  # noqa: T201


def main(arguments: list[str] | None = None) -> None:
    """Run the command; `arguments`: its words, None: of the process."""
    called(scatter, arguments)


if __name__ == "__main__":
    main()
