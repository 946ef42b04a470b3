"""The page of `benchmarks.finetune_peers`."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from benchmarks.finetune_peers import work
from benchmarks.markdown import markdown_table

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TOKENS = {"sft": work.ROWS * work.LENGTH, "dpo": work.ROWS * work.LENGTH}
TOKENS["grpo"] = work.PROMPTS * work.GROUP * (work.PROMPT + work.ANSWER)
HEAD = """# Fine-tuning beside TRL and peft

**Question.** What do a step of SFT, DPO and GRPO with adapters take here, and in TRL with peft, for the same work?

**Protocol.** {layers} layers of Qwen3-30B-A3B's sizes (hidden 2,048, experts of 768, 32 heads, 4 of keys, head 128) with
{experts} experts instead of 128, {top_k} chosen, {vocab} tokens of vocabulary, random weights in BF16. Adapters of rank {rank}
on attention and on every expert; routers rest; no recomputation of activations, no balance loss. A step has 1,024 tokens: SFT 4
rows of 256; DPO 2 pairs, the reference scored before the first step on both sides; GRPO 4 prompts of 48 tokens with 4 answers of
at most 16, generation included. Each system is a process with one thread, run as its users do (`expertmesh train`; TRL's trainer,
generation by transformers), one step each in turn; CPU time of the process, median of {rounds}. Peak memory is that of a
step, without mapped files and libraries, less the base's weights. Versions: {versions}.

    make finetune-peers

"""  # noqa: E501


def write_page(found: dict[str, Any], model: Path) -> None:
    """Write the table and its numbers."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    rows = []
    for objective in work.OBJECTIVES:
        systems = found[objective]
        fastest = min(one["cpu_s"] for name, one in systems.items() if name.startswith("TRL"))
        smallest = min(one["peak_bytes"] for name, one in systems.items() if name.startswith("TRL"))
        for name, one in systems.items():
            rows.append(
                {
                    "objective": objective,
                    "system": name,
                    "CPU s per step": one["cpu_s"],
                    "tokens per CPU s": TOKENS[objective] / one["cpu_s"],
                    "beside the fastest of TRL": f"{fastest / one['cpu_s']:.2f}x",
                    "peak above the weights, MB": (one["peak_bytes"] - weights) / 1e6,
                    "beside the smallest of TRL": f"{(one['peak_bytes'] - weights) / (smallest - weights):.2f}x",
                }
            )
    packages = ("torch", "transformers", "trl", "peft")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    head = HEAD.format(
        layers=work.LAYERS,
        experts=work.EXPERTS,
        top_k=work.TOP_K,
        vocab=work.VOCAB,
        rank=work.RANK,
        rounds=" or ".join(str(n) for n in sorted({len(one["expertmesh"]["all_cpu_s"]) - 1 for one in found.values()})),
        versions=versions,
    )
    (RESULTS / "finetune_peers.md").write_text(f"{head}{markdown_table(rows)}\n")
    (RESULTS / "finetune_peers.json").write_text(json.dumps(found, indent=1) + "\n")
