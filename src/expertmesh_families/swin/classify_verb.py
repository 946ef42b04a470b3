"""`expertmesh classify RUN IMAGE...`: classify images with the newest checkpoint of a run."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import model_validator

from expertmesh.cli.decoding import OnDevice, place_of, say_precision
from expertmesh.cli.parse import parsed
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.config.base import expanded
from expertmesh.config.fields import DataPlace, ModelFolder, NewFile, Positive, Spelling
from expertmesh.config.moe_rules import DropPolicy
from expertmesh.data.data_progress import notes_known
from expertmesh.errors import ConfigError
from expertmesh_families.swin.config import Fit

if TYPE_CHECKING:
    from expertmesh_families.swin.classify import Classified

_SHOWN = 3
_ROWS = 64
"""Approximate patches of an image in most layers, for which the number of threads is chosen."""


class ClassifyVerb(OnDevice):
    """Classifies images with the newest checkpoint of a run.

    examples:
      expertmesh classify runs/pets cat.png dog.jpg
      expertmesh classify runs/swin-mnist images-idx3-ubyte.gz@8001 --picture experts.png
      expertmesh classify runs/swin-mnist --score --capacity 0.5
    """

    run: ModelFolder
    """run directory"""
    image: Annotated[tuple[str, ...], Spelling("IMAGE", is_word=True, is_read=True)] = ()
    """image files; FILE@N is the N-th image of an IDX file, from 0"""
    fit: Annotated[Fit | None, Spelling(stands_for=("data.fit",))] = None
    """fitting of images of another size: pad with zeros, resize the central square, or exact, an error (default: as in
    training)"""
    top: Positive | None = None
    """number of classes to show (default: 3)"""
    picture: NewFile | None = None
    """PNG file to write: the experts chosen for each patch"""
    score: bool = False
    """print the accuracy on the run's validation images instead"""
    capacity: Annotated[float | None, Spelling(stands_for=("model.moe.eval_capacity_factor",))] = None
    """capacity factor of the experts (default: none, no limit)"""
    drop_policy: Annotated[DropPolicy | None, Spelling(stands_for=("model.moe.drop_policy",))] = None
    """tokens that an expert keeps over capacity (default: as in training)"""
    batch_size: Positive = 64
    """batch size in images"""
    data: DataPlace = DataPlace()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.image) == self.score:
            raise ConfigError("no image, or images and --score; give one of the two, for example a.png")
        without, fix = not self.score, "leave it out"
        self.require(
            without or self.picture is None,
            "picture",
            "shows images, and --score has none",
            "name some",
        )
        self.require(self.score or self.data.path is None, "data.path", "has no effect without --score", fix)
        for name in ("top", "fit"):
            is_idle = self.score and getattr(self, name) is not None
            self.require(not is_idle, name, "has no effect with --score", fix)
        return self


def run(argv: list[str]) -> int:
    """Print the likeliest classes of each image, or the accuracy on the validation images; returns 0."""
    options = parsed(ClassifyVerb, argv)
    picture = None if options.picture is None else expanded(options.picture)
    if picture is not None:
        from expertmesh_families.swin.expert_picture import check_pillow

        check_pillow(picture)
    found = _open(options)
    with told_of_data():
        if options.score:
            print(_score(found, options))
            return 0
        results = _classify(found, options)
    if picture is not None:
        from expertmesh_families.swin.expert_picture import save_picture

        save_picture(results, picture)
    width = max(len(result.name) for result in results)
    for result in results:
        print(f"{result.name:<{width}}  {_likeliest(result, options.top or _SHOWN)}")
    if picture is not None:
        print(f"picture: {picture}")
    return 0


def _open(options: ClassifyVerb) -> Any:
    """Run of the options, with their expert capacity and drop policy."""
    from expertmesh.runs.run_dir import find_model
    from expertmesh_families.swin.config import SwinRunConfig

    found = find_model(options.run)
    if not isinstance(found.config, SwinRunConfig):
        raise ConfigError(
            f"run {options.run}: is of family {found.family.name}, which classifies no images; name one of family swin"
        )
    changes: dict[str, Any] = {"model.moe.eval_capacity_factor": options.capacity}
    if options.drop_policy is not None:
        if options.capacity is None:
            raise ConfigError(f"--drop-policy {options.drop_policy}: nothing is dropped without --capacity; add it")
        changes["model.moe.drop_policy"] = options.drop_policy
    if not found.config.model.moe.num_experts:
        if options.capacity is not None:
            raise ConfigError(f"--capacity {options.capacity}: the model of {options.run} has no experts; leave it out")
        return found
    return replace(found, config=found.config.updated(changes))


def _classify(found: Any, options: ClassifyVerb) -> "list[Classified]":
    """Class probabilities of each image."""
    with loading():
        from expertmesh.runs.open import open_model
        from expertmesh.training.threads import threads_of_calls
        from expertmesh_families.swin.classify import classify, read_images
        from expertmesh_families.swin.images import CLASSES_FILE, class_names

        classes = class_names(found.path / CLASSES_FILE)
        opened = open_model(found, **place_of(options))
    model, precision = opened.model, opened.precision
    classifier = opened.task.builder.classifier(model)
    fit = options.fit or found.config.data.fit
    images = read_images(options.image, size=classifier.size, fit=fit)
    say_precision(precision)
    num_rows = _ROWS * min(len(images), options.batch_size)
    with threads_of_calls(model, precision, num_rows=num_rows), precision.autocast():
        return classify(classifier, images, options.image, classes=classes, batch_size=options.batch_size)


def _score(found: Any, options: ClassifyVerb) -> str:
    """Accuracy and loss on all validation images."""
    with loading():
        from expertmesh.runs.data_paths import with_data
        from expertmesh.runs.open import open_model
        from expertmesh.training.evaluate import evaluate, watched
        from expertmesh.training.threads import threads_of_calls

        opened = open_model(with_data(found, options.data.path), **place_of(options))
        task, model, precision = opened.task, opened.model, opened.precision
        with notes_known():
            data = task.prepare()
    say_precision(precision)
    with threads_of_calls(model, precision, num_rows=_ROWS * options.batch_size):
        result = evaluate(
            task,
            model,
            data,
            batch_size=options.batch_size,
            max_samples=None,
            precision=precision,
            watch=watched(data),
        )
    return f"accuracy {result['accuracy']:.4f}  loss {result['loss']:.4f}  ({data.description})"


def _likeliest(result: "Classified", count: int) -> str:
    order = sorted(range(len(result.classes)), key=lambda c: -result.probabilities[c])
    return "  ".join(f"{result.classes[c]} {result.probabilities[c]:.1%}" for c in order[:count])
