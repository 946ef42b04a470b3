"""`expertmesh plan`: predict cost, memory and time of a model on a cluster. Never imports torch."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.parse import parsed
from expertmesh.config.fields import InputFile, NewFile, Operation, Spelling, Word
from expertmesh.errors import ConfigError

_MOVED = {
    "--validate": "python -m benchmarks.planner",
    "--claims": "python -m benchmarks.planner --claims",
}
"""Former options, and the programs that took their place."""


class PlanVerb(Operation):
    """Estimates memory, time and price of a model on a cluster, with error bars.

    examples:
      expertmesh plan gpt-1.3b-moe128 --cluster a100-80x128
      expertmesh plan models/Qwen3-30B-A3B --cluster h100x64 --tokens-per-batch 4194304 --tokens 1e12
      expertmesh plan deepseek-v3 --cluster mine.toml --goal memory
      expertmesh plan qwen3-30b --cluster h100x8 --serve --batch 64 --context 4096
    """

    model: Annotated[str, Spelling("MODEL"), Word]
    """recipe, run, Hugging Face config.json or model folder, or name of a published model"""
    cluster: Annotated[str, Spelling("NAME")]
    """cluster as DEVICExNUMBER, for example h100x64, or a TOML file"""
    goal: Literal["throughput", "memory", "latency"] | None = None
    """objective of the layout (default: throughput)"""
    tokens_per_batch: int | None = None
    """batch size in tokens per optimizer step (default: the recipe's)"""
    max_context: int | None = None
    """training sequence length in tokens (default: the recipe's)"""
    tokens: float | None = None
    """number of training tokens (default: the recipe's)"""
    imbalance: float | None = None
    """load imbalance: tokens of the fullest rank over the mean; 1: balanced (default: 1.15)"""
    states: Annotated[str | None, Spelling("KIND")] = None
    """optimizer states of train (ours, in float32; bf16_moments, int8_moments, fp16_scaled_moments, torchao_int8_moments, torchao_int4_moments) or of fsdp2, megatron, deepspeed or fairseq (default: the recipe's, or ours)"""
    pp: int | None = None
    """number of pipeline stages, to model published runs; train has no pipeline (default: 1)"""
    vpp: int | None = None
    """number of virtual stages per pipeline stage (default: 1)"""
    page: NewFile | None = None
    """HTML report: Pareto front, time and memory breakdown, scaling"""
    measured: InputFile | None = None
    """TOML file with your own measurements, to which the cost model is also fitted"""
    serve: bool = False
    """plan inference instead of training: time per token, price, memory"""
    batch: int | None = None
    """batch size in sequences on all devices; required with --serve"""
    context: int | None = None
    """sequence length in tokens; required with --serve"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_dump(exclude={"model", "cluster", "serve"}, exclude_none=True)
        of_generation = {"batch", "context"}
        if self.serve and (missing := sorted(of_generation - given.keys())):
            flag = f"--{missing[0]}"
            raise ConfigError(f"{flag}: must be given with --serve; for example {flag} 64")
        for name in given:
            is_of_generation = name in of_generation
            rule = "is an option of inference" if is_of_generation else "is an option of training"
            fix = (
                "add --serve, or leave it out"
                if is_of_generation
                else "leave it out, or leave --serve out"
            )
            self.require(is_of_generation == self.serve, name, rule, fix)
        return self


def run(argv: list[str]) -> int:
    """Run the verb; returns 0.

    Args:
        argv: words after `plan`.

    Raises:
        ConfigError: a word breaks a rule, or the model does not fit the cluster.
    """
    for word, program in _MOVED.items():
        if word in argv:
            raise ConfigError(f"{word}: is no option of this verb; run {program} in a clone")
    options = parsed(PlanVerb, argv)
    return _serve(options) if options.serve else _plan(options)


def _plan(options: PlanVerb) -> int:
    from expertmesh.planner.plan import plan

    given = options.model_dump(exclude={"model", "cluster", "serve", "page"}, exclude_none=True)
    found = plan(options.model, cluster=options.cluster, **given)
    page = None
    if options.page is not None:
        from expertmesh.planner.plan_page import write_page

        page = write_page(found, options.page)
    for line in found.text().split("\n"):
        print(fitted(line) if line.lstrip().startswith("torchrun ") else line)
    if page is not None:
        print(f"\npage: {page}")
    return 0


def _serve(options: PlanVerb) -> int:
    from expertmesh.planner.serve import serve_plan
    from expertmesh.planner.table import serve_text

    assert options.batch is not None and options.context is not None
    found = serve_plan(
        options.model, cluster=options.cluster, batch=options.batch, context=options.context
    )
    print(serve_text(found))
    return 0
