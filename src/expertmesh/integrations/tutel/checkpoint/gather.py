"""Join the checkpoint files of the ranks into one, with the options of `tutel.checkpoint.gather`."""

import argparse

import torch

from expertmesh.integrations.tutel.checkpoint import join, put, read
from expertmesh.integrations.tutel.system import apply_rank_size_from_pattern


def main(arguments: list[str] | None = None) -> None:
    """Run the command; `arguments`: its words, None: of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_size", type=int, required=True)
    parser.add_argument("--inputs", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--namespace", default="")
    parser.add_argument("--default_num_global_experts", type=int, default=0)
    given = parser.parse_args(arguments)
    files = [
        apply_rank_size_from_pattern(given.inputs, rank, given.input_size, create_dir=False)
        for rank in range(given.input_size)
    ]
    found = [read(file, given.namespace) for file in files]
    state = join([state for _, state in found], given.default_num_global_experts)
    torch.save(put(found[-1][0], given.namespace, state), given.output)
    print(f"{given.output}: the experts of {len(files)} files")  # noqa: T201


if __name__ == "__main__":
    main()
