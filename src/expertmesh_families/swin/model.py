"""A Swin Transformer with mixture-of-experts blocks: forward pass and initial weights.

There are two variants: Swin V2 (Liu et al. 2022, arXiv 2111.09883), and the models released as SwinV2-MoE (Hwang et al.
2023, arXiv 2206.03382), which share only the log-spaced position bias with Swin V2.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.models.classifier import ImageScores
from expertmesh.models.inputs import check_home
from expertmesh.models.layers import (
    FeedForward,
    check_model_arguments,
    draw_weights,
    init_by_spec,
)
from expertmesh.moe.constant_buffers import ConstantBuffers
from expertmesh.moe.dense_parts import Linear
from expertmesh.moe.init import draw_seed
from expertmesh.moe.large_sizes import names_large_sizes
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import RoutingStats
from expertmesh.ops.check import FLOATS, INTEGERS, Arg, check_tensor
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.spec.model_spec import ModelSpec
from expertmesh_families.swin.config import SwinConfig
from expertmesh_families.swin.drop_path import DropPath, scaled
from expertmesh_families.swin.spec import POSITION_HIDDEN, swin_spec
from expertmesh_families.swin.windows import (
    from_windows,
    into_windows,
    log_coordinates,
    region_mask,
    relative_index,
)

_IMAGES = Arg(
    "BCHW",
    FLOATS._replace(fix="convert it, normalised as in training"),
    "images, channels, height and width",
    reshape="resize them (one image is image[None]), or change model.image_size and model.num_channels",
)
_INDEX = Arg("B", INTEGERS, "one per image")
_MOST_LOG_SCALE = math.log(100.0)
_POSITION_BIAS = 16.0


@dataclass(frozen=True)
class SwinOutput:
    """Logits, feature maps and routing statistics of one forward pass; a pytree."""

    logits_BC: Tensor  # (B, C) class logits, in the compute dtype
    # (B, H, W, D) map of each stage, before patch merging; D doubles and H, W halve from stage to stage
    maps: tuple[Tensor, ...]
    stats: tuple[RoutingStats, ...]  # one RoutingStats per MoE block, in block order; empty for a dense model

    @property
    def features(self) -> tuple[Tensor, ...]:
        """The maps as (B, D, H, W), for detectors."""
        return tuple(x_BHWD.permute(0, 3, 1, 2) for x_BHWD in self.maps)


torch.utils._pytree.register_dataclass(SwinOutput, field_names=["logits_BC", "maps", "stats"], drop_field_names=[])


class WindowAttention(ConstantBuffers):
    """Attention inside windows, with a bias that a small MLP computes from log-spaced offsets.

    V2: cos(q, k) exp(min(s, ln 100)) + 16 sigmoid(MLP(offset)), s per head; q and v have biases (arXiv 2111.09883, 3.2
    and 3.3). Released: q k / sqrt(head size) + MLP(offset); q, k and v have biases.

    Args:
        stage: index of the stage, from 0.
        shift: the map is rolled by -shift before it is cut into windows; 0: not at all.
    """

    coordinates_P2: Tensor
    index_NN: Tensor
    mask_WNN: Tensor | None

    def __init__(self, config: SwinConfig, *, stage: int, shift: int, **place: Any) -> None:
        super().__init__()
        dim, self.num_heads = config.stage_dims[stage], config.num_heads[stage]
        self.side, self.window, self.shift = config.map_sides[stage], config.windows[stage], shift
        self.learned_window = config.learned_windows[stage]
        self.is_v2 = config.variant == "v2"
        self.qkv = Linear(dim, 3 * dim, bias=not self.is_v2, **place)
        self.out = Linear(dim, dim, bias=True, **place)
        if self.is_v2:
            self.q_bias, self.v_bias = (nn.Parameter(torch.empty(dim, **place)) for _ in range(2))
            self.log_scale = nn.Parameter(torch.empty(self.num_heads, **place))
        self.position_embedding = nn.Sequential(
            nn.Linear(2, POSITION_HIDDEN, **place),
            nn.ReLU(),
            nn.Linear(POSITION_HIDDEN, self.num_heads, bias=False, **place),
        )
        device = place.get("device")
        for name, table in self._tables().items():
            self.register_buffer(name, table.to(device), persistent=False)
        if not shift:
            self.mask_WNN = None

    def _tables(self) -> dict[str, Tensor]:
        """Constant buffers, computed from the sizes alone and not part of a checkpoint."""
        exact = accumulate_dtype(self.qkv.weight.dtype)
        tables = {
            "coordinates_P2": log_coordinates(self.window, self.learned_window).to(exact),
            "index_NN": relative_index(self.window),
        }
        if self.shift:
            tables["mask_WNN"] = region_mask(self.side, self.window, self.shift).to(exact)
        return tables

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Recompute the tables."""
        for name, table in self._tables().items():
            getattr(self, name).copy_(table)

    def position_bias(self) -> Tensor:
        """Position bias (H, N, N) of every query and key in a window, in FP32 or FP64."""
        bias_PH = self.position_embedding(self.coordinates_P2.to(self.qkv.weight.dtype))
        if self.is_v2:
            bias_PH = _POSITION_BIAS * torch.sigmoid(bias_PH)
        bias_HP = bias_PH.to(accumulate_dtype(bias_PH.dtype)).T
        # index_select, because its gradient sums in a deterministic order
        result: Tensor = bias_HP.index_select(1, self.index_NN.flatten()).unflatten(1, self.index_NN.shape)
        return result

    def forward(self, x_BHWD: Tensor) -> Tensor:
        """Attention output, (B, H, W, D) -> (B, H, W, D)."""
        if self.shift:
            x_BHWD = x_BHWD.roll((-self.shift, -self.shift), (1, 2))
        qkv = self.qkv(into_windows(x_BHWD, self.window))
        if self.is_v2:
            bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
            qkv = qkv + bias.to(qkv.dtype)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (M, H, N, d)
        if self.is_v2:
            scale_H11 = self.log_scale.clamp(max=_MOST_LOG_SCALE).exp()[:, None, None]
            exact = accumulate_dtype(q.dtype)
            q, k = (F.normalize(t.to(exact), dim=-1) for t in (q, k))
            logits_MHNN = (q @ k.transpose(-2, -1)) * scale_H11
        else:
            logits_MHNN = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        logits_MHNN = logits_MHNN + self.position_bias()
        if self.mask_WNN is not None:
            apart = self.mask_WNN[:, None]
            logits_MHNN = (logits_MHNN.unflatten(0, (-1, len(apart))) + apart).flatten(0, 1)
        y_MHNd = logits_MHNN.softmax(-1).to(v.dtype) @ v
        y_MND = self.out(y_MHNd.transpose(1, 2).flatten(2))
        y_BHWD = from_windows(y_MND, self.side, self.window)
        return y_BHWD.roll((self.shift, self.shift), (1, 2)) if self.shift else y_BHWD


