"""The trainer against a plain training loop over transformers' `MixtralForCausalLM` of the same shape.

    python -m benchmarks.trainer                              # gpt-moe-demo, all threads, wall time
    python -m benchmarks.trainer --threads 1 --clock cpu      # the same where other work shares the machine

Every contender trains on the same batches, in turn: forward, loss, balance loss, backward, clipping, AdamW (fused),
learning rate. Ours is `training_step`, what `expertmesh train` calls. The peers are the loop that a user of
transformers writes, with scaled_dot_product_attention, by `experts_implementation` and by how they keep BF16:

* autocast: FP32 weights, the forward under `torch.autocast` (ours does this). transformers' grouped_mm and batched_mm
  then multiply in FP32, because the operators behind them know nothing of autocast.
* FP32 copy: a BF16 model, and FP32 weights that the optimizer updates and that are copied into the model after each
  step.
* pure: a BF16 model and a BF16 optimizer state. Cheaper, and another result: updates smaller than 1/256 of a weight are
  lost.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from benchmarks.harness import (
    Clock,
    Contender,
    Timing,
    checked,
    circumstances,
    interleaved,
    write_report,
)
from torch import Tensor, nn

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.task import GPTTask
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.heap import keep_freed_memory
from expertmesh.training.optim import build_optimizer, learning_rate, set_learning_rate
from expertmesh.training.step import training_step

Batch = tuple[Tensor, Tensor]
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
NEAR_UNIFORM = 0.1
"""A fresh model's loss may differ from the expected one by this much."""
NOTE = (
    "Peers: AdamW (fused), clipping, schedule, balance loss, scaled_dot_product_attention. "
    "Ours also normalises queries and keys where the recipe says so. Before each timed step a contender does three "
    "that are not timed."
)
UNTIMED = 3
"""Steps before each timed one."""
SLOW = ("batched_mm",)
"""Copies the weights of K experts for every token: minutes per step, timed once and only where they fit."""


class Trainee:
    """A model in training: `step(batch)` trains and returns the loss; `losses` are those of all steps.

    Attributes:
        name: as in the table.
        dtype: of the matrix products.
        keeps_fp32: whether the weights are kept in FP32, as the trainer does.
        num_parameters: of the model.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        num_parameters: int,
        step: Callable[[Batch], float],
        *,
        keeps_fp32: bool = True,
    ) -> None:
        self.name, self.dtype, self.num_parameters, self.keeps_fp32 = (
            name,
            dtype,
            num_parameters,
            keeps_fp32,
        )
        self._step = step
        self.losses: list[float] = []

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self.losses.append(self._step(batch))


def ours(config: GPTRunConfig, dtype: str) -> Trainee:
    """The trainer's own step with the trainer's own model, optimizer, precision and schedule."""
    config = config.model_copy(update={"train": config.train.model_copy(update={"dtype": dtype, "device": "cpu"})})
    precision = resolve_precision(config.train)
    task = GPTTask(config)
    model = task.builder.build(device="cpu", dtype=precision.master_dtype)
    optimizer = build_optimizer(model, config.optim, compute_dtype=precision.compute_dtype)
    scaler = precision.scaler()
    norms = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight")))
    trainee: Trainee

    def step(batch: Batch) -> float:
        number = len(trainee.losses)
        lr = learning_rate(number, total_steps=config.train.steps, config=config.optim)
        set_learning_rate(optimizer, lr)
        return training_step(task, model, optimizer, scaler, batch, step=number, precision=precision).loss

    total = sum(p.numel() for p in model.parameters()) - norms  # transformers' Mixtral has no query-key norm
    trainee = Trainee("expertmesh", dtype, total, step)
    return trainee


def make_mixtral(config: GPTRunConfig, implementation: str) -> nn.Module:
    """Give transformers' model of the recipe's shape, freshly initialised in FP32.

    Raises:
        ValueError: there is no such Mixtral.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    model = config.model
    experts = set(model.experts_per_layer())
    if len(experts) != 1 or 0 in experts or model.activation != "swiglu" or model.moe.num_shared_experts:
        raise ValueError("a Mixtral has SwiGLU experts, equally many in every layer, and no other; use another recipe")
    mixtral = MixtralConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.moe.hidden_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        max_position_embeddings=model.max_seq_len,
        num_local_experts=experts.pop(),
        num_experts_per_tok=model.moe.top_k,
        router_aux_loss_coef=model.moe.aux_loss_weight,
        output_router_logits=model.moe.balance_loss == "switch",
        tie_word_embeddings=model.tie_embeddings,
        rms_norm_eps=model.norm_eps,
        initializer_range=model.init_std,
        sliding_window=None,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation=implementation,
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(mixtral).train()


