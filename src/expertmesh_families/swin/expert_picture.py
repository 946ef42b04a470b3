"""Picture of the expert that each patch of an image was routed to."""

import colorsys
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.config.output_file import complete
from expertmesh.errors import ConfigError
from expertmesh_families.swin.classify import Classified

_SIDE = 160
_GAP = 8
_TEXT = 14
_TINT = 0.6


def save_picture(results: Sequence[Classified], path: str | Path) -> None:
    """Write a picture with a row per image: the image, then for each MoE block the image tinted by the expert of every
    patch.

    Args:
        path: file of the picture; its ending selects the format.
    """
    check_pillow(path)
    from PIL import Image, ImageDraw

    blocks = list(results[0].experts)
    if not blocks:
        raise ConfigError(f"--picture {path}: the model has no experts; leave it out")
    width = _GAP + (len(blocks) + 1) * (_SIDE + _GAP)
    height = _TEXT + _GAP + len(results) * (_SIDE + _TEXT + _GAP)
    canvas = Image.new("RGB", (width, height), (255, 255, 255))
    draw = ImageDraw.Draw(canvas)
    for column, text in enumerate(["image", *blocks]):
        draw.text((_GAP + column * (_SIDE + _GAP), _GAP // 2), text, fill=(0, 0, 0))
    for row, result in enumerate(results):
        top = _TEXT + _GAP + row * (_SIDE + _TEXT + _GAP)
        best = result.probabilities.index(max(result.probabilities))
        draw.text((_GAP, top), f"{Path(result.name).name}: {result.classes[best]}", fill=(0, 0, 0))
        shown = _enlarged((result.pixels_CHW + 1) / 2)
        tiles = [shown]
        for name in blocks:
            # white: patches without an expert, which router=expert_choice may leave
            of_expert = torch.cat((expert_colours(result.num_experts[name]), torch.ones(1, 3)))
            colours = of_expert[result.experts[name]]
            tint = _enlarged(colours.permute(2, 0, 1))
            tiles.append(shown * (1 - _TINT) + tint * _TINT)
        for column, tile in enumerate(tiles):
            pixels = (tile.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
            place = (_GAP + column * (_SIDE + _GAP), top + _TEXT)
            canvas.paste(Image.fromarray(pixels.contiguous().numpy()), place)
    try:
        with complete(Path(path)) as partial:
            canvas.save(partial)
    except (ValueError, KeyError) as error:  # a format that Pillow reads only
        raise ConfigError(f"--picture {path}: {error}; use a name that ends in .png") from None


def check_pillow(path: str | Path) -> None:
    """Check that a picture can be written in the format of its ending."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(f"--picture {path}: needs Pillow; install it with: pip install pillow")
    from PIL import Image

    if Path(path).suffix.lower() not in Image.registered_extensions():
        raise ConfigError(f"--picture {path}: its ending is that of no picture; use a name that ends in .png")


def expert_colours(num_experts: int) -> Tensor:
    """Distinct colours of experts, (E, 3) FP32 in [0, 1]."""
    return torch.tensor(
        [colorsys.hsv_to_rgb(e / num_experts, 1.0, 1.0 if e % 2 == 0 else 0.65) for e in range(num_experts)]
    )


def _enlarged(image_CHW: Tensor) -> Tensor:
    """Image enlarged to (3, side, side) by nearest neighbours."""
    places = torch.arange(_SIDE) * image_CHW.shape[1] // _SIDE
    return image_CHW[:, places][:, :, places].expand(3, -1, -1)