class SwinBlock(FeedForward):
    """Block of a stage: window attention, then a dense or MoE MLP.

    V2: x + norm(attention(x)), then x + norm(MLP(x)). Released: x + attention(norm(x)), then x + MLP(norm(x)).

    Args:
        block: index of the block in the stage, from 0; odd blocks shift their windows if the map has more than one.
    """

    def __init__(
        self,
        config: SwinConfig,  # the model
        *,
        stage: int,  # index of the stage, from 0
        block: int,
        index: int,  # index of the block in the model
        num_experts: int,  # experts of this block; 0: a dense MLP
        **place: Any,
    ) -> None:
        super().__init__()
        dim, window = config.stage_dims[stage], config.windows[stage]
        shift = window // 2 if block % 2 and config.map_sides[stage] > window else 0
        hidden_dim, self.is_v2 = round(config.mlp_ratio * dim), config.variant == "v2"
        self.attention_norm = nn.LayerNorm(dim, eps=config.norm_eps, **place)
        self.attention = WindowAttention(config, stage=stage, shift=shift, **place)
        self.ffn_norm = nn.LayerNorm(dim, eps=config.norm_eps, **place)
        self.make_feed_forward(
            config.moe.model_copy(update={"hidden_dim": hidden_dim, "bias": True}),
            num_experts,
            dim=dim,
            hidden_dim=hidden_dim,
            activation="gelu",
            layer_index=index,
            bias=True,
            **place,
        )
        if not self.is_v2:
            mlp: Any = self.ffn if self.moe is None else self.moe.experts
            mlp.b_out = None

    def forward(
        self, x_BHWD: Tensor, image_index_B: Tensor, factors_2B: Tensor | None
    ) -> tuple[Tensor, RoutingStats | None]:
        """Output (B, H, W, D), and the routing statistics of a MoE block.

        Args:
            x_BHWD: (B, H, W, D) map.
            image_index_B: (B,) int64 global image indices, which key noise.
            factors_2B: (2, B) factors of the attention and MLP branches for each image; None: 1.
        """
        of_attention, of_ffn = (None, None) if factors_2B is None else factors_2B
        y = self.attention_norm(self.attention(x_BHWD)) if self.is_v2 else self.attention(self.attention_norm(x_BHWD))
        x_BHWD = x_BHWD + scaled(y, of_attention)
        y = x_BHWD if self.is_v2 else self.ffn_norm(x_BHWD)
        per_image = y.shape[1] * y.shape[2]
        places = torch.arange(per_image, device=y.device)
        token_index_T = (image_index_B[:, None] * per_image + places).flatten()
        y_TD, stats = self.feed_forward(y.flatten(0, 2), token_index=token_index_T)
        y = y_TD.view(y.shape)
        y = self.ffn_norm(y) if self.is_v2 else y
        return x_BHWD + scaled(y, of_ffn), stats


