"""Recipes for clusters: MoE models of 0.4 to 3.6 trillion parameters, and dense bases of 15 and 100 billion.

`expertmesh plan` finds clusters and layouts for them. `gpt-1.1t` is fairseq's and Tutel's model: 32 layers of width
4096, 512 experts in every second one, top-2, GELU, a vocabulary of 51,200, sequences of 1,024. It has 1,104,050,130,944
parameters here, without biases, with RMSNorm, rotary positions and tied embeddings; fairseq's version (biases,
LayerNorm, sinusoidal positions) has 1,104,219,021,312. The shapes of `gpt-3.5t` (46 layers of 6144, 512 experts:
3,570,511,951,872) and `gpt-400b` (46 of 4096, 128 experts: 401,533,161,472) are ours, because publications of these
sizes give none. Dropless, BF16, Adam with betas 0.9 and 0.95.
"""

from dataclasses import dataclass

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig, TrainConfig
from expertmesh.config.text import TextConfig
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.published import TRAIN_TOKENS, WARMUP_TOKENS


@dataclass(frozen=True)
class LargeGPT:
    """Recipe of a model for a cluster."""

    name: str  # the name of the recipe
    dim: int  # model width; experts and dense layers are four times as wide
    num_layers: int  # transformer layers
    num_heads: int  # attention heads
    num_experts: int  # experts of every second layer, top-2; 0: a dense base
    seq_len: int  # tokens per sequence
    batch_size: int  # sequences per step
    micro_batch_size: int  # sequences per forward pass, on all ranks together
    lr: float  # peak learning rate

    @property
    def summary(self) -> str:
        """Description in the list of recipes, one line."""
        if not self.num_experts:
            return "Dense base for a cluster; --model.moe.num-experts makes it an MoE."
        return f"MoE for a cluster: {self.num_experts} experts in every other layer, top-2."

    def __call__(self) -> GPTRunConfig:
        """The complete configuration."""
        moe = MoEConfig(num_experts=())
        if self.num_experts:
            moe = MoEConfig(
                num_experts=(self.num_experts,),
                top_k=2,
                hidden_dim=4 * self.dim,
                aux_loss_weight=0.01,
            )
        tokens_per_step = self.batch_size * self.seq_len
        return GPTRunConfig(
            model=ModelConfig(
                vocab_size=51200,
                max_seq_len=self.seq_len,
                dim=self.dim,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                ffn_hidden_dim=4 * self.dim,
                activation="gelu",
                init_std=0.006,
                moe_every=2 if self.num_experts else 1,
                moe=moe,
            ),
            data=TextConfig(seq_len=self.seq_len),
            optim=OptimConfig(
                lr=self.lr,
                min_lr_ratio=0.1,
                warmup_steps=round(WARMUP_TOKENS / tokens_per_step),
            ),
            train=TrainConfig(
                steps=round(TRAIN_TOKENS / tokens_per_step),
                batch_size=self.batch_size,
                micro_batch_size=self.micro_batch_size,
                run_dir=f"runs/{self.name}",
                dtype="bfloat16",
                activation_checkpointing=True,
                checkpoint_every=1_000,
                eval_every=500,
            ),
        )


LARGE = (
    LargeGPT("gpt-15b", 5120, 48, 40, 0, 2048, 1024, 256, 1e-4),
    LargeGPT("gpt-100b", 11520, 64, 96, 0, 2048, 2048, 256, 6e-5),
    LargeGPT("gpt-400b", 4096, 46, 32, 128, 2048, 1024, 256, 1e-4),
    LargeGPT("gpt-1.1t", 4096, 32, 32, 512, 1024, 6144, 6144, 1e-4),
    LargeGPT("gpt-3.5t", 6144, 46, 48, 512, 2048, 2048, 1024, 6e-5),
)
"""Recipes for clusters: dense bases, then MoE models, each from small to large."""
