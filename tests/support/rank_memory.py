"""What the model of memory says of a rank, for tests that compare it with real ranks."""

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.costs import gpt_costs


def memory_of_rank(model, parallel, num_ranks, **optim):
    """Memory in FP32 on the device; of an offloaded run, as if it were not: its states are the same."""
    config = GPTRunConfig(
        model=model,
        data={"seq_len": model.max_seq_len},
        parallel=parallel.model_copy(update={"offload": False}),
        optim=optim,
        train={"batch_size": num_ranks},
    )
    return gpt_costs(config, num_ranks=num_ranks, dtype="float32").memory
