"""Part a checkpoint file into files of the ranks, with the options of `tutel.checkpoint.scatter`."""

import argparse

import torch

from expertmesh.integrations.tutel.checkpoint import part, put, read
from expertmesh.integrations.tutel.system import apply_rank_size_from_pattern


def main(arguments: list[str] | None = None) -> None:
    """Run the command; `arguments`: its words, None: of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_size", type=int, required=True)
    parser.add_argument("--input", required=True)
    parser.add_argument("--outputs", required=True)
    parser.add_argument("--namespace", default="")
    given = parser.parse_args(arguments)
    whole, state = read(given.input, given.namespace)
    for rank, own in enumerate(part(state, given.output_size)):
        file = apply_rank_size_from_pattern(given.outputs, rank, given.output_size)
        torch.save(put(whole, given.namespace, own), file)
        print(f"{file}: the experts of rank {rank}")  # noqa: T201


if __name__ == "__main__":
    main()
