"""Images per second of a Swin Transformer with experts, against the same model with einsum dispatch, on the same images.

    python -m benchmarks.claims.vision_speed                      # swin-union67, 64 images a call, one thread's CPU time
    python -m benchmarks.claims.vision_speed --recipe swin-mnist --batch-size 128

Both train by `training_step` and classify with the same weights, routing, capacity and losses. What differs is how tokens reach
their experts and come home: ours by rows sorted by expert, the other's by products with a one-hot tensor (T, E, C) each way, as
GShard and fairseq do it. C is the rows of the fullest expert, so that nothing is padded beyond that.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from benchmarks.harness import Contender, checked, circumstances, interleaved, write_report
from benchmarks.peer_parts import through_einsums
from torch import Tensor, nn

from expertmesh.training.heap import keep_freed_memory
from expertmesh_families.swin.config import SwinRunConfig
from expertmesh_families.swin.model import Swin
from expertmesh_families.swin.task import SwinTask
from expertmesh.moe.experts import GroupedExperts
from expertmesh_families.swin.recipes import RECIPES
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.optim import build_optimizer
from expertmesh.training.step import training_step

CLOSE = 1e-4


class EinsumExperts(nn.Module):
    """Our experts' parameters behind dense einsums over (token, expert, place).

    Args:
        experts: GELU experts, whose parameters these are.
    """

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__()
        self.w_in, self.w_out = experts.w_in, experts.w_out
        self.b_in, self.b_out = experts.b_in, experts.b_out

    def forward(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, **_: object
    ) -> Tensor:
        """See `GroupedExperts.forward`."""

        def of_rows(rows_ECD: Tensor) -> Tensor:
            h_ECF = rows_ECD @ self.w_in[:, 0].transpose(1, 2)
            h_ECF = h_ECF if self.b_in is None else h_ECF + self.b_in
            y_ECD = F.gelu(h_ECF) @ self.w_out.transpose(1, 2)
            return y_ECD if self.b_out is None else y_ECD + self.b_out[:, None]

        return through_einsums(x_TD, expert_ids_TK, weights_TK, len(self.w_in), of_rows)


class Trainee:
    """A model in training.

    Args:
        config: the run.
        einsum: whether its experts are `EinsumExperts`.
    """

    def __init__(self, config: SwinRunConfig, *, einsum: bool) -> None:
        self.config = config
        self.task, self.precision = SwinTask(config), resolve_precision(config.train)
        self.model: Swin = self.task.builder.build(device="cpu", dtype=self.precision.master_dtype)
        if einsum:
            for _, layer in self.model.moe_blocks():
                assert isinstance(layer.experts, GroupedExperts)
                layer.experts = EinsumExperts(layer.experts)
        for name, parameter in self.model.named_parameters():
            if name.endswith("norm.weight"):
                # V2's blocks begin as the identity, whatever their experts do
                nn.init.ones_(parameter)
        self.optimizer = build_optimizer(
            self.model, config.optim, compute_dtype=self.precision.compute_dtype
        )
        self.num_steps = 0

    def step(self, batch: Any) -> float:
        """Train, and return the loss."""
        self.model.train()
        self.num_steps += 1
        return training_step(
            self.task,
            self.model,
            self.optimizer,
            self.precision.scaler(),
            batch,
            step=self.num_steps - 1,
            precision=self.precision,
        ).loss

    @torch.no_grad()
    def scores(self, images_BCHW: Tensor) -> Tensor:
        """Logits in evaluation mode."""
        self.model.eval()
        with self.precision.autocast():
            logits_BC: Tensor = self.model(images_BCHW).logits_BC
        return logits_BC


def batch_of(config: SwinRunConfig) -> Any:
    """Random images and classes, as a run's data give them."""
    model, count = config.model, config.train.batch_size
    generator = torch.Generator().manual_seed(0)
    side = (count, model.num_channels, model.image_size, model.image_size)
    labels_B = torch.randint(model.num_classes, (count,), generator=generator)
    return 2 * torch.rand(side, generator=generator) - 1, labels_B, labels_B, torch.ones(count)


def check(ours: Trainee, other: Trainee, batch: Any) -> None:
    """Both give the same scores, and the same losses in two steps.

    Raises:
        AssertionError: they do not.
    """
    found, expected = (trainee.scores(batch[0]) for trainee in (ours, other))
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    for _ in range(2):
        mine, theirs = ours.step(batch), other.step(batch)
        assert abs(mine - theirs) <= CLOSE * abs(theirs), f"losses of {mine} and {theirs}"


def main(
    recipe: str = "swin-union67",
    batch_size: int = 64,
    rounds: int = 5,
    out: Path = Path("benchmarks/results"),
    name: str = "vision_speed_cpu_202611",
) -> None:
    """Check, time, write.

    Args:
        recipe: a Swin Transformer with GELU experts.
        batch_size: images of each call.
        rounds: timed rounds.
        out: folder of the report.
        name: of the report.
    """
    torch.set_num_threads(1)
    changes = {"train.batch_size": batch_size, "train.dtype": "float32", "train.device": "cpu"}
    changes |= {"optim.name": "adamw"}  # what was measured; Muon would add as much to both
    config = RECIPES[recipe]().updated(changes)
    batch = batch_of(config)
    ours, other = (Trainee(config, einsum=einsum) for einsum in (False, True))
    checked(recipe, partial(check, ours, other, batch))
    rows = []
    for what in ("training", "inference"):
        contenders = [
            Contender(
                label,
                partial(trainee.step, batch)
                if what == "training"
                else partial(trainee.scores, batch[0]),
            )
            for label, trainee in (("expertmesh", ours), ("einsum dispatch", other))
        ]
        timings = interleaved(contenders, rounds=rounds, clock="cpu")
        slowest = timings[1].median_s
        rows += [
            {
                "what": what,
                "dispatch": timing.name,
                "images/s": round(batch_size / timing.median_s, 1),
                "s per call": timing.median_s,
                "times einsum's rate": slowest / timing.median_s,
            }
            for timing in timings
        ]
    write_report(
        out / name,
        title=f"Images per second: {recipe} against itself with einsum dispatch",
        command=f"python -m benchmarks.claims.vision_speed --recipe {recipe} --batch-size {batch_size}",
        notes=[
            f"{batch_size} images a call, FP32; equal scores and losses were checked first. Times are medians of {rounds} rounds, by turns."
        ],
        around=circumstances(clock="cpu"),
        rows=rows,
    )


if __name__ == "__main__":
    keep_freed_memory()
    tyro.cli(main)
