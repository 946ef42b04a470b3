"""Rendezvous of the ranks that torchrun started, safe after restarts.

The agents of torchrun keep one key-value store over all restarts, and torch 2.13 puts the addresses of the ranks under
the same keys each time (`default_pg/...`, then the number of each further group). So a restarted rank that is quicker
than its peers reads the addresses of killed ranks, and cannot connect: "connectFullMesh failed ... Connection refused".
The restart count that torchrun hands out does not help with several nodes, because each agent counts for itself. Here
the living ranks agree on a fresh name, which prefixes all keys.
"""

import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from expertmesh.errors import CollectiveError, ConfigError

_POLL_S = 0.01


def start_group(backend: str, *, timeout_s: float) -> None:
    """Make torch's default process group of the ranks that torchrun started.

    Args:
        backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl"; with nccl the GPU of the rank's LOCAL_RANK becomes its current
            device.
        timeout_s: timeout of the rendezvous and of every collective.
    """
    if "nccl" in backend:
        _take_gpu()
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, num_ranks = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        name = fresh_name(store, rank, num_ranks, timeout_s=timeout_s)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
        )
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CollectiveError(f"the ranks could not connect: {reason}") from error


def abort_groups() -> None:
    """Abort all of torch's process groups without the other ranks, for a rank that ends by an error.

    `destroy_process_group` ends an NCCL communicator by agreement of its ranks. A rank that failed alone would deadlock
    there: the other ranks wait for it in a collective, and the launcher, which would end them, waits for it to exit.
    """
    torch.distributed.distributed_c10d._abort_process_group()


def _take_gpu() -> None:
    """Make the GPU of this rank's LOCAL_RANK the current device, as `torchrun --numa-binding` assumes."""
    number, num_gpus = dist.get_node_local_rank(), torch.cuda.device_count()
    if number >= num_gpus:
        raise ConfigError(
            f"rank {number} of this host has no GPU, there are {num_gpus}; give torchrun --nproc-per-node {num_gpus} "
            "at most"
        )
    torch.cuda.set_device(number)


def fresh_name(store: dist.Store, rank: int, num_ranks: int, *, timeout_s: float) -> str:
    """Agree on a name among these ranks that no earlier ranks on the same store have used.

    Each rank other than 0 takes a new question number, which only the living rank 0 can answer. Rank 0 answers all
    questions, dead ranks' too, until every rank has acknowledged the new name.
    """
    if rank:
        number = store.add("expertmesh/questions", 1)
        name = store.get(f"expertmesh/answer/{number}").decode()
        store.set(f"{name}/thanks/{rank}", "")
        return name
    name = f"expertmesh/{uuid.uuid4().hex}"
    thanks = [f"{name}/thanks/{other}" for other in range(1, num_ranks)]
    answered, end = 0, time.monotonic() + timeout_s
    while thanks and not store.check(thanks):
        asked = store.add("expertmesh/questions", 0)
        for number in range(answered + 1, asked + 1):
            store.set(f"expertmesh/answer/{number}", name)
        if time.monotonic() > end:
            missing = [key.rpartition("/")[2] for key in thanks if not store.check([key])]
            raise dist.DistError(f"ranks {', '.join(missing)} did not come within {timeout_s:g} s")
        answered = asked
        time.sleep(_POLL_S)
    return name
