"""Small GPTs for two CPU cores: one for tests, the demo, and the demo's dense twin."""

from expertmesh.config.model import ModelConfig, MoEConfig
from expertmesh.config.run import DataConfig, OptimConfig, RunConfig, TrainConfig


def gpt_moe_test() -> RunConfig:
    """A model that trains in seconds, for tests: 2 layers, 4 experts, 64 wide."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=512,
            max_seq_len=64,
            dim=64,
            num_layers=2,
            num_heads=2,
            ffn_hidden_dim=128,
            moe=MoEConfig(num_experts=(4,), top_k=2, hidden_dim=64),
        ),
        data=DataConfig(seq_len=64, max_bytes=400_000),
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


def gpt_moe_demo() -> RunConfig:
    """The demo: 8 experts of which a token uses 2; 2.1 million tokens of Python source."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=4096,
            max_seq_len=256,
            dim=256,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_dim=1024,
            qk_norm=True,
            moe=MoEConfig(num_experts=(8,), top_k=2, hidden_dim=512),
        ),
        data=DataConfig(seq_len=256),
        optim=OptimConfig(lr=2e-3, warmup_steps=50),
        train=TrainConfig(
            steps=520,
            batch_size=16,
            run_dir="runs/gpt-moe-demo",
            checkpoint_every=260,
            eval_every=65,
        ),
    )


def gpt_dense_demo() -> RunConfig:
    """The demo's dense twin: the same model with one feed-forward layer of hidden size K * F in place of the experts.

    A token passes K experts of hidden size F there and one layer of hidden size K * F here, so the matrix
    multiplications per token are the same, but for the router (D * E multiplications, 0.3% of the layer's).
    """
    demo = gpt_moe_demo()
    moe = demo.model.moe
    model = demo.model.model_copy(
        update={
            "ffn_hidden_dim": moe.top_k * moe.hidden_dim,
            "moe": MoEConfig(num_experts=()),
        }
    )
    train = demo.train.model_copy(update={"run_dir": "runs/gpt-dense-demo"})
    return demo.model_copy(update={"model": model, "train": train})
