"""`expertmesh plan`: predict cost, memory and time of a model on a cluster. Never imports torch."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.parse import parsed
from expertmesh.config.counted import Amount, Length
from expertmesh.config.fields import Each, InputFile, NewFile, Operation, Spelling, Word
from expertmesh.errors import ConfigError

_OF_GENERATION = frozenset(
    (
        *("batch", "context", "prompt", "answer", "token_ms", "weights", "cache", "graphs"),
        *("expert_slots", "num_redundant_experts"),
    )
)
"""Options of --serve."""
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
      expertmesh plan gpt-oss-120b --cluster h100x1 --serve --token-ms 30 --prompt 1k --answer 1k
    """

    model: Annotated[str, Spelling("MODEL"), Word]
    """recipe, run, Hugging Face config.json or model folder, or name of a published model"""
    cluster: Annotated[str, Spelling("NAME")]
    """cluster as DEVICExNUMBER, for example h100x64, or a TOML file"""
    set_: Annotated[tuple[str, ...], Each, Spelling("OPTION=VALUE")] = ()
    """option of a recipe with another value, for example model.moe.num_experts=64"""
    goal: Literal["throughput", "memory", "latency"] | None = None
    """quantity to optimize: throughput, memory per device, or latency of a step (default: throughput)"""
    tokens_per_batch: Annotated[Length | None, Spelling("NUMBER")] = None
    """batch size in tokens per optimizer step, also as 4M (4,194,304) (default: the recipe's)"""
    max_context: Annotated[Length | None, Spelling("NUMBER")] = None
    """training sequence length in tokens, also as 8k (8,192) (default: the recipe's)"""
    tokens: Annotated[Amount | None, Spelling("NUMBER")] = None
    """number of training tokens, also as 2B (2e9) or 1T (default: the recipe's)"""
    imbalance: float | None = None
    """load imbalance: maximum / mean number of tokens per rank (default: 1.15)"""
    states: Annotated[str | None, Spelling("KIND")] = None
    """format of optimizer states: ours (FP32), bf16_moments, int8_moments, fp16_scaled_moments, torchao_int8_moments or
    torchao_int4_moments; or the states of fsdp2, megatron, deepspeed or fairseq (default: the recipe's, or ours)"""
    pp: int | None = None
    """number of pipeline stages, to model published runs; train has no pipeline (default: 1)"""
    vpp: int | None = None
    """number of virtual stages per pipeline stage (default: 1)"""
    tp: int | None = None
    """tensor-parallel degree (default: searched)"""
    ep: int | None = None
    """number of ranks per all-to-all group, which is --parallel.route-degree of train (default: searched)"""
    zero: int | None = None
    """ZeRO stage: 1, 2 or 3 (default: searched)"""
    micro_batch: int | None = None
    """micro-batch size in sequences of a data-parallel rank (default: searched)"""
    precision: Literal["bfloat16", "float16", "float32", "float8"] | None = None
    """precision of matrix products; float8 models published runs, train does not have it (default: the recipe's)"""
    stack: Literal["2021", "eager", "graphs", "fused", "whole_graph"] | None = None
    """software stack: frameworks of 2021, eager kernels as in train, partial CUDA graphs (graphs), fused operators
    (fused), or one CUDA graph per step (whole_graph) (default: eager)"""
    finetune: Literal["lora", "full"] | None = None
    """plan fine-tuning of a model folder: all weights (full), or low-rank adapters on frozen weights (lora)"""
    rank: int | None = None
    """rank of the adapters (default: as in training)"""
    expert_rank: int | None = None
    """rank of the adapters of routed experts (default: as in training)"""
    targets: Annotated[tuple[str, ...] | None, Spelling("NAME")] = None
    """matrices with adapters: attention, dense, shared, experts, head (default: as in training)"""
    base: str | None = None
    """storage of the frozen weights: float32, bfloat16, int8, int4, nf4, fp8 or mxfp4 (default: as in training)"""
    filled: float | None = None
    """fraction of tokens that are not padding; 1 with packing (default: 1)"""
    page: NewFile | None = None
    """HTML report: Pareto front, time and memory breakdown, scaling"""
    measured: InputFile | None = None
    """TOML file with your own measurements, to which the cost model is also fitted"""
    json_: bool = False
    """result as JSON"""
    serve: bool = False
    """plan inference instead of training: time per token, price, memory"""
    batch: int | None = None
    """total number of concurrent sequences; --serve needs this or --token-ms"""
    context: Annotated[Length | None, Spelling("NUMBER")] = None
    """sequence length in tokens (default: prompt + answer)"""
    prompt: Annotated[Length | None, Spelling("NUMBER")] = None
    """prompt length in tokens, needed for time to first token and requests per second"""
    answer: Annotated[Length | None, Spelling("NUMBER")] = None
    """answer length in tokens (default: the rest of the context)"""
    token_ms: float | None = None
    """maximum time per output token in milliseconds; the batch size with the highest throughput within it is chosen"""
    weights: Annotated[str | None, Spelling("FORMATS")] = None
    """weight formats: float32, bfloat16, fp8, int8, int4, mxfp4 or nvfp4, also by part
    (experts=mxfp4,attention=fp8,dense=fp8,embedding=bfloat16) (default: as in the files)"""
    cache: Literal["bfloat16", "fp8", "float32"] | None = None
    """key-value cache format (default: bfloat16)"""
    graphs: bool = False
    """plan decoding with CUDA graphs, as serve does on one GPU, with their memory, instead of eager kernels"""
    expert_slots: int | None = None
    """number of experts per layer kept on each device; others are loaded from host memory or disk on demand (default:
    all)"""
    num_redundant_experts: int | None = None
    """number of redundant expert copies per layer (EPLB), for example if devices do not divide the experts evenly
    (default: 0)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_dump(exclude={"model", "cluster", "serve", "json_", "set_"}, exclude_none=True)
        given = {name: value for name, value in given.items() if value is not False}
        for name in given:
            is_of_generation = name in _OF_GENERATION
            rule = "is an option of inference" if is_of_generation else "is an option of training"
            fix = "add --serve, or leave it out" if is_of_generation else "leave it out, or leave --serve out"
            self.require(is_of_generation == self.serve, name, rule, fix)
        return self


def run(argv: list[str]) -> int:
    """Run the verb; returns 0."""
    for word, program in _MOVED.items():
        if word in argv:
            raise ConfigError(f"{word}: is no option of this verb; run {program} in a clone")
    options = parsed(PlanVerb, argv)
    return _serve(options) if options.serve else _plan(options)


def _model(options: PlanVerb) -> Any:
    """The model that is asked for, with changed options where it is a recipe."""
    from expertmesh.planner.planned_model import changed_recipe

    changes = {}
    for word in options.set_:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError("set", word, "must be an option and its value", "write OPTION=VALUE")
        try:
            changes[name.strip().replace("-", "_")] = json.loads(text)
        except ValueError:
            changes[name.strip().replace("-", "_")] = text
    return changed_recipe(options.model, changes) if changes else options.model


def _plan(options: PlanVerb) -> int:
    from expertmesh.planner.plan import plan
    from expertmesh.planner.plan_json import as_json

    left_out = {"model", "cluster", "serve", "page", "json_", "graphs", "set_"}
    given = options.model_dump(exclude=left_out, exclude_none=True)
    found = plan(_model(options), cluster=options.cluster, **given)
    page = None
    if options.page is not None:
        from expertmesh.planner.plan_page import write_page

        page = write_page(found, options.page)
    if options.json_:
        print(json.dumps(as_json(found), indent=2))
        return 0
    for line in found.text().split("\n"):
        print(fitted(line) if line.lstrip().startswith("torchrun ") else line)
    if page is not None:
        print(f"\npage: {page}")
    return 0


def _serve(options: PlanVerb) -> int:
    from expertmesh.planner.serve import serve_plan
    from expertmesh.planner.serve_table import serve_json, serve_text

    given = options.model_dump(include=set(_OF_GENERATION - {"graphs"}), exclude_none=True)
    found = serve_plan(_model(options), cluster=options.cluster, fused=options.graphs, **given)
    print(json.dumps(serve_json(found), indent=2) if options.json_ else serve_text(found))
    return 0
