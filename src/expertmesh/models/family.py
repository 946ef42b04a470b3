"""Model families, the half without torch: options, recipes, costs and words of each.

The half with torch is an `expertmesh.models.task.Task`, which a family names by a function that imports it, or, where the family
is of your own, as a class or by "module:name".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError

Recipes = Mapping[str, Callable[[], RunConfig]]


@dataclass(frozen=True)
class Metric:
    """The one number by which evaluations of a family are judged.

    Attributes:
        key: its name in `Task.evaluation` and, after "eval_", in metrics.jsonl.
        text: the name for people.
        short: the same for the head of a column.
        higher_is_better: whether more of it is better.
    """

    key: str = "loss"
    text: str = "loss"
    short: str = "loss"
    higher_is_better: bool = False


@dataclass(frozen=True)
class Family:
    """What the command line, a run directory and a report need to know of a model family before torch is imported.

    Attributes:
        name: kept with every run; a run goes on with the family of that name only.
        task: a class of `expertmesh.models.task.Task`, or "module:name" of one.
        config: class of its configurations.
        recipes: functions by name that return configurations, or "module:name" of such a mapping; None: one, "default", with
            the defaults of `config`.
        costs: a function of (configuration, number of ranks, compute dtype) that returns `expertmesh.costs.run_costs.RunCosts`,
            or "module:name" of one; None: unknown.
        products: a function of (configuration, parts of a batch's rows) that returns the step's dominant
            `expertmesh.costs.matrix_products.Product`s, or "module:name" of one; None: usual ones. What train.dtype=auto measures.
        items: what losses are means over, and rates count, in the plural.
        metric: the metric of the evaluations.
        fixed: options besides the model's and train.seed that a run must go on with, by dotted name.
        free: options of the model that it need not, because they change the speed only.
        generates_text: whether its tasks have a `decoder`, and its runs a tokenizer.json.
        files: names of the files in a run directory without which its models cannot be used.
        begin: a function of (configuration, that of the run which it begins with) that returns the configuration with all that
            this run's weights fix, or "module:name" of one; None: no run begins with another one's weights.
    """

    name: str
    task: str | Callable[[Any], Any]
    config: type[RunConfig] = RunConfig
    recipes: str | Recipes | None = None
    costs: str | Callable[..., Any] | None = None
    products: str | Callable[..., Any] | None = None
    items: str = "samples"
    metric: Metric = Metric()
    fixed: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    generates_text: bool = False
    files: tuple[str, ...] = ()
    begin: str | Callable[[Any, Any], RunConfig] | None = None

    def open_task(self, config: RunConfig) -> Any:
        """The half with torch, for one run.

        Raises:
            ConfigError: the configuration is of another family.
        """
        if not isinstance(config, self.config):
            raise ConfigError(
                "family",
                self.name,
                f"needs a {self.config.__name__}, got a {type(config).__name__}",
                f"use the family of that configuration, or a {self.config.__name__}",
            )
        return _resolved(self.task)(config)

    def find_recipes(self) -> Recipes:
        """Functions by name that return configurations."""
        found: Recipes | None = _resolved(self.recipes)
        return {"default": self.config} if found is None else found

    def costs_of(self, config: RunConfig, *, num_ranks: int, dtype: str) -> Any:
        """What a run would cost, an `expertmesh.costs.run_costs.RunCosts`; None where the family cannot tell."""
        count = _resolved(self.costs)
        return None if count is None else count(config, num_ranks=num_ranks, dtype=dtype)

    def begun_with(self, config: RunConfig, other: RunConfig, *, where: str) -> RunConfig:
        """The configuration of a run that begins with the weights of another one.

        Args:
            config: of the run.
            other: of the one that it begins with.
            where: that one is, for messages.

        Raises:
            ConfigError: it is of another family, or this one has no such thing.
        """
        begin = _resolved(self.begin)
        if begin is None:
            raise ConfigError(
                "train.init_from",
                where,
                f"runs of family {self.name} begin with no other's weights",
                "leave it out",
            )
        if not isinstance(other, self.config):
            raise ConfigError(
                "train.init_from",
                where,
                f"is of family {other.family} and this run of {self.name}",
                "begin with one of the same",
            )
        found: RunConfig = begin(config, other)
        return found

    def products_of(self, config: RunConfig, *, num_parts: int = 1) -> Any:
        """The products that dominate a step, a sequence of `expertmesh.costs.matrix_products.Product`; empty where the family names none."""
        find = _resolved(self.products)
        return () if find is None else find(config, num_parts=num_parts)


def _resolved(part: Any) -> Any:
    """What a "module:name" stands for; anything else is itself."""
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return getattr(import_module(module), name)
