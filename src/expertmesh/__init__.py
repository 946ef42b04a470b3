"""ExpertMesh: a mixture-of-experts system for PyTorch. `import expertmesh as em` is all that a script needs.

Training a language model on your own text, and sampling from it:

    import expertmesh as em

    config = em.recipe("gpt-moe-demo", {"data.path": "corpus.txt", "train.run_dir": "runs/mine"})
    em.train(config)
    model, tokenizer = em.load("runs/mine")
    print(em.generate(model, tokenizer, "Once upon a time", max_tokens=50))

MoELayer      the layer, for a model of your own
Routing       a choice of experts to replay; RoutingStats: statistics of a call of the layer;
              DispatchOptions: expert-parallel options of a call
GPT           a language model with such layers
functional    operators and losses of the layer
lora          low-rank adapters on experts
upcycle       replace all feed-forward blocks of a dense model by such layers; moeify: the named ones
recipe        a complete configuration by its name; RunConfig: one of your own
train         train a configuration, or a module of your own
load          a trained model and its tokenizer
generate      continue a text
Engine        inference engine for many requests; SamplingParams: sampling options; RequestOutput: an answer
token_logprobs  differentiable logprobs of given tokens, bitwise equal to the engine's
add_tokens    add tokens to a trained model and its tokenizer
save          write a changed model as a run
plan          memory, time and price of a model on a cluster
report        a page about one run or several
parallelize   shard a module of your own over ranks

Invalid input raises a ConfigError of one line: the value, the rule, the fix. Importing this package is cheap: torch is
imported when a name that needs it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertmesh import functional as functional
    from expertmesh import lora as lora
    from expertmesh.api import generate as generate
    from expertmesh.api import load as load
    from expertmesh.api import save as save
    from expertmesh.api import train as train
    from expertmesh.config.dispatch_options import DispatchOptions as DispatchOptions
    from expertmesh.config.run import RunConfig as RunConfig
    from expertmesh.config.sampling import SamplingParams as SamplingParams
    from expertmesh.engine.engine import Engine as Engine
    from expertmesh.engine.on_policy import token_logprobs as token_logprobs
    from expertmesh.engine.output import RequestOutput as RequestOutput
    from expertmesh.errors import CheckpointError as CheckpointError
    from expertmesh.errors import CollectiveError as CollectiveError
    from expertmesh.errors import ConfigError as ConfigError
    from expertmesh.errors import TrainingDivergedError as TrainingDivergedError
    from expertmesh.models.gpt.model import GPT as GPT
    from expertmesh.models.registry import recipe as recipe
    from expertmesh.models.upcycle import moeify as moeify
    from expertmesh.models.upcycle import upcycle as upcycle
    from expertmesh.models.vocabulary import add_tokens as add_tokens
    from expertmesh.moe.layer import MoELayer as MoELayer
    from expertmesh.moe.types import Routing as Routing
    from expertmesh.moe.types import RoutingStats as RoutingStats
    from expertmesh.parallel.apply import parallelize as parallelize
    from expertmesh.planner.plan import plan as plan
    from expertmesh.reporting.page import report as report

__version__ = "0.2.0"

# No submodule of the package has one of these names; `functional` and `lora` are submodules themselves.
_HOME = {
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "ConfigError": "errors",
    "DispatchOptions": "config.dispatch_options",
    "Engine": "engine.engine",
    "GPT": "models.gpt.model",
    "MoELayer": "moe.layer",
    "RequestOutput": "engine.output",
    "Routing": "moe.types",
    "RoutingStats": "moe.types",
    "RunConfig": "config.run",
    "SamplingParams": "config.sampling",
    "TrainingDivergedError": "errors",
    "add_tokens": "models.vocabulary",
    "generate": "api",
    "load": "api",
    "moeify": "models.upcycle",
    "parallelize": "parallel.apply",
    "plan": "planner.plan",
    "recipe": "models.registry",
    "report": "reporting.page",
    "save": "api",
    "token_logprobs": "engine.on_policy",
    "train": "api",
    "upcycle": "models.upcycle",
}

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DispatchOptions",
    "Engine",
    "GPT",
    "MoELayer",
    "RequestOutput",
    "Routing",
    "RoutingStats",
    "RunConfig",
    "SamplingParams",
    "TrainingDivergedError",
    "add_tokens",
    "functional",
    "generate",
    "load",
    "lora",
    "moeify",
    "parallelize",
    "plan",
    "recipe",
    "report",
    "save",
    "token_logprobs",
    "train",
    "upcycle",
]


def __getattr__(name: str) -> Any:
    if name in ("functional", "lora"):
        return import_module(f"expertmesh.{name}")
    if name in _HOME:
        return getattr(import_module(f"expertmesh.{_HOME[name]}"), name)
    raise AttributeError(f"module 'expertmesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
