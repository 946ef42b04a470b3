"""What the record of experts costs: a recorded step's share of it, with the trainer's own step as the measure.

    python -m benchmarks.claims.expert_record --threads 1 --clock cpu

The two steps themselves, with and without, differ by less than they scatter, so what is added is timed by itself: the sums of a
forward pass (`LoadCounter.add` with and without), the copy to the host, and the line that is written.
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import torch
import tyro
from benchmarks.harness import Clock, Contender, checked, circumstances, interleaved, write_report
from benchmarks.trainer import ours

from expertmesh.models.task import Part
from expertmesh.models.gpt.task import GPTTask
from expertmesh.parallel.ranks import Ranks
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.training.expert_use import use_of_experts
from expertmesh.training.metrics import MetricsFile
from expertmesh.training.routing_losses import LoadCounter, Watched


def main(
    recipe: str = "gpt-moe-demo",
    rounds: int = 15,
    threads: int = 1,
    clock: Clock = "cpu",
    dtype: str = "float32",
    out: Path = Path("benchmarks/results/expert_record_cpu_202611"),
) -> None:
    """Time a step of a recipe and what its record adds.

    Args:
        recipe: of a GPT.
        rounds: timed rounds.
        threads: of torch.
        clock: see the harness.
        dtype: of the products.
        out: report, without suffix.
    """
    torch.set_num_threads(threads)
    config = RECIPES[recipe]()
    shape = (config.train.batch_size, config.data.seq_len)
    batch = (torch.randint(config.model.vocab_size, shape), torch.randint(100, shape))
    trainee = ours(config, dtype)
    task = GPTTask(config)
    with torch.no_grad():
        model = task.builder.build(device="cpu", dtype=torch.float32)
        stats = task.loss(model, batch, Part(0, slice(0, shape[0]), Ranks())).stats

    def record(file: MetricsFile | None) -> LoadCounter:
        counter = LoadCounter()
        counter.add(stats, None if file is None else Watched(shape[0]))
        counts = [c.tolist() for c in counter.counts]
        if file is not None:
            sums = torch.cat(counter.watched).tolist()
            dropped = counter.num_dropped.tolist()
            file.append({"step": 1, **use_of_experts(counts, dropped, sums).named()})
        return counter

    with tempfile.TemporaryDirectory() as folder:
        file = MetricsFile(Path(folder) / "experts.jsonl", last_step=0)

        def check() -> None:
            record(file)
            line = json.loads(file.path.read_text().splitlines()[-1])
            rows = shape[0] * shape[1] * config.model.moe.top_k
            assert [sum(layer) for layer in line["counts"]] == [rows] * len(stats), "rows are lost"

        checked("record", check)
        timings = interleaved(
            [
                Contender("step", partial(trainee.step, batch)),
                Contender("counts alone", partial(record, None)),
                Contender("record", partial(record, file)),
            ],
            rounds=rounds,
            clock=clock,
        )
        file.close()
    step, counts, recorded = (timing.median_s for timing in timings)
    added = recorded - counts
    rows = [
        {
            "recipe": recipe,
            "dtype": dtype,
            "tokens per step": shape[0] * shape[1],
            "step, ms": round(1e3 * step, 1),
            "record adds, ms": round(1e3 * added, 3),
            "of a recorded step": f"{added / step:.2%}",
        }
    ]
    write_report(
        out,
        title="What the record of experts costs",
        command=f"python -m benchmarks.claims.expert_record --recipe {recipe} --threads {threads} --clock {clock}",
        notes=["About 200 steps of a run are recorded; the others pay nothing."],
        around=circumstances(clock=clock),
        rows=rows,
    )


if __name__ == "__main__":
    tyro.cli(main)
