"""Images as the data of a run: what is read, in which order, how it is changed, and what is refused."""

import os

import numpy as np
import pytest
import torch
from tests.support.pictures import stripes, write_folder, write_idx

from expertmesh.errors import ConfigError
from expertmesh_families.swin.augment import mix_of
from expertmesh_families.swin.classify import Classified
from expertmesh_families.swin.config import ImagesConfig
from expertmesh_families.swin.expert_picture import save_picture
from expertmesh_families.swin.image_files import read_folder, read_image, read_image_or_idx
from expertmesh_families.swin.images import CLASSES_FILE, ImageData, class_names, fitted

Image = pytest.importorskip("PIL.Image")
CHANGES = {
    "flip": True, "rotate": 20.0, "shift": 0.1, "zoom": 0.2, "stretch": 0.25, "shear": 0.1, "colour": 0.3,
    "erase": 0.5, "mixup": 0.8, "cutmix": 1.0, "mix": 0.9,
}  # fmt: skip


def data_of(*paths, tmp, size=16, channels=1, classes=10, seed=0, **options):
    config = ImagesConfig(path=tuple(map(str, paths)), cache_dir=str(tmp / "cache"), **options)
    return ImageData(config, image_size=size, num_channels=channels, num_classes=classes, seed=seed)


@pytest.fixture
def idx(tmp_path):
    return write_folder(tmp_path / "idx", *stripes(40))


def write_class_folders(root, counts, *, mode="L"):
    images, _ = stripes(sum(counts.values()))
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(images[i]).convert(mode).save(root / name / f"{i}.png")
    return root


def test_idx_files_are_split_at_the_end(idx, tmp_path):
    images, labels = stripes(40)
    data = data_of(idx, tmp=tmp_path)
    assert data.classes == ("0", "1", "2", "3")
    (batch,) = data.validation(None, 100)
    assert torch.equal(batch[0][:, 0], torch.from_numpy(images[32:]).float() / 255 * 2 - 1)
    assert batch[1].tolist() == labels[32:].tolist()
    assert torch.equal(batch[3], torch.ones(8))
    few = data_of(idx, tmp=tmp_path, train_images=(10,))
    assert sum(len(b[1]) for b in few.validation(None, 7)) == 30
    assert few.key != data.key
    assert data.files["classes.json"].read_text() == '["0", "1", "2", "3"]\n'


def test_files_that_are_no_images_are_said_once_by_ending(tmp_path, caplog):
    root = write_class_folders(tmp_path / "images", {"a": 3, "b": 3})
    images, _ = stripes(1)
    Image.fromarray(images[0]).save(root / "a" / "4.jfif", format="JPEG")
    for name in ("a/x.heic", "b/y.HEIC", "b/notes", "b/.hidden"):
        (root / name).write_bytes(b"1")
    data_of(root, tmp=tmp_path)
    (said,) = [text for text in caplog.messages if "left out" in text]
    assert "2 files end in .heic (for example a/x.heic); 1 files have no ending" in said
    assert "images are read from .png, .jpg, .jpeg, .jfif" in said
    found = read_folder(root, num_train=None, validation_fraction=0.2)
    assert len(found.training.labels_N) + len(found.validation.labels_N) == 7


def test_a_split_of_its_own_is_used_and_classes_are_numbered_on(idx, tmp_path):
    other = tmp_path / "glyphs"
    write_folder(other, *stripes(12, classes=3), prefix="train-")
    write_folder(other, *stripes(6, classes=2, seed=1), prefix="t10k-")
    (other / "classes.txt").write_text("a\nb\nc\n")
    data = data_of(idx, other, tmp=tmp_path, train_images=(30, 0))
    assert data.classes == ("idx/0", "idx/1", "idx/2", "idx/3", "glyphs/a", "glyphs/b", "glyphs/c")
    (batch,) = data.validation(None, 100)
    assert batch[1].tolist()[-6:] == [4, 5, 4, 5, 4, 5] and len(batch[1]) == 10 + 6
    assert sorted(set(data.batch(0, 42)[1].tolist())) == list(range(7))


def test_folders_of_one_name_are_told_apart(idx, tmp_path):
    other = write_folder(tmp_path / "more" / "idx", *stripes(8, classes=2, seed=1))
    data = data_of(idx, other, tmp=tmp_path)
    assert data.classes == (*(f"idx/{i}" for i in range(4)), "idx (2)/0", "idx (2)/1")
    assert data.folder_of_class == (*["idx"] * 4, *["idx (2)"] * 2)


