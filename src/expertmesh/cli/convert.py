"""`expertmesh convert --from DIR --to DIR`: convert a hub folder to a run, or a run to a hub folder."""

from typing import Annotated, Literal

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.parse import parsed
from expertmesh.config.fields import Folder, Operation, Spelling


class ConvertVerb(Operation):
    """Converts a Hugging Face model (Mixtral, Qwen3-MoE, Qwen2-MoE, OLMoE, GLM-4-MoE, Dots1, gpt-oss, DeepSeek-V2 or
    V3) into a run, or a run into such a model for transformers, vLLM and SGLang. The direction follows from the source.

    examples:
      hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B
      expertmesh convert --from models/Qwen3-30B-A3B --to runs/qwen3
      expertmesh generate runs/qwen3 "Once upon a time"
      expertmesh convert --from runs/gpt-moe-demo --to models/demo   # for transformers and vLLM
      expertmesh convert --from runs/tuned --to adapters/tuned --adapter-only   # for peft

    for one file with ExpertMesh's own names: expertmesh export
    """

    source: Annotated[str, Spelling("DIR", also=("from",), stands_for=("from",), is_word=True)]
    """folder of a Hugging Face model, run or checkpoint to convert"""
    to: Annotated[Folder, Spelling(stands_for=("target",))]
    """folder to create"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights (default: unchanged)"""
    adapter_only: bool = False
    """write a run's adapters as a peft folder, instead of merging them into the model"""
    expert_layout: Literal["fused", "per-expert"] = "fused"
    """layout of expert adapters, with --adapter-only: one tensor for all experts as in peft (fused), or one per expert
    for vLLM (per-expert)"""
    check: bool = True
    """for a run with adapters: check that the converted model has the same logits"""


def run(argv: list[str]) -> int:
    """Convert, print a summary, and return 0."""
    options = parsed(ConvertVerb, argv)
    import torch

    from expertmesh.integrations.hub import convert

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with ended_by_exit():
        made = convert(
            options.source,
            options.to,
            dtype=dtype,
            adapter_only=options.adapter_only,
            expert_layout=options.expert_layout,
            check=options.check,
        )
    print(f"{made.path}: {made.what}")
    return 0
