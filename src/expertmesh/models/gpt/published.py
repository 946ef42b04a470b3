"""The GPT family of DeepSpeed-MoE (Rajbhandari et al. 2022, tables 1, 3 and 5), and a 1B model of today's shape.

Widths, depths, experts, batch sizes, learning rates and token counts are the published ones: sequences of 2048 tokens,
a vocabulary of 51200, GELU experts of hidden size 4 * dim, MoE in every other layer, top-1 routing with capacity factor
1.0 and random token selection, FP16, Adam with betas 0.9 and 0.95, warm-up over 375 million tokens, cosine decay over
300 billion. Differences: RMSNorm, rotary positions and no biases, where the originals have LayerNorm, learned positions
and biases; together under 0.6% of the base models' parameters.
"""

from dataclasses import dataclass

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import DistillConfig, OptimConfig, TrainConfig
from expertmesh.config.text import TextConfig
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig

SEQ_LEN = 2048
WARMUP_TOKENS = 375_000_000
TRAIN_TOKENS = 300_000_000_000
MICRO_BATCH_SIZE = 8


@dataclass(frozen=True)
class PublishedGPT:
    """Recipe of a model in the published tables."""

    name: str  # the name of the recipe
    dim: int  # model width
    num_layers: int  # transformer layers
    num_heads: int  # attention heads
    num_experts: tuple[int, ...]  # see MoEConfig; none for a dense model
    residual: bool  # whether MoE layers have PR-MoE's residual MLP
    batch_size: int  # sequences per step
    lr: float  # peak learning rate
    min_lr: float  # final learning rate
    init_std: float = 0.014  # standard deviation of the initial weights
    teacher: str | None = None  # recipe of a Mixture-of-Students' teacher; none: no teacher

    @property
    def summary(self) -> str:
        """Description in the list of recipes, one line."""
        if not self.num_experts:
            return "Dense base of the DeepSpeed-MoE family."
        kind = "Pyramid-residual MoE" if self.residual else "MoE"
        kind = "Mixture-of-Students" if self.teacher else kind
        most, fewest = max(self.num_experts), min(self.num_experts)
        experts = f"{fewest} and {most}" if most > fewest else f"{most}"
        return f"{kind} of the DeepSpeed-MoE family: {experts} experts in every other layer, top-1."

    def __call__(self) -> GPTRunConfig:
        """The complete configuration."""
        moe = MoEConfig(num_experts=())
        if self.num_experts:
            moe = MoEConfig(
                num_experts=self.num_experts,
                top_k=1,
                hidden_dim=4 * self.dim,
                capacity_factor=1.0,
                eval_capacity_factor=1.0,
                min_capacity=4,
                drop_policy="random",
                # the tokens of one forward pass on one rank, as in the original
                routing_group_size=MICRO_BATCH_SIZE * SEQ_LEN,
                residual=self.residual,
                aux_loss_weight=0.01,
            )
        model = ModelConfig(
            vocab_size=51200,
            max_seq_len=SEQ_LEN,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            ffn_hidden_dim=4 * self.dim,
            activation="gelu",
            init_std=self.init_std,
            moe_every=2,
            moe=moe,
        )
        tokens_per_step = self.batch_size * SEQ_LEN
        return GPTRunConfig(
            model=model,
            data=TextConfig(seq_len=SEQ_LEN),
            optim=OptimConfig(
                lr=self.lr,
                min_lr_ratio=self.min_lr / self.lr,
                warmup_steps=round(WARMUP_TOKENS / tokens_per_step),
            ),
            train=TrainConfig(
                steps=round(TRAIN_TOKENS / tokens_per_step),
                batch_size=self.batch_size,
                micro_batch_size=MICRO_BATCH_SIZE,
                run_dir=f"runs/{self.name}",
                dtype="float16",
                activation_checkpointing=True,
                checkpoint_every=10_000,
                eval_every=1_000,
            ),
            # staged distillation: the published students stop it after 400,000 of 572,000 steps
            distill=DistillConfig(teacher=f"runs/{self.teacher}", until=0.7) if self.teacher else DistillConfig(),
        )


PUBLISHED = (
    PublishedGPT("gpt-350m", 1024, 24, 16, (), False, 256, 3e-4, 3e-5),
    PublishedGPT("gpt-1.3b", 2048, 24, 16, (), False, 512, 2e-4, 2e-5),
    PublishedGPT("gpt-6.7b", 4096, 32, 32, (), False, 1024, 1.2e-4, 1.2e-5, init_std=0.01),
    PublishedGPT("gpt-350m-moe128", 1024, 24, 16, (128,), False, 256, 2e-4, 2e-6),
    PublishedGPT("gpt-1.3b-moe128", 2048, 24, 16, (128,), False, 512, 1.2e-4, 1e-6),
    PublishedGPT("gpt-350m-prmoe", 1024, 24, 16, (32,) * 10 + (64,) * 2, True, 256, 3e-4, 1e-6),
    PublishedGPT("gpt-1.3b-prmoe", 2048, 24, 16, (64,) * 10 + (128,) * 2, True, 512, 1.2e-4, 1e-6),
    PublishedGPT(
        "gpt-350m-mos", 1024, 21, 16, (32,) * 8 + (64,) * 2, True, 256, 3e-4, 1e-6,
        teacher="gpt-350m-prmoe",
    ),
    PublishedGPT(
        "gpt-1.3b-mos", 2048, 21, 16, (64,) * 8 + (128,) * 2, True, 512, 1.2e-4, 1e-6,
        teacher="gpt-1.3b-prmoe",
    ),
)  # fmt: skip


def gpt_moe_1b() -> GPTRunConfig:
    """GPT of 1.0 billion parameters, 0.2 billion active: 18 layers, 16 SwiGLU experts, top-2, dropless."""
    return GPTRunConfig(
        model=ModelConfig(
            vocab_size=32000,
            max_seq_len=SEQ_LEN,
            dim=1024,
            num_layers=18,
            num_heads=16,
            num_kv_heads=4,
            ffn_hidden_dim=2048,
            qk_norm=True,
            moe=MoEConfig(num_experts=(16,), top_k=2, hidden_dim=1024, z_loss_weight=1e-3),
        ),
        data=TextConfig(seq_len=SEQ_LEN),
        optim=OptimConfig(lr=4e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=40_000,
            batch_size=256,
            micro_batch_size=8,
            run_dir="runs/gpt-moe-1b",
            activation_checkpointing=True,
            checkpoint_every=1000,
            eval_every=500,
        ),
    )
