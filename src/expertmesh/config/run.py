"""The complete configuration of a training run, in sections that are also the command line's."""

from typing import Literal

from pydantic import Field

from expertmesh.config.base import Config
from expertmesh.config.model import ModelConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Schedule = Literal["cosine", "wsd"]
Resume = Literal["auto", "never", "required"]


class DataConfig(Config):
    """Where the text comes from and how it becomes token sequences."""

    path: str | None = None
    """Text file or folder; none: the source of the running Python's standard library."""
    dataset: str | None = None
    """Name of a Hugging Face dataset (needs the 'train' extra); its 'text' column is used."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of the documents kept for validation; a document is on one side only."""
    max_bytes: int | None = None
    """Use only about this many bytes of the corpus, chosen by a hash of the document's name; none: all."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens per training sequence; at most model.max_seq_len."""
    cache_dir: str | None = None
    """Folder for tokenizers and token shards; none: the user's cache folder."""


class OptimConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate as a ratio of the peak."""
    schedule: Schedule = "cosine"
    """After the warm-up: cosine decay, or warm-up-stable-decay (wsd)."""
    warmup_steps: int = Field(default=50, ge=0)
    """Steps of linear warm-up."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps that wsd spends on its final linear decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices; norms, biases and embeddings are not decayed."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""


class TrainConfig(Config):
    """The training loop."""

    steps: int = Field(default=1000, gt=0)
    """Optimiser steps."""
    batch_size: int = Field(default=16, gt=0)
    """Sequences per optimiser step."""
    micro_batch_size: int | None = None
    """Sequences per forward pass (gradient accumulation); none: batch_size."""
    seed: int = Field(default=0, ge=0)
    """Seed of initialisation, data order and router noise."""
    run_dir: str = "runs/default"
    """Folder for metrics, checkpoints and the resolved configuration."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Dtype = "auto"
    """Compute precision; auto: bfloat16 where the hardware does it fast, else float32."""
    resume: Resume = "never"
    """auto: from the newest good checkpoint if there is one; never: the run directory must be new; required."""
    checkpoint_every: int = Field(default=200, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = Field(default=2, gt=0)
    """Newest checkpoints kept, beside the best."""
    eval_every: int = Field(default=100, gt=0)
    """Steps between evaluations; the first and the last step are always evaluated."""
    eval_batches: int = Field(default=16, gt=0)
    """Batches of the validation split per evaluation."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    max_bad_steps: int = Field(default=10, gt=0)
    """Non-finite steps in a row after which the run stops."""
    tensorboard: bool = True
    """Write TensorBoard events where the package is installed."""


class ParallelConfig(Config):
    """How the machine is used."""

    num_threads: int | None = None
    """CPU threads of this process; none: PyTorch's choice."""


class RunConfig(Config):
    """Everything that defines a training run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