def peer(config: GPTRunConfig, implementation: str, dtype: str, mode: str) -> Trainee:
    """The plain loop over transformers' model."""
    model = make_mixtral(config, implementation)
    num_parameters = sum(p.numel() for p in model.parameters())
    if mode in ("pure", "FP32 copy"):
        model.bfloat16()
    kept = list(model.parameters())
    if mode == "FP32 copy":
        kept = [p.detach().float().requires_grad_() for p in model.parameters()]
    optim = config.optim
    optimizer = torch.optim.AdamW(
        kept,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    steps = config.train.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate(min(step, steps - 1), total_steps=steps, config=optim) / optim.lr,
    )

    def step(batch: Batch) -> float:
        ids_BS, targets_BS = batch
        optimizer.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext():
            output = model(input_ids=ids_BS)
            loss = F.cross_entropy(output.logits.flatten(0, 1).float(), targets_BS.flatten())
            total = loss if output.aux_loss is None else loss + model.router_aux_loss_coef * output.aux_loss
        total.backward()
        if mode == "FP32 copy":
            for copy, parameter in zip(kept, model.parameters(), strict=True):
                copy.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(kept, optim.grad_clip)
        optimizer.step()
        schedule.step()
        if mode == "FP32 copy":
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), kept)
        return loss.item()

    how = f"transformers {implementation}" + (f", {mode}" if dtype == "bfloat16" else "")
    return Trainee(how, dtype, num_parameters, step, keeps_fp32=mode != "pure")


def make_trainees(config: GPTRunConfig, dtype: str, implementations: tuple[str, ...]) -> list[Trainee]:
    """All that train in this precision: ours first."""
    modes = ("plain",) if dtype == "float32" else ("autocast", "FP32 copy", "pure")
    peers = [
        peer(config, implementation, dtype, mode)
        for implementation in implementations
        for mode in modes
        # in FP32 under autocast, so never the fastest
        if not (mode == "autocast" and implementation in SLOW)
    ]
    return [ours(config, dtype), *peers]


def first_loss(config: GPTRunConfig) -> float:
    """Expected loss of a fresh model: logits are about N(0, init_std^2 D), so ln V + init_std^2 D / 2."""
    return math.log(config.model.vocab_size) + config.model.init_std**2 * config.model.dim / 2


def check(trainees: list[Trainee], batches: list[Batch], expected: float) -> None:
    """Train every one for a few steps: same size, the first loss as expected, finite losses that fall.

    Raises:
        AssertionError: they do not.
    """
    for trainee in trainees:
        assert trainee.num_parameters == trainees[0].num_parameters, (
            f"{trainee.name} has {trainee.num_parameters} parameters, expertmesh {trainees[0].num_parameters}"
        )
        for batch in batches if trainee.name.split(",")[0].split()[-1] not in SLOW else batches[:1]:
            trainee.step(batch)
        first, last = trainee.losses[0], trainee.losses[-1]
        assert abs(first - expected) < NEAR_UNIFORM, (
            f"{trainee.name} starts at a loss of {first:.3f}, a fresh model has {expected:.3f}"
        )
        assert all(map(math.isfinite, trainee.losses)), f"{trainee.name} has a loss that is not finite"
        assert len(trainee.losses) == 1 or last < first, f"{trainee.name} does not learn: {first:.3f} to {last:.3f}"


def as_contender(trainee: Trainee, batches: list[Batch]) -> Contender:
    """One training step on the next batch, after some that are not timed.

    Otherwise a contender would find the CPU library's generated code, of which it keeps 1024 pieces, replaced by the
    others': so it runs as it does alone. One step is not enough, since the next one has other row counts per expert.
    """
    now = {"batch": batches[0]}
    slow = any(name in trainee.name for name in SLOW)

    def prepare(number: int) -> None:
        now["batch"] = batches[number % len(batches)]
        if not slow:
            for earlier in range(UNTIMED):
                trainee.step(batches[(number - UNTIMED + earlier) % len(batches)])

    return Contender(trainee.name, lambda: trainee.step(now["batch"]), prepare, slow)


