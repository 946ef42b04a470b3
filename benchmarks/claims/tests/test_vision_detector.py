"""The detector's benchmark: scenes, boxes, average precision by hand, and all of it in miniature."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.pictures import stripes, write_folder

from benchmarks.claims import detection, vision_detector
from expertmesh_families.swin.config import SwinConfig
from expertmesh_families.swin.model import Swin
from tests.oracle.numerics import assert_close_fp64

TINY = {
    "model.dim": 8,
    "model.patch_size": 4,
    "model.num_heads": (1, 1, 2, 2),
    "train.batch_size": 8,
    "train.eval_batches": 1,
}


@pytest.fixture(scope="module")
def scenes():
    images, labels = stripes(24)
    return detection.compose(images, labels, count=6, side=32, most=2, seed=1)


def answers_of(*rows):
    """Of rows (box, label, score)."""
    boxes, labels, scores = zip(*rows, strict=True)
    return detection.Answers(
        np.array(boxes, dtype=np.float32), np.array(labels), np.array(scores, dtype=np.float32)
    )


def scenes_with(*boxes_and_labels):
    """Scenes without pixels, of rows (boxes, labels)."""
    boxes, labels = zip(*boxes_and_labels, strict=True)
    return detection.Scenes(
        torch.zeros(len(boxes), 1, 8, 8), torch.tensor(boxes).float(), torch.tensor(labels)
    )


def test_things_are_where_the_boxes_say(scenes):
    assert scenes.images_SCHW.shape == (6, 1, 32, 32) and (scenes.labels_SM[:, 0] >= 0).all()
    for image, boxes, labels in zip(*scenes, strict=True):
        outside = torch.ones(32, 32, dtype=torch.bool)
        for (x, y, right, bottom), label in zip(boxes.long().tolist(), labels, strict=True):
            if label < 0:
                continue
            assert 0 <= x < right <= 32 and 0 <= y < bottom <= 32
            outside[y:bottom, x:right] = False
            # every side of a box touches ink, which is brighter than any noise
            ink = image[0, y:bottom, x:right] > 60 / 127.5 - 1
            assert ink[0].any() and ink[-1].any() and ink[:, 0].any() and ink[:, -1].any()
        assert (image[0][outside] <= 60 / 127.5 - 1).all()
    images, labels = stripes(24)
    more = detection.compose(images, labels, count=9, side=32, most=2, seed=1)
    assert torch.equal(more.images_SCHW[:6], scenes.images_SCHW)
    assert torch.equal(more.boxes_SM4[:6], scenes.boxes_SM4)


class Knowing(torch.nn.Module):
    """Says of every place what is there; its boxes may be beside the things."""

    stride = 4

    def __init__(self, scenes, *, beside=0.0):
        super().__init__()
        places = [(x + 2.0, y + 2.0) for y in range(0, 32, 4) for x in range(0, 32, 4)]
        logits = torch.full((len(scenes.labels_SM), len(places), 4), -12.0)
        sides = torch.full((len(scenes.labels_SM), len(places), 4), 4.0)
        for scene, (boxes, labels) in enumerate(zip(*scenes[1:], strict=True)):
            # a place in several boxes belongs to the smallest
            largest_first = (boxes[:, 2:] - boxes[:, :2]).prod(1).argsort(descending=True)
            for thing in largest_first.tolist():
                (x0, y0, x1, y1), label = boxes[thing].tolist(), int(labels[thing])
                for place, (x, y) in enumerate(places):
                    own = torch.tensor((x - x0, y - y0, x1 - x, y1 - y))
                    middle = abs(x - (x0 + x1) / 2) < 6 and abs(y - (y0 + y1) / 2) < 6
                    if label >= 0 and own.min() > 0 and middle:
                        logits[scene, place] = -12.0
                        logits[scene, place, label] = 12.0
                        sides[scene, place] = own + beside
        self.found = detection.Found(logits, sides, torch.tensor(places), ())

    def forward(self, images_BCHW):
        return self.found


def test_who_says_what_is_there_has_no_loss_and_finds_everything(scenes):
    knowing, vague = (Knowing(scenes, beside=b) for b in (0.0, 9.0))
    right, beside = (detection.detection_loss(m, *scenes)[0] for m in (knowing, vague))
    assert 100 * right < beside
    found = [detection.detect(m, scenes.images_SCHW) for m in (knowing, vague)]
    areas = [
        detection.average_precision(detection.matched(one, scenes, num_classes=4)) for one in found
    ]
    assert (areas[0] == 1.0).all()
    assert not areas[1].any()  # no box of that size overlaps its thing by a half
    assert sum(len(one.labels_N) for one in found[0]) == int((scenes.labels_SM >= 0).sum())


def test_the_gain_of_boxes():
    """Half of a box: 1/2. Boxes of the same size, half of each common: 1/3. Hull larger than the union: less."""
    a = torch.tensor(((2.0, 2, 2, 2), (2, 2, 2, 2), (1, 1, 3, 3)))
    b = torch.tensor(((2.0, 2, 0, 2), (0, 2, 4, 2), (3, 3, 1, 1)))
    # common 4, union 28, hull 36
    wanted = torch.tensor((1 / 2, 1 / 3, 4 / 28 - 8 / 36), dtype=torch.float64)
    found = detection.generalised_overlap(a.double(), b.double())
    assert_close_fp64(found, wanted, what="generalised IoU")


def test_a_thing_is_found_once_and_by_its_class():
    truth = scenes_with(([[0, 0, 10, 10], [20, 20, 30, 30]], [1, -1]))
    answers = answers_of(
        ((0, 0, 10, 9.2), 1, 0.6),  # overlaps by 0.92, second
        ((0, 0, 10, 10), 0, 0.9),  # another class
        ((0, 0, 10, 7.2), 1, 0.8),  # 0.72, first
        ((20, 20, 30, 30), 1, 0.5),  # nothing is there
    )
    hits = detection.matched([answers], truth, num_classes=2).hits_NT
    counts = hits.sum(1)
    # up to 0.7 the surer answer takes the thing; above that it is left for the other one
    assert counts.tolist() == [4, 0, 5, 0]
    assert hits[2, :5].all() and hits[0, 5:9].all()


def test_average_precision_by_hand():
    """Right, wrong, right, of three things: precision 1 up to a third, 2/3 up to two thirds, then 0; another class has one half."""
    hits = np.array((True, False, True, True, False))[:, None].repeat(10, 1)
    matches = detection.Matches(
        np.array((0, 0, 1, 1, 1)),
        np.array((0, 0, 0, 1, 1)),
        np.array((0.9, 0.8, 0.7, 0.6, 0.9)),
        hits,
        np.array(((1, 0, 0), (2, 1, 0))),
    )
    first = (1 + 2 / 3) / 3
    found = detection.average_precision(matches)
    assert_close_fp64(found, np.full(10, (first + 1 / 2) / 2), what="average precision")
    # the second scene alone: one of two things, at precision 1, and the other class
    alone = detection.average_precision(matches, np.array((0, 3)))
    assert_close_fp64(alone, np.full(10, (1 / 2 + 1 / 2) / 2), what="one scene")


def test_the_surest_of_boxes_that_overlap_stays():
    boxes = np.array(((0, 0, 10, 10), (0, 0, 10, 9), (0, 0, 10, 9), (0, 4, 10, 14), (30, 0, 40, 9)))
    kept = detection.surest(boxes.astype(np.float32), np.array((1, 1, 2, 1, 1)), overlap=0.5)
    assert kept == [0, 2, 3, 4]


def test_all_stages_learn(scenes):
    config = SwinConfig(
        image_size=32,
        patch_size=4,
        num_channels=1,
        dim=8,
        depths=(2, 2),
        num_heads=(1, 1),
        window_size=4,
        moe_stages=(2,),
        moe={"num_experts": (2,), "top_k": 1},
        num_classes=3,
    )
    model = detection.Detector(Swin(config, seed=0), num_classes=4, dim=8)
    for block in model.backbone.blocks():
        # V2's blocks begin as the identity
        torch.nn.init.ones_(block.ffn_norm.weight)
        torch.nn.init.ones_(block.attention_norm.weight)
    loss, stats = detection.detection_loss(model, *scenes)
    loss.backward()
    assert len(stats) == 1
    silent = {
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().any()
    }
    assert {name for name in silent if "position_embedding" not in name} == {
        "backbone.final_norm.weight",
        "backbone.final_norm.bias",
        "backbone.head.weight",
        "backbone.head.bias",
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("detector")
    write_folder(place / "animals", *stripes(24))
    for number, prefix in enumerate(("train-", "test-")):
        write_folder(place / "glyphs", *stripes(16, seed=2 + number), prefix=prefix)
    plan = vision_detector.Plan(
        place,
        place / "runs",
        body_steps=1,
        steps=1,
        scenes=(8, 8),
        side=32,
        training_animals=16,
        changes=TINY,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setattr(vision_detector, "RESAMPLES", 5)
        assert vision_detector.learn(plan, place / "found.json")
    return SimpleNamespace(plan=plan, results=place / "found.json")


def test_every_arm_is_measured_once(run, capsys):
    record = json.loads(run.results.read_text())
    assert set(record["arms"]) == {"tuned", "frozen", "dense"}
    assert set(record["claims"]) == {"frozen - tuned", "tuned - dense", "frozen - dense"}
    assert record["arms"]["tuned"]["learning"] > record["arms"]["frozen"]["learning"]
    capsys.readouterr()
    assert vision_detector.learn(run.plan, run.results)
    assert not capsys.readouterr().out, "trained again"


def test_frozen_experts_are_those_of_the_body(run):
    def experts(name):
        model = vision_detector.em.load(
            run.plan.runs / name, module=lambda: vision_detector.detector_on(run.plan, "moe")
        ).model
        layers = [layer for _, layer in model.backbone.moe_blocks()]
        assert len(layers) == 2
        return [p for layer in layers for p in layer.parameters()]

    begun = vision_detector.detector_on(run.plan, "moe").backbone
    body = [p for _, layer in begun.moe_blocks() for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(body, experts("frozen"), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(body, experts("tuned"), strict=True))


def test_matches_survive(run):
    found = json.loads(run.results.read_text())["arms"]["dense"]
    matches = vision_detector.unpacked(found["matches"])
    assert matches.truths_SC.shape == (8, 10)
    areas = 100 * vision_detector.average_precision(matches)
    assert found["AP"] == round(float(areas.mean()), 2)
    rows = len(matches.scenes_N)
    assert matches.hits_NT.shape == (rows, 10) and rows == found["matches"]["count"]


def test_the_page_has_the_tables(run, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# Vision\n\n{vision_detector.BEGIN}\nold\n{vision_detector.END}\n\nThe end.\n"
    )
    for _ in range(2):
        vision_detector.write_page(run.results, page)
    text = page.read_text()
    assert text.endswith("The end.\n") and "old" not in text and "frozen - tuned" in text
    assert text.count("| moe, frozen |") == 1
