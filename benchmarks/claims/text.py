"""What a finished GPT is worth: its loss, its costs, whether it copies, and which rows its experts dropped."""

import hashlib
import statistics
from pathlib import Path
from typing import Any

import torch
from benchmarks.claims.runs import Job, evaluated

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.config.run import RunConfig
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.reporting.read import read_run


def measure(config: RunConfig, job: Job) -> dict[str, Any]:
    """A finished run on the whole validation split, its costs, and whether it copies."""
    assert isinstance(config, GPTRunConfig)
    run, trained, evaluation = evaluated(config)
    parameters = count_parameters(config.model)
    flops = forward_flops(config.model, seq_len=config.data.seq_len).total_flops
    return {
        "loss": evaluation["loss"],
        "tokens": job.steps * config.train.batch_size * config.data.seq_len,
        "bits_per_byte": evaluation["bits_per_byte"],
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "forward_flops_per_token": flops,
        "nats_saved_by_repetition": copying(trained.model, config),
        "tokenizer_sha256": hashlib.sha256((run.path / "tokenizer.json").read_bytes()).hexdigest(),
        "dropped_by_position": dropped_by_position(run.path),
    }


def dropped_by_position(run_dir: Path) -> list[float]:
    """Share of rows that were dropped in each part of a sample, mean over layers and records; [] of a run that dropped none."""
    experts = read_run(run_dir)["experts"]
    layers = experts["positions"] if experts else []
    return [round(statistics.fmean(part), 4) for part in zip(*layers, strict=True)]


@torch.no_grad()
def copying(model: torch.nn.Module, config: GPTRunConfig) -> float:
    """Nats per token that random tokens cost less when they come a second time: what induction heads are worth."""
    half, vocabulary = config.data.seq_len // 2, config.model.vocab_size
    generator = torch.Generator().manual_seed(0)
    once_BS = torch.randint(vocabulary, (16, half), generator=generator)
    ids_BS = torch.cat((once_BS, once_BS), dim=1)
    logits_BSV = model(ids_BS).logits_BSV[:, :-1].float()
    losses_BS = torch.nn.functional.cross_entropy(
        logits_BSV.transpose(1, 2), ids_BS[:, 1:], reduction="none"
    )
    return float(losses_BS[:, : half - 1].mean() - losses_BS[:, half:].mean())
