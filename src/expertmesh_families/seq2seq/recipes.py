"""Recipes of encoder-decoders: for two CPU cores, and the published shapes of Z-code M3 (Kim et al. 2021, arXiv
2109.10465)."""

from collections.abc import Callable
from dataclasses import dataclass

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig, TrainConfig
from expertmesh_families.seq2seq.config import ParallelTextConfig, Seq2SeqConfig, Seq2SeqRunConfig


def translate_test() -> Seq2SeqRunConfig:
    """A model that trains in seconds, for tests: 2 + 2 layers, 4 experts, 32 wide."""
    return Seq2SeqRunConfig(
        model=Seq2SeqConfig(
            vocab_size=320,
            max_source_len=64,
            max_seq_len=64,
            dim=32,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            ffn_hidden_dim=64,
            moe=MoEConfig(num_experts=(4,), top_k=1, hidden_dim=64, balance_loss_scope="global"),
        ),
        data=ParallelTextConfig(path=("multi30k",), neighbours=8),
        optim=OptimConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20,
            batch_size=8,
            run_dir="runs/translate-test",
            checkpoint_every=10,
            eval_every=10,
            eval_batches=2,
        ),
    )


def translate_multi30k() -> Seq2SeqRunConfig:
    """English to German on picture captions (Multi30k): 8 experts in every other layer, under an hour on two cores."""
    return Seq2SeqRunConfig(
        model=Seq2SeqConfig(
            vocab_size=6000,
            max_source_len=96,
            max_seq_len=96,
            dim=192,
            num_encoder_layers=4,
            num_decoder_layers=2,
            num_heads=4,
            ffn_hidden_dim=512,
            dropout=0.3,
            init_std=0.04,
            moe=MoEConfig(num_experts=(8,), top_k=1, hidden_dim=512, balance_loss_scope="global"),
        ),
        data=ParallelTextConfig(path=("multi30k",), languages=("de", "en"), pairs=("en-de",), neighbours=128),
        optim=OptimConfig(
            name="muon",
            lr=12e-3,
            warmup_steps=100,
            min_lr_ratio=0.02,
            weight_decay=0.05,
            beta2=0.98,
        ),
        train=TrainConfig(
            steps=2000,
            batch_size=128,
            run_dir="runs/translate-multi30k",
            checkpoint_every=500,
            eval_every=500,
            eval_batches=8,
        ),
    )


_TWELVE = ("cs", "de", "en", "es", "fi", "fr", "it", "nl", "pl", "ru", "tr", "zh")
_WITH_ENGLISH = tuple(pair for code in _TWELVE if code != "en" for pair in (f"en-{code}", f"{code}-en"))


def translate_twelve() -> Seq2SeqRunConfig:
    """Twelve languages to and from English, some pairs without English, denoising; LibreOffice help, Multi30k.

    Czech and French are never translated into one another in training.
    """
    config = translate_multi30k()
    return config.updated(
        {
            "model.vocab_size": 16_000,
            "model.max_source_len": 256,  # no line of the help is longer
            "model.max_seq_len": 256,
            "model.dropout": 0.1,
            "data.path": ("lohelp", "multi30k"),
            "data.languages": _TWELVE,
            "data.pairs": (*_WITH_ENGLISH, "de-fr", "fr-de", "cs-de", "de-cs"),
            "data.without_pairs": ("cs-fr", "fr-cs"),
            "data.temperature": 3.0,
            "data.denoising": 0.3,
            "data.neighbours": 64,
            "train.steps": 4000,
            "train.batch_size": 64,
            "train.run_dir": "runs/translate-twelve",
        }
    )


@dataclass(frozen=True)
class PublishedTranslator:
    """Recipe of a size of Z-code M3: 24 encoder and 12 decoder layers, MoE in every other one.

    Capacity 1.0 in training and 2.0 in evaluation, random token selection, a vocabulary of 128,000, and an untied
    output matrix, which gives the published sizes. Differences: RMSNorm and rotary positions, where the original has
    LayerNorm, biases and untied absolute positions.
    """

    name: str  # name of the recipe
    num_experts: tuple[int, ...]  # experts of each MoE layer; none: dense

    @property
    def summary(self) -> str:
        """Description in the list of recipes, one line."""
        kind = f"{self.num_experts[0]} experts, top-1" if self.num_experts else "dense"
        return f"Z-code M3's encoder-decoder, {kind}: 24 + 12 layers."

    def __call__(self) -> Seq2SeqRunConfig:
        """The complete configuration."""
        moe = MoEConfig(num_experts=())
        if self.num_experts:
            moe = MoEConfig(
                num_experts=self.num_experts,
                top_k=1,
                hidden_dim=4096,
                capacity_factor=1.0,
                eval_capacity_factor=2.0,
                drop_policy="random",
            )
        return Seq2SeqRunConfig(
            model=Seq2SeqConfig(
                vocab_size=128_000,
                max_source_len=512,
                max_seq_len=512,
                dim=1024,
                num_encoder_layers=24,
                num_decoder_layers=12,
                num_heads=16,
                ffn_hidden_dim=4096,
                tie_embeddings=False,
                moe=moe,
            ),
            data=ParallelTextConfig(temperature=5.0, denoising=0.5, neighbours=512),
            optim=OptimConfig(lr=3e-4, warmup_steps=5000, beta2=0.98),
            train=TrainConfig(
                steps=200_000,
                batch_size=16_384,
                micro_batch_size=512,
                run_dir=f"runs/{self.name}",
                checkpoint_every=2000,
                eval_every=1000,
            ),
        )


PUBLISHED = (
    PublishedTranslator("translate-0.7b", ()),
    PublishedTranslator("translate-0.7b-moe8", (8,)),
    PublishedTranslator("translate-0.7b-moe64", (64,)),
)

RECIPES: dict[str, Callable[[], Seq2SeqRunConfig]] = {
    "translate-test": translate_test,
    "translate-multi30k": translate_multi30k,
    "translate-twelve": translate_twelve,
    **{recipe.name: recipe for recipe in PUBLISHED},
}
