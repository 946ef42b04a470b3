"""Costs of training a GPT from its configuration alone: parameters, FLOPs, memory, and the dominant matrix products."""

from collections import Counter
from dataclasses import replace

from expertmesh.config.cluster import Precision
from expertmesh.costs.matrix_products import Product
from expertmesh.costs.run_costs import RunCosts, memory_of
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.run_sizes import sizes_of_run
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.adapter_counts import adapter_text


def gpt_costs(config: GPTRunConfig, *, num_ranks: int, dtype: Precision, on_gpu: bool = False) -> RunCosts:
    """The costs of training a GPT."""
    config = _in_sequences(config)
    train, seq_len = config.train, config.data.seq_len
    spec = gpt_spec(config.model)
    flops = forward_flops(config.model, seq_len=seq_len)
    memory = memory_of(
        sizes_of_run(config),
        config,
        num_ranks=num_ranks,
        dtype=dtype,
        on_gpu=on_gpu,
        seq_len=seq_len,
        recomputes_h=config.model.moe.recompute_h,
    )
    if config.rl.kl_beta and not config.adapter.rests:  # the reference is a second copy
        memory = replace(memory, weights_bytes=2 * memory.weights_bytes)
    return RunCosts(
        parameters=spec.num_parameters,
        active=spec.num_active,
        num_items=train.steps * train.batch_size * seq_len,
        flops_per_item=flops.training_flops(activation_checkpointing=train.activation_checkpointing),
        memory=memory,
        adapters=adapter_text(config.adapter, spec, num_tokens=len(config.tokens.add)) if config.adapter.rests else "",
    )


def _in_sequences(config: GPTRunConfig) -> GPTRunConfig:
    """The run with sequences as its samples: a pair of answers is two, a prompt its group."""
    train = config.train
    count = {"dpo": 2, "grpo": config.rl.group}.get(config.objective.name, 1)
    sizes = {
        "batch_size": count * train.batch_size,
        "micro_batch_size": count * train.samples_per_pass,
        "gradient_accumulation_steps": None,
    }
    return config.model_copy(update={"train": train.model_copy(update=sizes)})


def dominant_products(config: GPTRunConfig, *, num_parts: int = 1) -> tuple[Product, ...]:
    """Products of the tokens of a forward pass with every weight matrix of a GPT; equal sizes are one entry.

    Args:
        config: the run. An expert gets K / E of the tokens.
        num_parts: number of parts into which ranks split the rows of a batch.

    Returns:
        Products with at least a hundredth of the largest one's work, the largest first.
    """
    model = config.model
    rows = _in_sequences(config).train.samples_per_pass
    num_tokens = max(1, rows * config.data.seq_len // num_parts)
    found: Counter[Product] = Counter()
    for parameter in gpt_spec(model):
        shape, rows, count = list(parameter.shape), num_tokens, 1
        if parameter.part == "embedding" and not model.tie_embeddings:
            continue  # looked up, not multiplied
        if parameter.is_expert and len(shape) > 2:
            count, *shape = shape
            rows = max(1, num_tokens * min(model.moe.top_k, count) // count)
        if len(shape) > 1 and parameter.part != "router":
            *out_sizes, in_features = shape
            out_features = out_sizes[0] * (out_sizes[1] if len(out_sizes) > 1 else 1)
            found[Product(rows, in_features, out_features)] += count
    products = [replace(product, count=count) for product, count in found.items()]
    products.sort(key=lambda product: product.size * product.count, reverse=True)
    largest = products[0].size * products[0].count
    return tuple(p for p in products if p.size * p.count * 100 >= largest)
