"""Model families, the part without torch: options, recipes, costs and names.

The part with torch is an `expertmesh.models.task.Task`. A family gives it as a function that imports it, or, for a
family of your own, as a class or by "module:name".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from expertmesh.config.run import RunConfig
from expertmesh.config.values import type_of
from expertmesh.errors import ConfigError, text_of

Recipes = Mapping[str, Callable[[], RunConfig]]


@dataclass(frozen=True)
class Metric:
    """Metric by which evaluations of a family are compared.

    Attributes:
        key: name in `Task.evaluation` and, after "eval_", in metrics.jsonl.
        text: display name.
        short: short display name, for the head of a column.
        higher_is_better: whether larger values are better.
    """

    key: str = "loss"
    text: str = "loss"
    short: str = "loss"
    higher_is_better: bool = False


REWARD = Metric("reward", "reward", "reward", higher_is_better=True)
"""Metric of runs that learn from rewards."""


@dataclass(frozen=True)
class Family:
    """Description of a model family for the command line, run directories and reports, without importing torch.

    Attributes:
        name: name kept with every run; a run resumes only with the family of this name.
        task: a function or class that makes an `expertmesh.models.task.Task`, or "module:name" of one.
        config: class of its run configurations.
        recipes: functions by name that return configurations, or "module:name" of such a mapping; None: a single
            recipe, "default", with the defaults of `config`.
        costs: a function of (configuration, number of ranks, compute dtype, whether on GPUs) that returns
            `expertmesh.costs.run_costs.RunCosts`, or "module:name" of one; None: unknown.
        sizes: a function of a configuration that returns `expertmesh.costs.sizes.ModelSizes` and the tokens of a
            sequence, or "module:name" of one, for the planner; None: the planner does not know the family.
        products: a function of (configuration, parts of a batch's rows) that returns the step's dominant
            `expertmesh.costs.matrix_products.Product`s, or "module:name" of one; None: default ones. train.dtype=auto
            and the number of threads depend on their sizes.
        items: plural name of the items that losses are averaged over and rates count, such as "tokens".
        metric: the metric of the evaluations.
        fixed: options, by dotted name, that may not change when a run is resumed, besides the model's and train.seed.
        free: options of the model that may change when a run is resumed, because they affect speed only.
        generates_text: whether its tasks have a `decoder`, and its runs a tokenizer.json.
        files: names of the files in a run directory without which its models cannot be used.
        begin: a function of (configuration, configuration of the run in train.init_from) that returns the configuration
            with all options that the earlier run's weights fix, or "module:name" of one; None: train.init_from is not
            supported.
        finetune: a function of a model's folder that returns the configuration of its fine-tuning; None: there is none.
    """

    name: str
    task: str | Callable[[Any], Any]
    config: type[RunConfig] = RunConfig
    recipes: str | Recipes | None = None
    costs: str | Callable[..., Any] | None = None
    sizes: str | Callable[..., Any] | None = None
    products: str | Callable[..., Any] | None = None
    items: str = "samples"
    metric: Metric = Metric()
    fixed: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    generates_text: bool = False
    files: tuple[str, ...] = ()
    begin: str | Callable[[Any, Any], RunConfig] | None = None
    finetune: Callable[[str], RunConfig] | None = None

    def open_task(self, config: RunConfig) -> Any:
        """The `Task` of one run; imports torch.

        Raises:
            ConfigError: the configuration is of another family.
        """
        if not isinstance(config, self.config):
            raise ConfigError(
                "family",
                self.name,
                f"needs a {self.config.__name__}, got {type_of(config)}",
                f"use the family of that configuration, or a {self.config.__name__}",
            )
        return self._resolved(self.task)(config)

    def find_recipes(self) -> Recipes:
        """The recipes: functions by name that return configurations."""
        found: Recipes | None = self._resolved(self.recipes)
        return {"default": self.config} if found is None else found

    def costs_of(self, config: RunConfig, *, num_ranks: int, dtype: str, on_gpu: bool = False) -> Any:
        """Costs of a run, an `expertmesh.costs.run_costs.RunCosts`; None if the family does not know them."""
        count = self._resolved(self.costs)
        if count is None:
            return None
        return count(config, num_ranks=num_ranks, dtype=dtype, on_gpu=on_gpu)

    def sizes_of(self, config: RunConfig) -> Any:
        """(`expertmesh.costs.sizes.ModelSizes`, tokens of a sequence) of a run; None if the family does not know
        them."""
        count = self._resolved(self.sizes)
        return None if count is None else count(config)

    def begun_with(self, config: RunConfig, other: RunConfig, *, where: str) -> RunConfig:
        """The configuration of a run that starts with the weights of another run.

        Args:
            config: configuration of the run.
            other: configuration of the run in train.init_from.
            where: path of the run in train.init_from, for messages.

        Raises:
            ConfigError: the other run is of another family, or this family does not support train.init_from.
        """
        begin = self._resolved(self.begin)
        if begin is None:
            raise ConfigError(
                "train.init_from",
                where,
                f"family {self.name} does not support it",
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

    def metric_of(self, found: Mapping[str, float] | None) -> Metric:
        """The metric of evaluations with these names: the family's, or the reward of runs that are rewarded."""
        return self.metric if found is None or self.metric.key in found else REWARD

    def products_of(self, config: RunConfig, *, num_parts: int = 1) -> Any:
        """The matrix products that dominate a step, a sequence of `expertmesh.costs.matrix_products.Product`; empty if
        not known."""
        find = self._resolved(self.products)
        return () if find is None else find(config, num_parts=num_parts)

    def _resolved(self, part: Any) -> Any:
        """The object that a "module:name" refers to; any other value is returned unchanged."""
        if not isinstance(part, str):
            return part
        module, _, name = part.partition(":")
        try:
            return getattr(import_module(module), name)
        except Exception as error:  # whatever a module does while it is imported
            problem = f"importing {part!r} failed: {text_of(error)}"
            raise ConfigError("family", self.name, problem, "repair that module") from error
