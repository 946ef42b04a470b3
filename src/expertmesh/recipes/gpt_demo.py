"""Small GPTs for two CPU cores: one for tests, the demo, and the demo's dense twin."""

from expertmesh.config.gpt import GPTRunConfig
from expertmesh.config.model import ModelConfig, MoEConfig
from expertmesh.config.run import OptimConfig, TrainConfig
from expertmesh.config.text import TextConfig
from expertmesh.recipes.dense_twin import dense_twin


def gpt_moe_test() -> GPTRunConfig:
    """A model that trains in seconds, for tests: 2 layers, 4 experts, 64 wide."""
    return GPTRunConfig(
        model=ModelConfig(
            vocab_size=512,
            max_seq_len=64,
            dim=64,
            num_layers=2,
            num_heads=2,
            ffn_hidden_dim=128,
            moe=MoEConfig(num_experts=(4,), top_k=2, hidden_dim=64),
        ),
        data=TextConfig(seq_len=64, max_bytes=400_000),
        optim=OptimConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20,
            batch_size=8,
            run_dir="runs/gpt-moe-test",
            checkpoint_every=10,
            eval_every=10,
            eval_batches=2,
        ),
    )


def gpt_moe_demo() -> GPTRunConfig:
    """The demo: 32 narrow experts of which a token uses 2; 2.6 million tokens of Python source.

    The feed-forward layers are narrow, so that a dense model of the same cost is short of parameters within the
    minutes of a demo, which is where experts pay (docs/log.md, "Equal learning"). weight_scale = K undoes the 1/K
    that normalised weights put on K experts, so that the layer starts with the output of its dense twin.
    """
    return GPTRunConfig(
        model=ModelConfig(
            vocab_size=2048,
            max_seq_len=128,
            dim=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            qk_norm=True,
            init_std=0.06,
            moe=MoEConfig(num_experts=(32,), top_k=2, hidden_dim=64, weight_scale=2.0),
        ),
        data=TextConfig(seq_len=128),
        optim=OptimConfig(name="muon", lr=12e-3, warmup_steps=50),
        train=TrainConfig(
            steps=640,
            batch_size=32,
            run_dir="runs/gpt-moe-demo",
            checkpoint_every=160,
            eval_every=80,
        ),
    )


def gpt_dense_demo() -> GPTRunConfig:
    """The demo's dense twin: the same model with one feed-forward layer in place of the experts."""
    twin = dense_twin(gpt_moe_demo())
    train = twin.train.model_copy(update={"run_dir": "runs/gpt-dense-demo"})
    return twin.model_copy(update={"train": train})