@dataclass(frozen=True)
class Comparison:
    """Ours and the fastest peer that keeps FP32 weights as ours does."""

    ours: Timing
    fastest: Timing

    @property
    def speedup(self) -> float:
        return self.fastest.median_s / self.ours.median_s


def compare(trainees: list[Trainee], timings: list[Timing]) -> Comparison:
    """Find the fastest peer of the same precision."""
    by_name = {timing.name: timing for timing in timings}
    equals = [by_name[trainee.name] for trainee in trainees[1:] if trainee.keeps_fp32]
    return Comparison(by_name[trainees[0].name], min(equals, key=lambda timing: timing.median_s))


def rows_of(trainees: list[Trainee], timings: list[Timing], num_tokens: int) -> list[dict[str, Any]]:
    """Give table rows of one precision."""
    base = timings[0].median_s
    return [
        {
            "dtype": trainee.dtype,
            "contender": timing.name,
            "weights kept in": "FP32" if trainee.keeps_fp32 else "BF16",
            "median ms per step": timing.median_s * 1e3,
            "tokens/s": round(num_tokens / timing.median_s),
            "expertmesh is faster by": timing.median_s / base,
            "loss, first to last": f"{trainee.losses[0]:.3f} - {trainee.losses[-1]:.3f}",
            "steps timed": timing.rounds,
        }
        for trainee, timing in zip(trainees, timings, strict=True)
    ]


def describe(config: GPTRunConfig) -> str:
    """The shape of model and batch, in words."""
    model, moe = config.model, config.model.moe
    return (
        f"{model.num_layers} layers, D={model.dim}, {model.num_heads} heads ({model.kv_heads} of keys and values), "
        f"E={moe.num_experts[0]}, K={moe.top_k}, F={moe.hidden_dim}, V={model.vocab_size}; "
        f"{config.train.batch_size} sequences of {config.data.seq_len} tokens per step"
    )


def main(
    recipe: str = "gpt-moe-demo",
    threads: int = 0,
    clock: Clock = "wall",
    rounds: int = 9,
    check_steps: int = 12,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    name: str = "trainer_cpu_202611",
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write.

    Args:
        recipe: whose model, batch and data; all contenders have AdamW.
        threads: of PyTorch; 0: its default.
        clock: wall, or cpu (one thread's CPU time).
        rounds: timed steps.
        check_steps: steps of the check, which are the warm-up too: ours meets most of its row counts for the first time
            there.
        dtypes: float32, bfloat16.
        implementations: of transformers' experts.
        name: of the result files.
        out: folder of the result files.
    """
    import transformers

    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()  # as the trainer does; it serves all contenders
    config = RECIPES[recipe]().updated({"optim.name": "adamw", "optim.lr": 2e-3})  # as the peers
    data = GPTTask(config).prepare()
    size = config.train.batch_size
    batches = [data.batch(i * size, size) for i in range(check_steps + rounds + 1)]
    around = circumstances(clock=clock, peers={"transformers": transformers.__version__})
    notes = [f"`{recipe}`: {describe(config)}. Medians over interleaved steps on the same batches. {NOTE}"]
    table: list[dict[str, Any]] = []
    for dtype in dtypes:
        trainees = make_trainees(config, dtype, implementations)
        checked(
            "trainer",
            partial(check, trainees, batches[:check_steps], first_loss(config)),
        )
        found = [as_contender(trainee, batches[check_steps:]) for trainee in trainees]
        timings = interleaved(found, rounds=rounds, clock=clock)
        checked("trainer", partial(check_finite, trainees))
        table += rows_of(trainees, timings, batches[0][0].numel())
        result = compare(trainees, timings)
        notes.append(
            f"{dtype}: {result.speedup:.2f} times as many tokens per second as the fastest peer with FP32 weights "
            f"({result.fastest.name})."
        )
        write_report(
            out / name,
            title="The trainer against a plain loop over transformers' Mixtral, on the CPU",
            command=f"python -m benchmarks.trainer --recipe {recipe} --threads {torch.get_num_threads()} "
            f"--clock {clock} --rounds {rounds}",
            notes=notes,
            around=around,
            rows=table,
        )


def check_finite(trainees: list[Trainee]) -> None:
    """After the timing: no step had a loss that was not finite.

    Raises:
        AssertionError: one had.
    """
    for trainee in trainees:
        assert all(map(math.isfinite, trainee.losses)), f"{trainee.name} has a loss that is not finite"


if __name__ == "__main__":
    tyro.cli(main)
