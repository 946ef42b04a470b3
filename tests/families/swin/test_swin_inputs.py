"""What a Swin is given and cannot take: one line each, before anything is computed."""

import functools
from pathlib import Path

import pytest
import torch
from tests.models.test_inputs import INT, META, assert_breaks_no_graph, assert_refused, making

from expertmesh.errors import ConfigError
from expertmesh.models.registry import recipe
from expertmesh_families.swin.config import SwinConfig
from expertmesh_families.swin.model import Swin


@functools.cache
def swin():
    config = SwinConfig(
        image_size=16, patch_size=2, window_size=4, dim=8, depths=(1, 2), num_heads=(1, 2), moe_stages=(2,),
        moe={"num_experts": (3,), "top_k": 1}, num_classes=5,
    )  # fmt: skip
    return Swin(config, seed=0).eval()


IMAGES = torch.ones(2, 3, 16, 16)
SWIN_CALLS = {
    "images of a list": ([1.0], {}, "images_BCHW is a list"),
    "one image": (
        IMAGES[0],
        {},
        r"images_BCHW has shape \(3, 16, 16\); it must be \(B, 3, 16, 16\), .*image\[None\]",
    ),
    "images of another size": (IMAGES[..., 1:], {}, r"images_BCHW has shape \(2, 3, 16, 15\)"),
    "images of bytes": (IMAGES.to(torch.uint8), {}, "images_BCHW has dtype torch.uint8"),
    "images elsewhere": (IMAGES.to(META), {}, "images_BCHW is on meta and the model on cpu"),
    "indices of others": (IMAGES, {"image_index_B": torch.arange(3)}, "image_index_B has shape"),
    "indices of floats": (IMAGES, {"image_index_B": torch.ones(2)}, "image_index_B has dtype"),
    "indices as a list": (IMAGES, {"image_index_B": [0, 1]}, "image_index_B is a list"),
}


@pytest.mark.parametrize("name", SWIN_CALLS)
def test_a_swin_refuses_in_one_line(name):
    images, more, match = SWIN_CALLS[name]
    with pytest.raises(ConfigError, match=match) as caught:
        swin()(images, **more)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


MADE = {
    "a Swin of a dict": (making(Swin, {}), "config is a dict; it must be a SwinConfig"),
    "a Swin of integers": (lambda: Swin(swin().config, dtype=INT), "dtype=torch.int64"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_made_is_refused_in_one_line(name):
    assert_refused(*MADE[name])


def test_one_path_stands_for_a_list_of_one():
    config = recipe("swin-mnist", {"data.path": Path("images")})
    assert config.data.path == ("images",)


def test_what_fits_is_taken():
    assert swin()(IMAGES, image_index_B=torch.arange(2)).logits_BC.shape == (2, 5)


# PyTorch's own compiler makes the object that PyTorch's own warning says nobody should make.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_checks_break_no_graph():
    assert_breaks_no_graph(swin(), (IMAGES,), {"image_index_B": torch.arange(2)})
