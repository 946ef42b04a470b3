"""The dense model that a mixture of experts is compared with: one of about as good answers, by a rule of thumb."""

import math
from dataclasses import replace

from expertmesh.costs.sizes import ModelSizes, spec_of_layers


def dense_twin(sizes: ModelSizes) -> ModelSizes | None:
    """Sizes of a dense model with the same attention and sqrt(all x active) parameters; None: the model has no experts.

    The geometric mean is what people go by (Mistral's authors, 2024); DeepSeek-V3 of 671 and 37 billion is then beside
    158.

    Example:
        >>> from expertmesh.planner.published import published_models
        >>> twin = dense_twin(published_models()["qwen3-30b"])
        >>> round(twin.num_parameters / 1e9)
        10
    """
    if not any(block.num_experts for block in sizes.blocks):
        return None
    wanted = math.sqrt(sizes.num_parameters * sizes.active_parameters)
    attention = sum(b.count * b.attention_elements for b in sizes.blocks)
    rest = (wanted - sizes.outside_parameters - attention) / sizes.num_layers
    matrices = max(block.num_matrices for block in sizes.blocks)
    hidden = max(128, 128 * round(rest / (matrices * sizes.dim * 128)))
    elements = matrices * sizes.dim * hidden
    blocks = tuple(
        replace(
            block,
            dense_hidden=hidden,
            dense_elements=elements,
            num_experts=0,
            rows_per_token=0,
            hidden_dim=0,
            num_matrices=matrices,
            dense_parameters=block.attention_elements + elements + 2 * sizes.dim,
            expert_parameters=0,
        )
        for block in sizes.blocks
    )
    layers = [block for block in blocks for _ in range(block.count)]
    spec = spec_of_layers(sizes.dim, sizes.outside_parameters // sizes.dim, layers)
    return ModelSizes(sizes.dim, sizes.vocab_size, spec, blocks, sizes.tensor_divisor)
