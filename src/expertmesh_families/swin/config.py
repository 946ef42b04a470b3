"""Options of a Swin Transformer, and the complete configuration of its training on images."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError
from expertmesh.config.fields import Spelling
from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import RunConfig

Variant = Literal["v2", "released"]
Fit = Literal["pad", "resize", "exact"]


class SwinConfig(Config):
    """A Swin Transformer V2, or the variant that was released as "SwinV2-MoE", with MoE in every second block of some
    stages."""

    variant: Variant = "v2"
    """Architecture: v2, Swin V2 as in the paper (scaled cosine attention, continuous position bias, post-norm);
    released, as in the published SwinV2-MoE checkpoints (pre-norm, dot-product attention, plain position bias, no
    output bias in MLPs)."""
    image_size: int = Field(default=256, gt=0)
    """Height and width of the images in pixels."""
    num_channels: Literal[1, 3] = 3
    """Channels of the images: 1 grey, 3 red, green and blue."""
    num_classes: int = Field(default=1000, gt=0)
    """Number of classes."""
    patch_size: int = Field(default=4, gt=0)
    """Height and width of a patch in pixels; a patch is a token of the first stage."""
    dim: int = Field(default=96, gt=0)
    """Width of the first stage (D); each further stage doubles the width and halves height and width of the feature
    map."""
    depths: tuple[Annotated[int, Field(gt=0)], ...] = (2, 2, 6, 2)
    """Number of blocks of each stage."""
    num_heads: tuple[Annotated[int, Field(gt=0)], ...] = (3, 6, 12, 24)
    """Number of attention heads of each stage."""
    window_size: int = Field(default=8, gt=0)
    """Height and width of an attention window in tokens; a smaller feature map is one window."""
    pretrained_window_sizes: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Pretrained window size of each stage, for its position bias; set by train.init_from; none: this model's window
    sizes."""
    mlp_ratio: float = Field(default=4.0, gt=0)
    """Hidden size of MLPs and experts as a ratio of the stage's width."""
    drop_path: float = Field(default=0.2, ge=0, lt=1)
    """Stochastic depth rate of the last block; linear from 0 at the first block."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Label smoothing: probability mass spread over all classes."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of LayerNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial matrices."""
    moe_stages: tuple[Annotated[int, Field(gt=0)], ...] = (3, 4)
    """Stages, counted from 1, whose blocks 1, 3, 5, ... (counted from 0) are MoE."""
    moe: MoEConfig = MoEConfig(top_k=1)
    """The mixture-of-experts layers, with hidden size and biases of the MLPs that they replace."""

    @property
    def stage_dims(self) -> tuple[int, ...]:
        """Width of each stage."""
        return tuple(self.dim << stage for stage in range(len(self.depths)))

    @property
    def map_sides(self) -> tuple[int, ...]:
        """Height and width of each stage's map in tokens."""
        return tuple((self.image_size // self.patch_size) >> s for s in range(len(self.depths)))

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each stage, limited to the size of its map."""
        return tuple(min(self.window_size, side) for side in self.map_sides)

    @property
    def learned_windows(self) -> tuple[int, ...]:
        """Window of each stage with which its position bias was or is learned."""
        return self.pretrained_window_sizes or self.windows

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts; 0 for a dense model."""
        if not self.moe.num_experts:
            return 0
        return sum(self.depths[stage - 1] // 2 for stage in self.moe_stages)

    def experts_per_block(self) -> tuple[tuple[int, ...], ...]:
        """Number of experts of every block of every stage; 0 where the MLP is dense."""
        counts = self.moe.num_experts
        left = list(counts * self.num_moe_layers if len(counts) == 1 else counts)
        return tuple(
            tuple(left.pop(0) if left and stage in self.moe_stages and block % 2 else 0 for block in range(depth))
            for stage, depth in enumerate(self.depths, 1)
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require(
            self.depths and len(self.depths) == len(self.num_heads),
            "num_heads",
            f"must have one entry for each stage, as depths={self.depths}",
            "give as many, at least one",
        )
        for dim, heads in zip(self.stage_dims, self.num_heads, strict=True):
            if dim % heads:
                raise FieldError("num_heads", heads, f"must divide the stage's width, {dim}", "choose a divisor")
        self._check_maps()
        self._check_experts()
        return self

    def _check_maps(self) -> None:
        unit = self.patch_size << (len(self.depths) - 1)
        self.require(
            self.image_size % unit == 0,
            "image_size",
            f"must be a multiple of {unit}: patches of {self.patch_size}, halved after each stage but the last",
            f"for example {max(self.image_size // unit, 1) * unit}",
        )
        self.require(
            not any(side % min(self.window_size, side) for side in self.map_sides),
            "window_size",
            f"must divide the side of each stage's map that is larger, {self.map_sides}",
            "choose a divisor, or another image_size",
        )
        self.require(
            len(self.pretrained_window_sizes) in (0, len(self.depths)),
            "pretrained_window_sizes",
            f"must have one entry for each of the {len(self.depths)} stages",
            "leave it out unless weights were learned with other windows",
        )

    def _check_experts(self) -> None:
        stages = self.moe_stages
        self.require(
            list(stages) == sorted(set(stages)) and max(stages, default=1) <= len(self.depths),
            "moe_stages",
            f"must be different stages from 1 to {len(self.depths)} in their order",
            "for example the last two",
        )
        for name in ("hidden_dim", "bias"):
            usual = MoEConfig.model_fields[name].default
            self.require(
                getattr(self.moe, name) == usual,
                f"moe.{name}",
                "is that of the MLPs which the experts replace",
                f"leave it at {usual}",
            )
        given = len(self.moe.num_experts)
        self.require(
            not given or self.num_moe_layers,
            "moe_stages",
            "names no stage of two blocks, so that no block has experts",
            "name one, or give no moe.num_experts for a dense model",
        )
        self.require(
            given in (0, 1, self.num_moe_layers),
            "moe.num_experts",
            f"must have one entry, or one per MoE block ({self.num_moe_layers}), has {given}",
            "add or remove entries",
        )


_OF_WEIGHTS = (
    "variant", "num_channels", "patch_size", "dim", "depths", "num_heads", "mlp_ratio", "norm_eps", "moe_stages",
)  # fmt: skip
"""Options of the model that its weights fix; options of images, windows and classes may change."""
_OF_EXPERTS = (
    "num_experts", "top_k", "router", "score_function", "normalize_weights", "weight_scale", "logit_temperature", "cosine_dim",  # noqa: E501
    "num_expert_groups", "num_limited_groups", "group_score", "bias_update_rate", "num_shared_experts", "shared_hidden_dim", "shared_gate",  # noqa: E501
    "residual", "router_bias",
)  # fmt: skip


def begun_with(config: "SwinRunConfig", other: "SwinRunConfig") -> "SwinRunConfig":
    """The configuration with all options that the weights of the run in train.init_from fix; images, windows and
    classes stay."""
    model = config.model.model_dump() | {name: getattr(other.model, name) for name in _OF_WEIGHTS}
    if not other.model.moe.num_experts:
        model["moe"] = other.model.moe.model_dump()
    model["moe"] |= {name: getattr(other.model.moe, name) for name in _OF_EXPERTS}
    if not model["pretrained_window_sizes"]:
        model["pretrained_window_sizes"] = other.model.learned_windows
    return config.updated({"model": model})


class ImagesConfig(Config):
    """Labelled images and their augmentation."""

    path: Annotated[tuple[str, ...], Spelling("PATH")] = ()
    """Folders with a subfolder of images per class, or with IDX files (images-idx3-ubyte, labels-idx1-ubyte, also .gz);
    splits are subfolders train/ and val/ (or test/), or prefixes train- and test- of IDX files. Classes of several
    folders are merged."""
    train_images: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Number of training images (the first ones) per folder of IDX files without a split; 0 or none: by
    validation_fraction."""
    validation_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of images for validation in folders without a split: the last ones of IDX files, a part of each class
    otherwise."""
    fit: Fit = "resize"
    """Images of another size: padded with zeros (pad, smaller ones only), center-cropped and resized (resize), or an
    error (exact)."""
    flip: bool = False
    """Whether images are flipped horizontally with probability 0.5."""
    rotate: float = Field(default=0.0, ge=0, le=180)
    """Maximum rotation of an image in degrees, in either direction."""
    shift: float = Field(default=0.0, ge=0, lt=1)
    """Maximum shift of an image along each axis, as a fraction of its side."""
    zoom: float = Field(default=0.0, ge=0, lt=1)
    """Random scale z: images are scaled by a factor from 1 - z to 1 / (1 - z)."""
    stretch: float = Field(default=0.0, ge=0, lt=1)
    """Random aspect ratio s: width / height is multiplied by a factor from 1 - s to 1 / (1 - s), at the same area."""
    shear: float = Field(default=0.0, ge=0, lt=1)
    """Maximum shear of an image, in either direction."""
    colour: float = Field(default=0.0, ge=0, lt=1)
    """Color jitter c: brightness and contrast are multiplied by factors from 1 - c to 1 + c."""
    erase: float = Field(default=0.0, ge=0, le=1)
    """Probability of random erasing: a random rectangle is replaced by noise."""
    mixup: float = Field(default=0.0, ge=0)
    """Mixup alpha; 0: no mixup."""
    cutmix: float = Field(default=0.0, ge=0)
    """CutMix alpha; 0: no CutMix; with mixup, one of the two is chosen at random per image."""
    mix: float = Field(default=1.0, gt=0, le=1)
    """Probability of mixup or CutMix."""
    cache_dir: Annotated[str | None, Spelling("DIR")] = None
    """Cache folder for data computed from the images; none: the user's cache folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require_once("path")
        self.require(
            len(self.train_images) in (0, 1, len(self.path)),
            "train_images",
            f"must have one entry, or one per folder ({len(self.path)})",
            "add or remove entries",
        )
        if not self.mixup and not self.cutmix:
            self.refuse_idle("mix", "has no effect without mixup or cutmix", "leave it out")
        return self


class SwinRunConfig(RunConfig):
    """Complete configuration of a training run of a Swin Transformer."""

    family: str = "swin"
    """Family of the model: swin, or module:name of your own."""
    model: SwinConfig = SwinConfig()
    data: ImagesConfig = ImagesConfig()
