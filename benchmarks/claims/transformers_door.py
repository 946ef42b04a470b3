"""Speed of transformers' experts on ours against its own implementations, forward and backward, CPU time of one thread.

python -m benchmarks.claims.transformers_door [--tokens 4096] [--rounds 3] [--names qwen3_moe gpt_oss]
"""

import argparse
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from benchmarks.harness import Contender, circumstances, interleaved, write_report
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from expertmesh.integrations.transformers import register
from tests.oracle import numerics

CLASSES = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts}
E, K = 64, 8


def experts_of(name, dim, hidden, dtype):
    """Experts of one family with random weights."""
    config = SimpleNamespace(
        hidden_size=dim,
        intermediate_size=hidden,
        moe_intermediate_size=hidden,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        num_experts=E,
        num_local_experts=E,
        _experts_implementation="eager",
    )
    experts = CLASSES[name](config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=dim**-0.5)
    return experts.to(dtype)


def step(experts, implementation, x, ids, weights, dy):
    """Forward and backward; the output."""
    experts.config._experts_implementation = implementation
    y = experts(x, ids, weights)
    y.backward(dy)
    return y.detach()


def compare(name, dtype, options):
    """Medians of interleaved rounds, in seconds by implementation."""
    T, D, F = options.tokens, options.dim, options.hidden
    experts = experts_of(name, D, F, dtype)
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    weights = torch.rand(T, K).softmax(-1).to(dtype).requires_grad_()
    dy = torch.randn(T, D, dtype=dtype)
    names = ("expertmesh", "grouped_mm", "eager")

    def forget(_):
        for tensor in (x, weights, *experts.parameters()):
            tensor.grad = None

    runs = {n: partial(step, experts, n, x, ids, weights, dy) for n in names}
    results = {n: run() for n, run in runs.items()}
    rough = numerics.relative_error(results["expertmesh"], results["grouped_mm"])
    if rough > numerics.relative_error(results["eager"], results["grouped_mm"]) * 4 + 1e-5:
        raise SystemExit(f"{name} {dtype}: results differ by {rough:.1e}")
    contenders = [Contender(n, run, forget) for n, run in runs.items()]
    found = interleaved(contenders, rounds=options.rounds, warmup=0, clock="cpu")
    return {one.name: one.median_s for one in found}


def main():
    """Prints a line per family and type, and writes them to benchmarks/results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option, value in (("tokens", 4096), ("dim", 512), ("hidden", 256), ("rounds", 3)):
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--names", nargs="*", default=list(CLASSES))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="of the report, without suffix; none: not written")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    register()
    rows = []
    for name in options.names:
        for dtype in (getattr(torch, d) for d in options.dtypes):
            found = compare(name, dtype, options)
            best = min(found["grouped_mm"], found["eager"])
            times = ", ".join(f"{n} {t:.3f} s" for n, t in found.items())
            ratio = best / found["expertmesh"]
            print(f"{name:10} {str(dtype)[6:]:9} {ratio:.2f} x the faster ({times})", flush=True)
            seconds = {f"{n} s": t for n, t in found.items()}
            rows.append({"model": name, "dtype": str(dtype)[6:], **seconds, "x the faster": ratio})
    if options.out is not None:
        write_report(
            options.out,
            title=f"transformers' experts on ours, forward and backward (T={options.tokens}, E={E}, K={K}, "
            f"D={options.dim}, F={options.hidden})",
            command=f"python -m benchmarks.claims.transformers_door --tokens {options.tokens} --dim {options.dim} "
            f"--hidden {options.hidden} --rounds {options.rounds}",
            notes=["Medians of interleaved rounds. Results are compared before anything is timed."],
            around=circumstances(clock="cpu", peers={"transformers": transformers.__version__}),
            rows=rows,
        )


if __name__ == "__main__":
    main()
