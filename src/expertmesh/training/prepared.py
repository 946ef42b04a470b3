"""Data of a run, prepared on rank 0 first."""

from expertmesh.config.run import with_epochs
from expertmesh.models.task import Data, Task
from expertmesh.parallel.ranks import Ranks


def prepared(task: Task, ranks: Ranks) -> Data:
    """Data of a task, whose configuration gets the steps of its epochs."""
    found: list[Data] = []
    ranks.on_rank0(lambda: found.append(task.prepare()))  # fills the cache
    data = ranks.on_all(lambda: found[0] if found else task.prepare())
    ranks.check_equal(data.key, what="the data")
    num_samples = getattr(data, "num_training", None)
    config = ranks.on_all(lambda: with_epochs(task.config, num_samples=num_samples))
    task.config = task.builder.config = config
    return data