def test_a_patch_that_no_expert_took_is_no_mistake(tmp_path):
    """Experts that choose leave some patches to none, whose number is that behind the last."""
    ids = torch.tensor([[0, 2], [1, 1]])
    seen = []
    for experts in (ids, ids.clamp(max=1)):
        one = Classified("a.png", ("a",), (1.0,), torch.zeros(1, 4, 4), {"b": experts}, {"b": 2})
        save_picture([one], tmp_path / "seen.png")
        seen.append(read_image(tmp_path / "seen.png"))
    assert (seen[0] != seen[1]).any()


def test_a_folder_per_class(tmp_path):
    root = write_class_folders(tmp_path / "pets", {"cat": 6, "dog": 10}, mode="RGBA")
    data = data_of(root, tmp=tmp_path, channels=3)
    assert data.classes == ("cat", "dog")
    (batch,) = data.validation(None, 100)
    assert batch[1].tolist() == [0, 1, 1] and batch[0].shape == (3, 3, 16, 16)
    assert torch.equal(batch[0][:, 0], batch[0][:, 1]), "grey images have three equal channels"
    learned = data.batch(0, 13)
    seen = sorted(
        (int(label), image[0].tolist())
        for part in (batch, learned)
        for image, label in zip(part[0], part[1], strict=True)
    )
    files = [(c, p) for c, name in enumerate(data.classes) for p in (root / name).iterdir()]
    there = ((c, torch.from_numpy(read_image(p)[..., 0]).float() / 255 * 2 - 1) for c, p in files)
    assert seen == sorted((c, image.tolist()) for c, image in there), "an epoch has every image"
    split = tmp_path / "split"
    write_class_folders(split / "train", {"cat": 2, "dog": 2})
    write_class_folders(split / "test", {"cat": 3, "dog": 3})
    assert sum(len(b[1]) for b in data_of(split, tmp=tmp_path).validation(None, 4)) == 6
    (root / "cat" / "0.png").write_bytes((root / "dog" / "9.png").read_bytes() + b" ")
    assert data_of(root, tmp=tmp_path, channels=3).key != data.key


@pytest.mark.parametrize("changes", [{}, CHANGES, {"mixup": 0.5}, {"cutmix": 0.5, "mix": 0.5}], ids=str)
def test_a_sample_is_the_same_in_any_batch(changes, idx, tmp_path):
    data = data_of(idx, tmp=tmp_path, **changes)
    whole = data.batch(20, 30)
    assert all(torch.isfinite(part).all() for part in whole)
    for start, count in ((20, 1), (33, 17)):
        part = data.batch(start, count)
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[start - 20 : start - 20 + count])
    again = data_of(idx, tmp=tmp_path, **changes)
    assert again.key == data.key and torch.equal(again.batch(20, 30)[0], whole[0])
    other = data_of(idx, tmp=tmp_path, seed=1, **changes)
    assert not torch.equal(other.batch(20, 30)[0], whole[0])
    assert sorted(data.batch(0, 32)[1].tolist()) == sorted([0, 1, 2, 3] * 8), "an epoch"


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_changes_images(name, idx, tmp_path):
    if name == "mix":
        return
    plain, changed = data_of(idx, tmp=tmp_path), data_of(idx, tmp=tmp_path, **{name: CHANGES[name]})
    before, after = plain.batch(0, 32), changed.batch(0, 32)
    assert torch.equal(before[1], after[1])
    moved = (before[0] != after[0]).flatten(1).any(1)
    assert moved.sum() >= 8 and after[0].abs().max() <= 1
    for a, b in zip(plain.validation(None, 9), changed.validation(None, 9), strict=True):
        assert torch.equal(a[0], b[0]), "validation images stay as they are"
    if name == "flip":
        mirrored = before[0].flip(-1)
        assert all(
            torch.equal(a, b) or torch.equal(a, c)
            for a, b, c in zip(
                after[0].round(decimals=4), before[0].round(decimals=4), mirrored.round(decimals=4), strict=True
            )
        )


def test_mixed_classes_count_as_their_pixels_do(tmp_path):
    """Images of one shade per class: the mean shade says how much there is of each."""
    labels = np.arange(40, dtype=np.uint8) % 2
    images = np.broadcast_to(255 * labels[:, None, None], (40, 16, 16)).copy()
    folder = write_folder(tmp_path / "shades", images, labels)
    for options in ({"mixup": 0.8}, {"cutmix": 1.0}):
        data = data_of(folder, tmp=tmp_path, **options)
        pixels, own, other, weight = data.batch(0, 64)
        shade = (pixels.mean((1, 2, 3)) + 1) / 2
        expected = weight * own + (1 - weight) * other
        assert torch.equal(shade.round(decimals=4), expected.round(decimals=4))
        assert (own != other).any() and ((weight > 0) & (weight < 1)).any()


