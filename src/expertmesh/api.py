"""What `import expertmesh as em` offers beside classes: train, load, generate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer
from torch import nn

from expertmesh.comm.world import World
from expertmesh.config.base import expanded, shown
from expertmesh.config.run import RunConfig
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.texts import continue_prompts, prompt_ids
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import CausalLM
from expertmesh.models.family import Family
from expertmesh.models.own_module import Module, own_family
from expertmesh.models.registry import changed, find_family
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import LoadedModel, device_of, find_model, open_model
from expertmesh.runs.run_dir import TOKENIZER
from expertmesh.text.format import text_format
from expertmesh.training import loop
from expertmesh.training.init_from import check_saved, files_beside, save_as_run
from expertmesh.training.trackers import Tracker


def train(
    what: RunConfig | Module,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    validation: Any = None,
    loss: Callable[..., Any] | None = None,
    metric: str = "loss",
    family: Family | None = None,
    trackers: Sequence[Tracker] = (),
    quiet: bool = False,
) -> loop.TrainResult:
    """Train, or go on training: a run of a recipe, or a module of your own on samples of your own.

    Both have progress, precision, clipping, metrics, checkpoints and exact resumption (`train={"resume": "auto"}`), and spread
    over ranks where torchrun starts the script. SIGTERM and Ctrl-C save and return. On a CPU the number of threads is measured, at
    most `torch.get_num_threads()`, unless OMP_NUM_THREADS or `parallel.num_threads` says it; how threads wait cannot be changed any
    more: beside other programs start Python with OMP_WAIT_POLICY=PASSIVE, as the command line does for itself.

    Args:
        what: a configuration, as `recipe` returns it; or a module, its class, or a function that makes it. A module is
            trained in place; on several ranks give the class, so that all begin with the weights of the run's seed.
        config: of a module's run: its `train`, `optim` and `parallel` sections count. Options by their dotted names will do:
            `{"train.steps": 200, "optim.lr": 1e-2}`.
        data: of a module: tensors whose first axis is the sample, alone or in a tuple; a map-style dataset; or an
            `expertmesh.models.task.Data`.
        validation: the same of the samples that evaluations use; None: every twentieth of `data`, not trained on.
        loss: of a module: loss(model, *batch), a scalar mean over the batch's samples. After it may come the `RoutingStats`
            of every `MoELayer` in their order, whose losses are added for you, and a dictionary of other means, which
            evaluations show.
        metric: the name among these that evaluations are judged by.
        family: of a configuration that is of no family of this package.
        trackers: objects with `write(values, experts)`, called after every step beside the run's own files; see
            `expertmesh.training.trackers.Tracker`.
        quiet: say nothing while it runs.

    Returns:
        How it ended: `step`, `evaluation`, `checkpoint`, `run_dir` and more.

    Raises:
        ConfigError: a value breaks a rule, or the run that is already there is another one.
        CheckpointError: all checkpoints to resume from are damaged.
        TrainingDivergedError: too many steps in a row were not finite.

    Example:
        >>> config = em.recipe("gpt-moe-test", {"data.path": "corpus.txt", "train.run_dir": "runs/text"})
        >>> result = em.train(config, quiet=True)
        >>> result.step
        20

        >>> import torch
        >>> x = torch.randn(200, 8)
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> steps = {"train.steps": 5, "train.run_dir": "runs/linear"}
        >>> em.train(torch.nn.Linear(8, 8), steps, data=(x, x.flip(1)), loss=loss, quiet=True).step
        5
    """
    console = Console(quiet=True) if quiet else None
    if isinstance(what, RunConfig):
        given = {"config": config, "data": data, "validation": validation, "loss": loss}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name}: belongs to a module; a configuration says all of it, leave {name} out"
                )
        family = find_family(what.family) if family is None else family
        return loop.train(
            what, recipe=family.name, family=family, console=console, trackers=trackers
        )
    if not isinstance(what, nn.Module) and not callable(what):
        raise ConfigError(
            f"train({type(what).__name__}): needs a configuration, as recipe() returns it, or a module; give one"
        )
    if config is None or data is None or loss is None:
        raise ConfigError(
            'train(module): needs options, data and a loss: train(module, {"train.run_dir": ...}, data=..., loss=...)'
        )
    if not isinstance(config, RunConfig):
        config = changed(RunConfig(), config)
    own = own_family(what, data=data, validation=validation, loss=loss, metric=metric)
    name = type(what).__name__ if isinstance(what, nn.Module) else _name_of(what)
    return loop.train(config, recipe=name, family=own, console=console, trackers=trackers)


def _name_of(function: Any) -> str:
    """Of what makes a module, `functools.partial` and callable objects among it."""
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))


def load(
    run: str | Path,
    *,
    module: Module | None = None,
    family: Family | None = None,
    device: str | None = None,
    spread: bool = False,
    es_degree: int | None = None,
) -> LoadedModel:
    """A trained model and its tokenizer: of a run its newest good checkpoint, or a model as the hub has it.

    Args:
        run: the run directory, or a folder as transformers saves one, of an architecture that `expertmesh convert` reads.
        module: of a run of a module of your own: the module (which gets the weights), its class, or what makes it.
        family: of a run of a family of your own.
        device: auto, cpu, cuda or cuda:N; None: that of the training.
        spread: over the ranks of torch.distributed, whose process group is there already: all call, each gets a part of every
            layer's experts and all of the rest, and all ask for the same then (`generate(...)`). For models that do not fit one
            GPU, and for low latency; see `expertmesh.parallel.inference.spread_for_inference`.
        es_degree: slices of each expert that is spread, see there.

    Returns:
        Model and tokenizer, which `model, tokenizer = em.load(run)` takes apart, with what else belongs to them. The weights have the
        type of the files: FP32 of a run that was trained here (FP64 with float64), often BF16 of a model of the hub.

    Raises:
        ConfigError: this is no such folder, or one of another family.
        CheckpointError: it has no usable checkpoint, or a file is missing.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> ids = tokenizer.encode("To be").ids
    """
    if es_degree is not None and not spread:
        raise ConfigError(f"es_degree={es_degree}: has no effect without spread=True; leave it out")
    found = find_model(run, own_family(module) if module is not None else family)
    ranks = Ranks(World(device_type=device_of(found, device).type)) if spread else None
    return open_model(found, device=device, ranks=ranks, es_degree=es_degree)


def save(model: Any, tokenizer: Tokenizer, folder: str | Path, *, like: str | Path) -> Path:
    """Write a language model as a run of no steps, which `load`, every verb and `train.init_from` take.

    For a model that was changed since it was loaded: tokens were added, adapters merged, experts taken away.

    Args:
        model: a GPT or an encoder-decoder, whole, without adapters.
        tokenizer: of the model.
        folder: where to; it must not exist.
        like: the run, or hub folder, that it came from: the rest of its configuration and the files beside its tokenizer go along.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder exists, the model is spread or has adapters, has no room for the tokenizer, or is of another kind than
            that of `like`.
        CheckpointError: a file of `like` is missing or damaged.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> em.add_tokens(model, tokenizer, ["<plan>"])
        1
        >>> path = em.save(model, tokenizer, "runs/more", like="runs/text")
    """
    found = find_model(like)
    check_saved(model, tokenizer, found.config)
    values = found.config.model_dump()
    values |= {"model": model.config.model_dump()}
    values["train"] |= {"run_dir": str(expanded(folder)), "init_from": None}
    config = type(found.config).model_validate(values)
    with TemporaryDirectory() as place:
        own = Path(place) / TOKENIZER
        tokenizer.save(str(own))
        files = {TOKENIZER: own, **files_beside(found.path, own)}
        return save_as_run(model, config, recipe="saved", files=files)


def generate(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str | Sequence[str],
    *,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: int = 32,
) -> str | list[str]:
    """Continue a text, or several.

    It computes in the type of the model's weights; under `torch.autocast` in that one. On a CPU it has the threads that torch has: on a busy
    machine, and for small models, `torch.set_num_threads(1)` is often fastest (`expertmesh generate` measures).

    Args:
        model: of `load`.
        tokenizer: of `load`.
        prompt: one text or several, none of them empty.
        max_tokens: most tokens to add to each; None: as many as the model has room for.
        temperature: below 1: more likely tokens; 0: always the most likely one.
        top_k: draw from the k most likely tokens; None: all.
        top_p: draw from the fewest tokens with this much of the probability; None: all.
        seed: of the draws.
        batch_size: texts that are continued together; each draws the same numbers whatever it is.

    Returns:
        The continuation without the prompt, or a list of them.

    Raises:
        ConfigError: a value breaks a rule, or a prompt is empty or too long.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> text = em.generate(model, tokenizer, "To be", max_tokens=5, temperature=0)
    """
    given = (("tokenizer", tokenizer, Tokenizer), ("model", model, CausalLM))
    for what, value, kind in given:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{what} is a {type(value).__name__}: generate() needs a model that writes text, and its tokenizer; give both of load()"
            )
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        raise ConfigError(f"prompt is a {type(prompt).__name__}; give a text, or a list of texts")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if wrong := [one for one in prompts if not isinstance(one, str)]:
        raise ConfigError(
            f"prompt: {shown(wrong[0])} is a {type(wrong[0]).__name__}; give a text, or a list of texts"
        )
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens
    )
    text = text_format(tokenizer, model=model)
    ids = [prompt_ids(text, one) for one in prompts]
    outputs = continue_prompts(model, ids, params, text=text, batch_size=batch_size)
    found = [output.text for output in outputs]
    return found[0] if isinstance(prompt, str) else found
