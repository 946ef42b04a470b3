"""Recipes of Swin Transformers: for two CPU cores, and published shapes of Swin V2 (arXiv 2111.09883) and SwinV2-MoE
(2206.03382)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig, TrainConfig
from expertmesh_families.swin.config import ImagesConfig, SwinConfig, SwinRunConfig

_BATCH_PRIORITISED: dict[str, Any] = {
    "top_k": 1,
    "capacity_factor": 1.25,
    "eval_capacity_factor": 1.25,
    "drop_policy": "priority",
    "balance_loss": "importance_load",
    "balance_loss_scope": "global",
}


def _noisy(num_experts: int) -> dict[str, Any]:
    """Batch-prioritised routing with the released models' noise, which also spreads tokens before the router has
    learned."""
    return _BATCH_PRIORITISED | {"router_noise": "gaussian", "router_noise_std": 1 / num_experts}


def swin_test() -> SwinRunConfig:
    """A model that trains in seconds, for tests: stages 8 and 16 wide, 4 experts, 16 x 16 images."""
    return SwinRunConfig(
        model=SwinConfig(
            image_size=16,
            num_channels=1,
            num_classes=10,
            patch_size=2,
            dim=8,
            depths=(2, 2),
            num_heads=(1, 2),
            window_size=4,
            drop_path=0.1,
            moe_stages=(1, 2),
            moe=MoEConfig(num_experts=(4,), **_noisy(4)),
        ),
        data=ImagesConfig(path=("mnist10k",)),
        optim=OptimConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20,
            batch_size=8,
            run_dir="runs/swin-test",
            checkpoint_every=10,
            eval_every=10,
            eval_batches=2,
        ),
    )


def swin_mnist() -> SwinRunConfig:
    """Handwritten digits: 8 experts in two of six blocks, batch-prioritized routing, minutes on a core."""
    return SwinRunConfig(
        model=SwinConfig(
            image_size=32,
            num_channels=1,
            num_classes=10,
            patch_size=4,
            dim=32,
            depths=(2, 2, 2),
            num_heads=(1, 2, 4),
            window_size=4,
            drop_path=0.05,
            label_smoothing=0.05,
            moe_stages=(2, 3),
            moe=MoEConfig(num_experts=(8,), **_noisy(8)),
        ),
        data=ImagesConfig(
            path=("mnist10k",),
            fit="pad",
            rotate=12.0,
            shift=0.08,
            zoom=0.12,
            shear=0.12,
        ),
        optim=OptimConfig(
            name="muon",
            lr=6e-3,
            warmup_steps=150,
            min_lr_ratio=0.01,
            weight_decay=0.05,
            beta2=0.98,
        ),
        train=TrainConfig(
            steps=1200,
            batch_size=64,
            run_dir="runs/swin-mnist",
            checkpoint_every=200,
            eval_every=200,
            eval_batches=32,
        ),
    )


def swin_union67() -> SwinRunConfig:
    """Digits, silhouettes of animals and glyphs of many fonts, 67 classes: 16 experts in three of eight blocks."""
    return swin_mnist().updated(
        {
            "model.num_classes": 67,
            "model.patch_size": 2,
            "model.dim": 48,
            "model.depths": (2, 4, 2),
            "model.num_heads": (2, 4, 8),
            "model.moe.num_experts": (16,),
            "model.moe.router_noise_std": 1 / 16,
            "data.path": ("mnist10k", "animals", "glyphs"),
            "data.train_images": (8000, 7000, 0),
            "train.steps": 3000,
            "train.run_dir": "runs/swin-union67",
        }
    )


@dataclass(frozen=True)
class PublishedSwin:
    """Recipe of a published size.

    Dense sizes are Swin V2's for ImageNet-1K at 256 x 256. MoE sizes are the released SwinV2-MoE models, trained on
    ImageNet-22K at 192 x 192 with windows of 12: MoE in every second block of the last two stages, top-1, capacity
    1.25, batch-prioritised. Differences: affine transforms, colour changes and erasing replace RandAugment; no dropout
    inside experts.
    """

    name: str  # name of the recipe
    dim: int  # width of the first stage
    third: int  # blocks of the third stage
    heads: int  # attention heads of the first stage
    drop_path: float  # stochastic depth rate of the last block
    num_experts: tuple[int, ...] = ()  # experts of each MoE block; none: dense

    @property
    def summary(self) -> str:
        """Description in the list of recipes, one line."""
        kind = f"SwinV2-MoE, {self.num_experts[0]} experts" if self.num_experts else "Swin V2"
        return f"{kind}: stages of 2, 2, {self.third} and 2 blocks, {self.dim} to {8 * self.dim} wide."

    def __call__(self) -> SwinRunConfig:
        """The complete configuration."""
        is_moe = bool(self.num_experts)
        moe: dict[str, Any] = {"num_experts": (), "top_k": 2}
        if is_moe:
            moe = {"num_experts": self.num_experts, **_noisy(self.num_experts[0])}
        return SwinRunConfig(
            model=SwinConfig(
                variant="released" if is_moe else "v2",
                image_size=192 if is_moe else 256,
                num_classes=21_841 if is_moe else 1000,
                dim=self.dim,
                depths=(2, 2, self.third, 2),
                num_heads=tuple(self.heads << stage for stage in range(4)),
                window_size=12 if is_moe else 8,
                drop_path=self.drop_path,
                init_std=0.005 if is_moe else 0.02,
                moe=MoEConfig(**moe),
            ),
            data=ImagesConfig(
                path=("imagenet-22k" if is_moe else "imagenet-1k",),
                flip=True,
                rotate=15.0,
                shift=0.15,
                zoom=0.3,
                stretch=0.25,
                shear=0.15,
                colour=0.4,
                erase=0.25,
                mixup=0.8,
                cutmix=1.0,
            ),
            optim=OptimConfig(
                lr=1e-3,
                warmup_steps=34_000 if is_moe else 25_000,
                min_lr_ratio=0.01,
                weight_decay=0.1 if is_moe else 0.05,
                beta2=0.999,
                grad_clip=3.0 if is_moe else 5.0,
            ),
            train=TrainConfig(
                steps=310_000 if is_moe else 375_000,
                batch_size=4096 if is_moe else 1024,
                micro_batch_size=256,
                run_dir=f"runs/{self.name}",
                checkpoint_every=2000,
                eval_every=2000,
            ),
        )


PUBLISHED = (
    PublishedSwin("swin-t", 96, 6, 3, 0.2),
    PublishedSwin("swin-s", 96, 18, 3, 0.3),
    PublishedSwin("swin-b", 128, 18, 4, 0.5),
    *(PublishedSwin(f"swin-s-moe{experts}", 96, 18, 3, 0.2, (experts,)) for experts in (8, 16, 32, 64, 128)),
    *(PublishedSwin(f"swin-b-moe{experts}", 128, 18, 4, 0.3, (experts,)) for experts in (8, 16, 32)),
)

RECIPES: dict[str, Callable[[], SwinRunConfig]] = {
    "swin-test": swin_test,
    "swin-mnist": swin_mnist,
    "swin-union67": swin_union67,
    **{recipe.name: recipe for recipe in PUBLISHED},
}
