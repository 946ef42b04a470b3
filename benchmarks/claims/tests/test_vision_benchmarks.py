"""The benchmarks of vision in miniature: what is trained once is not trained again, and what is compared is equal."""

import json

import numpy as np
import pytest
import torch
from tests.support.pictures import stripes, write_folder

from benchmarks.claims import vision_claims, vision_speed
from expertmesh_families.swin.recipes import swin_test

TINY = {
    "model.dim": 8,
    "model.patch_size": 8,
    "model.depths": (2,),
    "model.num_heads": (2,),
    "model.moe_stages": (1,),
    "train.batch_size": 8,
    "train.eval_batches": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("claims")
    for number, name in enumerate(("mnist10k", "animals")):
        write_folder(place / name, *stripes(24, seed=number))
    for number, prefix in enumerate(("train-", "test-")):
        write_folder(place / "glyphs", *stripes(16, seed=2 + number), prefix=prefix)
    return place


def plan_of(folder, **changes):
    steps = dict.fromkeys((*vision_claims.FOLDERS, "few"), 2)
    options = {"seeds": (0,), "steps": steps, "per_class": 2, "changes": TINY} | changes
    return vision_claims.Plan(folder, folder / "runs", **options)


@pytest.fixture(scope="module")
def results(folder):
    # the folders' first images to learn from are fewer than those of the real ones
    with pytest.MonkeyPatch.context() as patch:
        for found in vision_claims.FOLDERS.values():
            for name in found:
                patch.setitem(found, name, 16 if name != "glyphs" else 0)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(vision_claims, "RESAMPLES", 20)
        path = folder / "vision.json"
        assert vision_claims.learn(plan_of(folder), path)
        yield path


def test_every_claim_has_its_runs(folder, results):
    record = json.loads(results.read_text())
    names = {trial.name for trial in vision_claims.trials(plan_of(folder))}
    assert set(record["runs"]) == names and len(names) == 13
    assert len(record["claims"]) == 17
    assert {name: found["count"] for name, found in record["neighbours"].items()} == {
        data: record["runs"][f"{data}_moe_0"]["right"]["no limit"]["count"]
        for data in ("glyphs", "animals", "digits")
    }
    assert {found["neighbours"] for found in record["neighbours"].values()} <= {1, 5}
    for data, experts in (("union", 16), ("digits", 8)):
        assert len(record["runs"][f"{data}_moe_0"]["right"]) == 6
        config = vision_claims.load_run(folder / "runs" / f"{data}_moe_0").config
        assert config.model.moe.num_experts == (experts,)
    dense, mixture = (record["runs"][f"union_{kind}_0"] for kind in ("dense", "moe"))
    assert mixture["parameters"] > dense["parameters"] == dense["active_parameters"]
    few = vision_claims.load_run(folder / "runs" / "few_frozen_0").config
    assert few.train.freeze == ("experts", "router")
    assert few.train.init_from == str(folder / "runs" / "glyphs_moe_0")
    assert few.model.moe.num_experts == (16,)


def test_what_is_in_the_results_is_not_trained_again(folder, results):
    before = results.read_text()
    asked = []

    def broken_off(plan, trial):
        asked.append(trial.name)

    one, two = plan_of(folder), plan_of(folder, seeds=(0, 1))
    assert vision_claims.learn(one, results, train_one=broken_off)
    assert vision_claims.learn(two, results, only="none", train_one=broken_off)
    assert not asked
    assert not vision_claims.learn(two, results, train_one=broken_off)
    assert asked == ["glyphs_moe_1"]
    assert json.loads(results.read_text()) == json.loads(before)


def test_the_page_has_the_tables(results):
    page = results.with_suffix(".md")
    page.write_text(f"# Vision\n\n{vision_claims.BEGIN}\nold\n{vision_claims.END}\n\nThe end.\n")
    for _ in range(2):
        vision_claims.write_page(results)
    text = page.read_text()
    assert text.startswith("# Vision") and text.endswith("The end.\n") and "old" not in text
    assert text.count("| few, frozen |") == 1
    assert text.count("67 classes: mixture - dense twin") == 1
    assert text.count("| nearest neighbours |") == 1


def test_a_page_names_every_machine(results, tmp_path, capsys):
    record = json.loads(results.read_text())
    names = list(record["runs"])
    copy = tmp_path / "vision.json"
    copy.with_suffix(".md").write_text(f"{vision_claims.BEGIN}{vision_claims.END}")
    record["runs"][names[0]]["circumstances"]["cpu"] = "abacus"
    copy.write_text(json.dumps(record))
    assert vision_claims.main(tmp_path, out=copy, page=True) == 0
    assert f"{names[0]}: abacus;" in copy.with_suffix(".md").read_text()
    del record["runs"][names[0]]["circumstances"]
    copy.write_text(json.dumps(record))
    assert vision_claims.main(tmp_path, out=copy, page=True) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: run {names[0]}: has no circumstances") and said.count("\n") == 1


def test_runs_of_another_plan_are_refused(folder, results):
    steps = dict(plan_of(folder).steps, animals=3)
    for changes, words in (
        ({"steps": steps}, "steps 2, but"),
        ({"per_class": 3}, "per_class 2, but"),
    ):
        with pytest.raises(vision_claims.ConfigError, match=words):
            vision_claims.learn(plan_of(folder, **changes), results)


def test_neighbours_are_compared_image_by_image():
    """Who has the very same images right is never better, whichever images the bootstrap draws."""
    bits = vision_claims.packed(np.arange(40) % 3 == 0)
    runs = {"glyphs_moe_0": {"right": {"no limit": bits}}}
    (found,) = vision_claims.claims(runs, {"glyphs": bits}).values()
    assert found["interval"] == [0.0, 0.0]


def test_bits_survive():
    bits = np.random.default_rng(0).integers(0, 2, 77).astype(bool)
    assert np.array_equal(
        vision_claims.unpacked(json.loads(json.dumps(vision_claims.packed(bits)))), bits
    )


def test_an_interval_holds_a_difference_that_is_there():
    """The first is right in 60, the second in 50 of 100 kinds of images, the same with all seeds."""
    places = np.arange(4000)
    first, second = places % 100 < 60, places % 100 < 50
    found = vision_claims.difference([(first, second)] * 3)
    low, high = found["interval"]
    # a tenth of the images count 100: the standard error is 0.47 points
    assert found["points"] == 10.0 and 8.0 < low < 9.6 < 10.4 < high < 12.0
    assert found["seeds"] == 3
    none = vision_claims.difference([(first, first)])
    assert none["interval"] == [0.0, 0.0]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_einsum_dispatch_equals_ours_or_no_time_is_reported(tmp_path, monkeypatch, one_thread):
    monkeypatch.setitem(vision_speed.RECIPES, "swin-test", swin_test)
    vision_speed.main("swin-test", 4, 1, tmp_path, "speed")
    text = (tmp_path / "speed.md").read_text()
    assert text.count("einsum dispatch") >= 2 and "inference" in text
    config = swin_test().updated({"train.dtype": "float32", "train.device": "cpu"})
    other = config.updated({"train.seed": 1})
    with pytest.raises(AssertionError):
        vision_speed.check(
            vision_speed.Trainee(config, einsum=False),
            vision_speed.Trainee(other, einsum=True),
            vision_speed.batch_of(config),
        )
