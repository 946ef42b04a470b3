"""The training loop: thin for now."""

import time
from dataclasses import dataclass

import torch

from expertmesh.config.run import RunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.train.evaluate import evaluate
from expertmesh.train.loader import Windows
from expertmesh.train.optim import build_optimizer, learning_rate, set_learning_rate
from expertmesh.train.precision import resolve_precision
from expertmesh.train.shards import prepare_data
from expertmesh.train.step import training_step
from expertmesh.train.tokenizer import load_tokenizer, token_num_bytes


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with.

    Attributes:
        step: optimiser steps done.
        eval_bits_per_byte: last evaluation.
    """

    step: int
    eval_bits_per_byte: float


def train(config: RunConfig, *, recipe: str) -> TrainResult:
    """Train."""
    precision = resolve_precision(config.train)
    data = prepare_data(config.data, vocab_size=config.model.vocab_size)
    sizes = torch.from_numpy(
        token_num_bytes(load_tokenizer(data.tokenizer_path), config.model.vocab_size)
    )
    training = Windows(data.training.tokens_N, config.data.seq_len, config.train.seed)
    validation = Windows(data.validation.tokens_N, config.data.seq_len, config.train.seed)
    model = GPT(
        config.model, device=precision.device, dtype=precision.master_dtype, seed=config.train.seed
    )
    model.set_activation_checkpointing(config.train.activation_checkpointing)
    optimizer = build_optimizer(model, config.optim)
    scaler = precision.scaler()
    bpb = 0.0
    from rich.console import Console

    console = Console()
    for step in range(config.train.steps):
        began = time.perf_counter()
        set_learning_rate(
            optimizer, learning_rate(step, total_steps=config.train.steps, config=config.optim)
        )
        batch = training.batch(step * config.train.batch_size, config.train.batch_size)
        r = training_step(
            model, optimizer, scaler, batch, step=step, config=config, precision=precision
        )
        rate = batch[0].numel() / (time.perf_counter() - began)
        console.print(f"{step + 1} {r.loss:.4f} {r.grad_norm:.3f} {rate:.0f} tok/s {r.load}")
        if (step + 1) % config.train.eval_every == 0 or step + 1 == config.train.steps:
            result = evaluate(
                model,
                validation,
                sizes,
                batch_size=config.train.batch_size,
                max_samples=config.train.eval_batches * config.train.batch_size,
                precision=precision,
            )
            bpb = result.bits_per_byte
            console.print(f"eval {result}")
    return TrainResult(config.train.steps, bpb)
