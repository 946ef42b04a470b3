"""A training step of peft's adapters on experts: through our door against peft over transformers' grouped_mm.

One layer, as the first one of a model (nothing before it learns) and as an inner one (its input has a gradient, too). CPU time
of one thread, medians of rounds in changing order; peak memory of a step beyond that of the same step without adapters, as PyTorch's
allocator counts it. Gradients are compared first.

python -m benchmarks.claims.lora_door [--tokens 1024] [--rounds 3] [--rank 16]
"""

import argparse
import copy
import itertools
from functools import partial

import peft
import torch
from benchmarks.harness import Contender, interleaved
from tests.support.memory import peak_bytes
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from expertmesh.integrations.transformers import apply
from tests.oracle import numerics

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def base_model(options, dtype):
    """One layer; its attention and vocabulary are small, so that the experts count."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=options.dim,
        moe_intermediate_size=options.hidden,
        num_experts=options.experts,
        num_experts_per_tok=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config).to(dtype)


def models(options, dtype, place):
    """Adapted models by who computes their experts, with the same weights, and the frozen base."""
    base = base_model(options, dtype)
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_parameters=TARGETS)
    theirs = peft.get_peft_model(copy.deepcopy(base), config, autocast_adapter_dtype=False)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
        elif "embed_tokens" in name:
            parameter.requires_grad_(place == "inner")
    ours = copy.deepcopy(theirs)
    theirs.base_model.model.set_experts_implementation("grouped_mm")
    apply(ours)
    base.requires_grad_(False).set_experts_implementation("grouped_mm")
    base.model.embed_tokens.requires_grad_()  # so that there is a backward
    return {"expertmesh": ours, "peft": theirs}, base


def step(model, ids):
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids).loss.backward()


def main():
    """Prints a line per type and place of the layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"tokens": 1024, "dim": 512, "hidden": 256, "experts": 64, "rank": 16, "rounds": 3}
    for option, value in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for dtype, place in itertools.product((torch.float32, torch.bfloat16), ("first", "inner")):
        found, base = models(options, dtype, place)
        ids = torch.randint(256, (1, options.tokens))
        for model in found.values():
            step(model, ids)
        grads = {
            n: {k: p.grad for k, p in m.named_parameters() if p.grad is not None}
            for n, m in found.items()
        }
        worst = max(
            numerics.relative_error(g, grads["peft"][k]) for k, g in grads["expertmesh"].items()
        )
        if worst > 40 * torch.finfo(dtype).eps:
            raise SystemExit(f"{dtype}: gradients differ by {worst:.1e}")
        contenders = [Contender(n, partial(step, m, ids)) for n, m in found.items()]
        timed = interleaved(contenders, rounds=options.rounds, warmup=0, clock="cpu")
        seconds = {one.name: one.median_s for one in timed}
        without = peak_bytes(lambda model=base, ids=ids: step(model, ids))
        extra = {
            n: peak_bytes(lambda model=m, ids=ids: step(model, ids)) - without
            for n, m in found.items()
        }
        print(
            f"{str(dtype)[6:]:9} {place} layer {seconds['peft'] / seconds['expertmesh']:.2f} x peft "
            f"({seconds['expertmesh']:.3f} s, {seconds['peft']:.3f} s); extra memory {extra['expertmesh'] / 2**20:.0f} MiB of "
            f"{extra['peft'] / 2**20:.0f} MiB (the step without adapters {without / 2**20:.0f} MiB); gradients within {worst:.1e}"
        )


if __name__ == "__main__":
    main()
