"""The dense model of equal cost, to compare a mixture of experts with."""

import math

from expertmesh.config.gpt import GPTRunConfig
from expertmesh.config.model import MoEConfig

_MULTIPLE = 16


def dense_twin(config: GPTRunConfig) -> GPTRunConfig:
    """The same run with one feed-forward layer in place of the experts.

    A token passes K experts of hidden size F there, 3 * D * K * F multiplications, and a router, D * E; here one
    layer of hidden size K * F + E / 3, rounded up to a multiple of 16, so that the dense model has the operations
    of the router too, and never fewer in all.

    Args:
        config: the config of a model with gated experts, equally many in every layer.
    """
    moe = config.model.moe
    multiplications = 3 * moe.top_k * moe.hidden_dim + moe.num_experts[0]
    hidden_dim = math.ceil(multiplications / (3 * _MULTIPLE)) * _MULTIPLE
    model = config.model.model_copy(
        update={"ffn_hidden_dim": hidden_dim, "moe": MoEConfig(num_experts=())}
    )
    return config.model_copy(update={"model": model})
