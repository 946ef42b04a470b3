"""The products of matrices that dominate a training step, from a model's configuration alone."""

from collections import Counter
from dataclasses import dataclass, replace

from expertmesh.config.gpt import GPTRunConfig
from expertmesh.costs.parameters import gpt_spec


@dataclass(frozen=True)
class Product:
    """x w^T with x (num_rows, in_features) and w (out_features, in_features), and the two products of its backward pass.

    Attributes:
        num_rows: tokens, or those of one expert.
        in_features: columns of x.
        out_features: columns of the result.
        count: how often it is computed per step.
    """

    num_rows: int
    in_features: int
    out_features: int
    count: int = 1

    @property
    def size(self) -> int:
        """Multiply-adds of the forward pass, once."""
        return self.num_rows * self.in_features * self.out_features


def dominant_products(config: GPTRunConfig, *, num_parts: int = 1) -> tuple[Product, ...]:
    """Every weight matrix of a GPT with the tokens of a forward pass; those of one size are one entry.

    Args:
        config: the run. An expert gets K / E of the tokens.
        num_parts: into which the rows of a batch are split over ranks.

    Returns:
        Products of at least a hundredth of the largest's work, the largest first.
    """
    model = config.model
    rows = config.train.samples_per_pass
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
