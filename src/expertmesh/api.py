"""Functions of `import expertmesh as em`: train, load, save, generate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn

from expertmesh.comm.world import World
from expertmesh.config.base import expanded
from expertmesh.config.run import Dtype, RunConfig
from expertmesh.config.sampling import OF_OUTPUTS, TEXT_DEFAULTS, SamplingParams
from expertmesh.config.values import check_choice, check_type, shown, wrong_type
from expertmesh.engine.texts import continue_prompts, prompt_ids
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import CausalLM
from expertmesh.models.family import Family
from expertmesh.models.own_module import Module, own_family
from expertmesh.models.registry import changed, find_family
from expertmesh.parallel.ranks import Ranks
from expertmesh.reporting.training_samples import training_samples
from expertmesh.runs.open import LoadedModel, device_of, open_model
from expertmesh.runs.run_dir import TOKENIZER, find_model
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
    """Train, or resume training: a run of a recipe, or your own module on your own samples.

    Both have progress, precision, clipping, metrics, checkpoints and exact resumption (`train={"resume": "auto"}`), and
    are distributed over ranks if torchrun starts the script. SIGTERM and Ctrl-C save and return. On a CPU the number of
    threads is measured, at most `torch.get_num_threads()`, unless OMP_NUM_THREADS or `parallel.num_threads` sets it. If
    other programs share the CPU, start Python with OMP_WAIT_POLICY=PASSIVE, as the command line does; it cannot be set
    later.

    Args:
        what: a configuration, as `recipe` returns it; or a module, its class, or a function that creates it. A module
            is trained in place. On several ranks give the class, so that all ranks start with the weights of the run's
            seed.
        config: configuration of a module's run; the sections `train`, `optim` and `parallel` are used. May be options
            by dotted names: `{"train.steps": 200, "optim.lr": 1e-2}`.
        data: data for a module: a tensor or a tuple of tensors whose first axis is the sample; a map-style dataset; or
            an `expertmesh.models.task.Data`.
        validation: data of evaluations, in the same forms; None: every twentieth sample of `data`, which is then not
            trained on.
        loss: loss(model, *batch) of a module, a scalar mean over the batch's samples. It may also return the
            `RoutingStats` of every `MoELayer` in order, whose losses are added, and a dictionary of other means, which
            evaluations report.
        metric: name of the mean by which evaluations are compared.
        family: model family of a configuration, if it is not in this package.
        trackers: objects with `write(values, experts)`, called after every step beside the run's own files; see
            `expertmesh.training.trackers.Tracker`.
        quiet: print nothing.

    Returns:
        Result of the run: `step`, `evaluation`, `checkpoint`, `run_dir` and more.

    Raises:
        ConfigError: a value breaks a rule, or the existing run is a different one.
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
                raise ConfigError(f"{name}: belongs to a module; a configuration says all of it, leave {name} out")
        family = find_family(what.family) if family is None else family
        return loop.train(
            what,
            recipe=family.name,
            family=family,
            console=console,
            trackers=trackers,
            sampler=training_samples,
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
    """Name of a callable that creates a module, also of `functools.partial` and callable objects."""
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))