def test_weights_of_mixes_are_from_a_beta_distribution():
    config = ImagesConfig(mixup=0.5, cutmix=2.0, mix=0.5)
    mixes = [mix_of(i, config, seed=0) for i in range(3000)]
    assert abs(sum(m is None for m in mixes) - 1500) < 6 * 750**0.5
    for pasted, alpha in ((False, 0.5), (True, 2.0)):
        found = torch.tensor([m.weight for m in mixes if m is not None and (m.box is not None) == pasted])  # fmt: skip
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(len(found) - 750) < 6 * 562**0.5
        # six standard deviations; the spread of a sample's variance is below its mean
        assert abs(found.double().mean() - 0.5) < 6 * (variance / len(found)) ** 0.5
        assert abs(found.double().var() - variance) < 6 * variance / len(found) ** 0.5


def test_images_are_fitted():
    image = np.arange(12 * 20, dtype=np.uint8).reshape(12, 20)
    padded = fitted(image, size=(1, 24, 24), fit="pad")
    assert torch.equal(padded[0, 6:18, 2:22], torch.from_numpy(image))
    assert int(padded.sum()) == int(image.sum())
    square = np.full((12, 20, 3), 7, np.uint8)
    assert torch.equal(fitted(square, size=(3, 8, 8), fit="resize"), torch.full((3, 8, 8), 7).byte())
    assert torch.equal(fitted(square, size=(1, 12, 12), fit="resize"), torch.full((1, 12, 12), 7).byte())
    for fit, words in (("exact", "must be that"), ("pad", "must be at most that")):
        with pytest.raises(ConfigError, match=words):
            fitted(image, size=(1, 16, 16), fit=fit)


def test_neighbours_vote(idx, tmp_path):
    data = data_of(idx, tmp=tmp_path)
    found = data.neighbours(3, most_distances=1000)
    assert found.shape == (data.num_validation,) and found.all()
    assert data.neighbours(3, most_distances=100) is None


def damage(case, tmp_path):
    """A folder with something wrong."""
    images, labels = stripes(20)
    root = tmp_path / "x"
    if case == "nobody's":
        return "~nosuchuser/x"
    if case == "empty class":
        write_class_folders(root, {"cat": 3})
        (root / "dog").mkdir()
    elif case == "lonely":
        write_class_folders(root, {"cat": 1})
    elif case == "unknown class":
        write_class_folders(root / "train", {"cat": 3})
        write_class_folders(root / "val", {"cow": 3})
    elif case == "no validation":
        write_class_folders(root / "train", {"cat": 3})
    elif case == "no training":
        write_class_folders(root / "Testing", {"cat": 3, "dog": 3})
    elif case == "one class":
        write_class_folders(root / "pets", {"cat": 3, "dog": 3})
    elif case in ("corrupt", "cut", "deep"):
        write_class_folders(root, {"cat": 6, "dog": 2})
        file = root / "cat" / "2.png"
        if case == "deep":
            Image.fromarray(np.zeros((16, 16), np.uint16)).save(file)
        else:
            file.write_bytes(b"no image" if case == "corrupt" else file.read_bytes()[:100])
    elif case == "several":
        write_class_folders(root, {"cat": 8, "dog": 2})
        for i in range(1, 8):
            Image.fromarray(np.zeros((16, 16), np.uint16)).save(root / "cat" / f"{i}.png")
        (root / "cat" / "5.png").write_bytes(b"no image")
    elif case == "nothing":
        root.mkdir()
    elif case == "size":
        write_folder(root, np.zeros((20, 9, 16), np.uint8), labels)
    elif case == "few labels":
        write_folder(root, images, labels[:7])
    elif case == "no labels":
        write_folder(root, images, labels)
        (root / "labels-idx1-ubyte").unlink()
    elif case == "label":
        write_folder(root, images, np.where(np.arange(20) == 18, 9, labels).astype(np.uint8))
    elif case == "named label":
        write_folder(root, images, labels)
        (root / "classes.txt").write_text("a\nb\n")
    elif case in ("short", "not packed", "no idx"):
        write_folder(root, images, labels)
        file = root / "images-idx3-ubyte.gz"
        if case == "short":
            file.write_bytes(file.read_bytes()[:-50])
        elif case == "not packed":
            file.write_bytes(b"IDX")
        else:
            write_idx(file, labels)
    elif case == "half a split":
        write_folder(root, images, labels, prefix="train-")
    elif case == "many":
        write_folder(root, images, np.arange(20, dtype=np.uint8) % 16)
    return root