class PatchMerging(nn.Module):
    """Patch merging of 2 x 2 neighbouring tokens into one of twice the width: V2 norm(W x), released W norm(x)."""

    def __init__(self, dim: int, *, is_v2: bool, eps: float, **place: Any) -> None:
        super().__init__()
        self.is_v2 = is_v2
        self.norm = nn.LayerNorm((2 if is_v2 else 4) * dim, eps=eps, **place)
        self.proj = Linear(4 * dim, 2 * dim, **place)

    def forward(self, x_BHWD: Tensor) -> Tensor:
        """Merged map, (B, H, W, D) -> (B, H / 2, W / 2, 2 D)."""
        corners = ((0, 0), (1, 0), (0, 1), (1, 1))
        x = torch.cat([x_BHWD[:, row::2, column::2] for row, column in corners], -1)
        result: Tensor = self.norm(self.proj(x)) if self.is_v2 else self.proj(self.norm(x))
        return result


class Swin(nn.Module):
    """A Swin Transformer that classifies images and returns the feature maps of all stages.

    Args:
        device: device of the parameters; "meta" allocates none (then `to_empty` and `init_weights`).

    Example:
        >>> import torch
        >>> from expertmesh_families.swin.config import SwinConfig
        >>> config = SwinConfig(image_size=32, patch_size=2, window_size=4, dim=8, depths=(2, 2), num_heads=(1, 2),
        ...                     moe_stages=(2,), moe={"num_experts": (4,), "top_k": 1}, num_classes=5)
        >>> output = Swin(config, seed=0)(torch.rand(3, 3, 32, 32))
        >>> output.logits_BC.shape, [tuple(map.shape) for map in output.features], len(output.stats)
        (torch.Size([3, 5]), [(3, 8, 16, 16), (3, 16, 8, 8)], 1)
    """

    @names_large_sizes
    def __init__(
        self,
        config: SwinConfig,  # the model
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,  # dtype of the parameters; None: torch's default
        seed: int | None = None,  # seed of the initial weights; None: a fresh one from torch's default generator
    ) -> None:
        check_model_arguments(config, SwinConfig, dtype)
        super().__init__()
        self.config = config
        place: dict[str, Any] = {"device": "meta", "dtype": dtype}
        norm: dict[str, Any] = {"eps": config.norm_eps, **place}
        pixels = config.num_channels * config.patch_size**2
        self.patches = Linear(pixels, config.dim, bias=True, **place)
        self.patch_norm = nn.LayerNorm(config.dim, **norm)
        self.stages: Any = nn.ModuleList()  # a ModuleList of blocks for each stage
        self.merges = nn.ModuleList()
        experts, index = config.experts_per_block(), 0
        for stage, depth in enumerate(config.depths):
            blocks = nn.ModuleList()
            for block in range(depth):
                count = experts[stage][block]
                blocks.append(SwinBlock(config, stage=stage, block=block, index=index, num_experts=count, **place))
                index += 1
            self.stages.append(blocks)
            if stage + 1 < len(config.depths):
                is_v2 = config.variant == "v2"
                self.merges.append(PatchMerging(config.stage_dims[stage], is_v2=is_v2, **norm))
        step = config.drop_path / max(index - 1, 1)
        self.drop_path = DropPath([step * (branch // 2) for branch in range(2 * index)])
        self.final_norm = nn.LayerNorm(config.stage_dims[-1], **norm)
        self.head = Linear(config.stage_dims[-1], config.num_classes, bias=True, **place)
        draw_weights(self, device=device, seed=seed)

    def blocks(self) -> Iterator[SwinBlock]:
        """All blocks, in model order."""
        for stage in self.stages:
            yield from stage

    def moe_blocks(self) -> Iterator[tuple[str, MoELayer]]:
        """Names and layers of the MoE blocks, in model order, such as "stage 3 block 2", counted from 1."""
        for stage, blocks in enumerate(self.stages, 1):
            for number, block in enumerate(blocks, 1):
                if block.moe is not None:
                    yield f"stage {stage} block {number}", block.moe

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of the input images."""
        return self.config.num_channels, self.config.image_size, self.config.image_size

    @property
    def num_experts(self) -> Mapping[str, int]:
        """Experts of each MoE block, by its name."""
        return {name: layer.num_experts for name, layer in self.moe_blocks()}

    def scores(self, images_BCHW: Tensor) -> ImageScores:
        """Class logits, and first-choice expert of every patch in each MoE block; see
        `expertmesh.models.classifier.Classifier`."""
        output: SwinOutput = self(images_BCHW.to(self.head.weight.device))
        experts = {}
        for (name, _), stats in zip(self.moe_blocks(), output.stats, strict=True):
            ids_T = stats.topk_expert_ids_TK[:, 0]
            side = math.isqrt(len(ids_T) // len(images_BCHW))
            experts[name] = ids_T.view(-1, side, side)
        return ImageScores(output.logits_BC, experts)

    @property
    def spec(self) -> ModelSpec:
        """Specification of its parameters; see `expertmesh.spec.model_spec`."""
        return swin_spec(self.config)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Initialise every parameter: matrices N(0, init_std^2), norms 1 (0 after V2's branches), biases 0, scales ln
        10.

        The numbers depend on the seed and the parameter's name only, not on the device or the number of ranks.

        Args:
            seed: seed of the weights; None: a fresh one from torch's default generator.
        """
        seed, std = draw_seed() if seed is None else seed, self.config.init_std
        for block in self.blocks():
            block.attention.fill_constants()
        init_by_spec(self, self.spec, seed=seed, std=std)

    def forward(self, images_BCHW: Tensor, *, image_index_B: Tensor | None = None) -> SwinOutput:
        """Classify images.

        Args:
            images_BCHW: (B, channels, image_size, image_size), normalised, any floating dtype.
            image_index_B: (B,) int64 global image indices that key noise and stochastic depth; None: 0, 1, 2, ...
        """
        C, H, W = self.size
        check_tensor("images_BCHW", images_BCHW, _IMAGES, {"C": C, "H": H, "W": W})
        check_home("images_BCHW", images_BCHW, self.patches, self.patches.weight)
        if image_index_B is not None:
            sizes, device = {"B": len(images_BCHW)}, images_BCHW.device
            check_tensor("image_index_B", image_index_B, _INDEX, sizes, device=device)
        size, side = self.config.patch_size, self.config.map_sides[0]
        x = images_BCHW.to(self.patches.weight.dtype).unflatten(3, (side, size))
        x = x.unflatten(2, (side, size)).permute(0, 2, 4, 1, 3, 5)
        x_BHWD = self.patch_norm(self.patches(x.flatten(3)))
        if image_index_B is None:
            image_index_B = torch.arange(len(x_BHWD), device=x_BHWD.device)
        factors = self.drop_path(image_index_B)
        maps, all_stats, index = [], [], 0
        for stage, blocks in enumerate(self.stages):
            for block in blocks:
                own = None if factors is None else factors[2 * index : 2 * index + 2]
                x_BHWD, stats = block(x_BHWD, image_index_B, own)
                index += 1
                all_stats += [] if stats is None else [stats]
            maps.append(x_BHWD)
            if stage < len(self.merges):
                x_BHWD = self.merges[stage](x_BHWD)
        mean_BD = self.final_norm(x_BHWD).mean((1, 2))
        return SwinOutput(self.head(mean_BD), tuple(maps), tuple(all_stats))