def load(
    run: str | Path,
    *,
    module: Module | None = None,
    family: Family | None = None,
    device: str | None = None,
    dtype: Dtype | None = None,
    spread: bool = False,
    es_degree: int | None = None,
) -> LoadedModel:
    """Load a trained model and its tokenizer, from the newest good checkpoint of a run or from a hub folder.

    Args:
        run: a run directory, or a folder saved by transformers with an architecture that `expertmesh convert` reads.
        module: for a run of your own module: the module (which gets the weights), its class, or a function that creates
            it.
        family: model family of the run, if it is not in this package.
        device: auto, cpu, cuda or cuda:N; None: the device of the training.
        dtype: "float32", "bfloat16", "float16" or "float64": type of weights and products; None: the type of
            the files.
        spread: shard the experts over the ranks of the existing torch.distributed group. Every rank must call; each
            gets a part of every layer's experts and all other weights, and all must then make the same calls
            (`generate(...)`). For models that do not fit one GPU, and for low latency; see
            `expertmesh.parallel.inference.spread_for_inference`.
        es_degree: slices of each expert with spread=True, see `spread_for_inference`.

    Returns:
        Model and tokenizer, for `model, tokenizer = em.load(run)`, with further attributes (`LoadedModel`). The model
        computes in the type of its weights: FP32 for a run (FP64 with float64), often BF16 for a hub model. Inside
        `with loaded.precision.autocast():` a run computes as it was trained.

    Raises:
        ConfigError: the path is not such a folder, or is of another family.
        CheckpointError: there is no usable checkpoint, or a file is missing.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> ids = tokenizer.encode("To be").ids
    """
    if es_degree is not None and not spread:
        raise ConfigError(f"es_degree={es_degree}: has no effect without spread=True; leave it out")
    if dtype is not None:
        check_choice("dtype", dtype, get_args(Dtype)[1:])
    found = find_model(run, own_family(module) if module is not None else family)
    ranks = Ranks(World(device_type=device_of(found, device).type)) if spread else None
    narrow = None if dtype is None else getattr(torch, dtype)
    return open_model(found, device=device, dtype=narrow, ranks=ranks, es_degree=es_degree)


def save(model: Any, tokenizer: Tokenizer, folder: str | Path, *, like: str | Path) -> Path:
    """Save a language model as a run of no steps, which `load`, all commands and `train.init_from` accept.

    For a model that was changed after loading: tokens added, adapters merged, experts removed.

    Args:
        model: a GPT or an encoder-decoder, whole, without adapters.
        tokenizer: tokenizer of the model.
        folder: run directory to create; it must not exist.
        like: run or hub folder that the model was loaded from; the rest of its configuration and the files beside its
            tokenizer are copied.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder exists; the model is sharded, has adapters or a vocabulary too small for the tokenizer;
            or its kind differs from `like`'s.
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
        files = {TOKENIZER: own, **files_beside(found.path, own), **found.kept_arithmetic}
        return save_as_run(model, config, recipe="saved", files=files)


def generate(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str | Sequence[str],
    *,
    batch_size: int = 32,
    **options: Any,
) -> str | list[str]:
    """Continue a text, or several.

    The compute dtype is the dtype of the model's weights, or `torch.autocast`'s. On a CPU torch's number of threads is
    used; on a busy machine, and for small models, `torch.set_num_threads(1)` is often fastest (`expertmesh generate`
    measures it).

    Args:
        model: model from `load`.
        tokenizer: tokenizer from `load`.
        prompt: a text or several, none of them empty.
        batch_size: texts that are continued together; it does not change their random numbers.
        options: of `SamplingParams`, such as max_tokens, top_p and stop, but not those that ask for more than a text;
            temperature is 0.8 and seed 0 if left out.

    Returns:
        The continuation without the prompt, or a list of them.

    Raises:
        ConfigError: a value breaks a rule, or a prompt is empty or too long.

    Example:
        >>> model, tokenizer = em.load("runs/text")
        >>> text = em.generate(model, tokenizer, "To be", max_tokens=5, temperature=0)
    """
    fix = "give both of load()"
    check_type("tokenizer", tokenizer, Tokenizer, "that of a model that writes text", fix)
    check_type("model", model, CausalLM, "a model that writes text", fix)
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        raise wrong_type("prompt", prompt, "a text, or a list of texts")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    for one in prompts:
        check_type(f"prompt: {shown(one)}", one, str, "a text", "give texts")
    for name in OF_OUTPUTS & options.keys():
        fix = "leave it out, or use em.Engine"
        raise ConfigError(name, options[name], "asks for more than the text of one answer", fix)
    params = SamplingParams(**TEXT_DEFAULTS | options)
    text = text_format(tokenizer, model=model)
    ids = [prompt_ids(text, one) for one in prompts]
    outputs = continue_prompts(model, ids, params, text=text, batch_size=batch_size)
    found = [output.text for output in outputs]
    return found[0] if isinstance(prompt, str) else found
