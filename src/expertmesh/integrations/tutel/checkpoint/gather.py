"""Join the checkpoint files of the ranks into one, with the options of `tutel.checkpoint.gather`."""

import torch

from expertmesh.integrations.tutel.checkpoint import called, join, put, read
from expertmesh.integrations.tutel.system import apply_rank_size_from_pattern


def gather(
    inputs: str,
    input_size: int,
    output: str,
    namespace: str = "",
    default_num_global_experts: int = 0,
) -> None:
    """Join the files of `input_size` ranks, named by a pattern with {rank} and {size}, into the file `output`."""
    files = [apply_rank_size_from_pattern(inputs, rank, input_size, create_dir=False) for rank in range(input_size)]
    found = [read(file, namespace) for file in files]
    state = join([state for _, state in found], default_num_global_experts)
    torch.save(put(found[-1][0], namespace, state), output)
    print(f"{output}: the experts of {len(files)} files")  # noqa: T201


def main(arguments: list[str] | None = None) -> None:
    """Run the command; `arguments`: its words, None: of the process."""
    called(gather, arguments)


if __name__ == "__main__":
    main()