@pytest.mark.parametrize(
    "case, words",
    [
        ("missing", "is no folder"),
        ("nobody's", "~nosuchuser/x: there is no such user"),
        ("nothing", "has neither folders of images"),
        ("empty class", "dog: has no image"),
        ("lonely", "has 1 image, and one is needed on each side"),
        ("unknown class", "cow: is no class that there is to learn"),
        ("no validation", "no val/ or test/ beside it"),
        ("no training", "has Testing/ and no train/ beside it"),
        ("one class", "x: has images of one class, pets; .*name the folder that has one for each class"),
        ("corrupt", "2.png: is no image that can be read"),
        ("cut", "2.png: is no image that can be read"),
        ("deep", "has pixels of mode I;16"),
        ("several", r"7 of 10 images cannot be used: .*/cat/\d.png: .*? \| (.*/cat/\d.png: .*){4} \| and 2 more$"),
        ("size", "image 0: image of 9 x 16 pixels, model of 16 x 16: must be that"),
        ("few labels", "has 7 labels for 20 images"),
        ("no labels", "has no labels-idx1-ubyte.gz beside it"),
        ("label", "a label is 9 and the training images have 4 classes"),
        ("named label", "a label is 3 and .*classes.txt names 2 classes"),
        ("short", "is damaged"),
        ("not packed", "is damaged"),
        ("no idx", "is no IDX file of bytes in 3 dimensions"),
        ("half a split", "and not both of train-images-idx3-ubyte and test-images-idx3-ubyte"),
        ("many", "use model.num_classes=16"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(case, words, tmp_path):
    root = damage(case, tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        data_of(root, tmp=tmp_path, fit="exact")
    assert "\n" not in str(caught.value)


def test_what_is_a_split_and_what_a_class(tmp_path):
    vehicles = write_class_folders(tmp_path / "vehicles", {"train": 4, "bus": 4})
    assert data_of(vehicles, tmp=tmp_path).classes == ("bus", "train")
    split = tmp_path / "split"
    write_class_folders(split / "Train", {"cat": 2, "cow": 2, "dog": 2})
    write_class_folders(split / "TEST", {"cat": 1, "dog": 1})
    data = data_of(split, tmp=tmp_path)
    (batch,) = data.validation(None, 9)
    assert data.classes == ("cat", "cow", "dog") and batch[1].tolist() == [0, 2], "rare ones only learn"


def test_hidden_files_are_no_images(tmp_path):
    pets = write_class_folders(tmp_path / "pets", {"cat": 4, "dog": 4})
    key = data_of(pets, tmp=tmp_path).key
    (pets / "cat" / "._0.png").write_bytes(b"\0\5\x16\7")
    (pets / "dog" / ".ipynb_checkpoints").mkdir()
    (pets / "dog" / ".ipynb_checkpoints" / "0-checkpoint.png").write_bytes(b"an old copy")
    assert data_of(pets, tmp=tmp_path).key == key


def test_names_that_are_not_utf_8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    data = data_of(write_class_folders(tmp_path / "pets", {name: 4, "dog": 4}), tmp=tmp_path)
    assert data.classes == class_names(data.files[CLASSES_FILE]) == (name, "dog")


def test_single_images(idx, tmp_path):
    images, _ = stripes(40)
    assert np.array_equal(read_image_or_idx(f"{idx}/images-idx3-ubyte.gz@7"), images[7])
    for name, words in (
        (f"{idx}/images-idx3-ubyte.gz@40", "has 40 images"),
        (f"{idx}/no@4", "is not there"),
        (f"{idx}/no.png", "is not there"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_image_or_idx(name)
    picture = Image.new("P", (4, 4), 3)
    picture.putpalette([9] * 768)
    picture.save(tmp_path / "p.png")
    assert np.array_equal(read_image(tmp_path / "p.png"), np.full((4, 4, 3), 9))
    turned = Image.Exif()
    turned[0x0112] = 6  # its orientation: to be turned right by 90 degrees
    Image.fromarray(images[7]).save(tmp_path / "photo.png", exif=turned)
    assert np.array_equal(read_image(tmp_path / "photo.png"), np.rot90(images[7], -1))
    with pytest.raises(ConfigError, match="leave some on both sides"):
        read_folder(idx, num_train=40, validation_fraction=0.2)
    split = write_folder(tmp_path / "split", *stripes(12), prefix="train-")
    write_folder(split, *stripes(6), prefix="test-")
    for folder in (split, write_class_folders(tmp_path / "folders", {"cat": 3, "dog": 3})):
        with pytest.raises(ConfigError, match="train_images=2: is for IDX files without a split"):
            read_folder(folder, num_train=2, validation_fraction=0.2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"path": ("a", "a")}, "names something twice"),
        ({"path": ("a", "b", "c"), "train_images": (1, 2)}, "one per folder"),
        ({"mix": 0.5}, "has no effect without mixup or cutmix"),
    ],
)
def test_wrong_options_are_one_line(options, words):
    with pytest.raises(ConfigError, match=words):
        ImagesConfig(**options)
