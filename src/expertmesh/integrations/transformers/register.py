"""The name under which transformers finds our experts, and how a loaded model is switched to it."""

from typing import Any

from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from expertmesh.errors import ConfigError
from expertmesh.integrations.transformers.experts_forward import forward
from expertmesh.integrations.transformers.peft_experts import lend_factors
from expertmesh.moe.check_arguments import check_module

NAME = "expertmesh"
"""Value of `experts_implementation`."""

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "down_proj")


def register() -> str:
    """Add `experts_implementation="expertmesh"` to transformers, for this process; again is no mistake.

    And `ep_implementation="expertmesh"`, for `DistributedConfig`, where transformers has such a choice: our exchange brings tokens to
    the experts of all ranks.

    Returns:
        The name, for `from_pretrained(..., experts_implementation=register())`.
    """
    ExpertsInterface.register(NAME, forward)
    FP8ExpertsInterface.register(NAME, _refuse_fp8)
    _register_exchange()
    return NAME


def _register_exchange() -> None:
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # a transformers of before there were several
        return
    from expertmesh.integrations.transformers.expert_parallel import ExpertMeshEP

    EPImplementationInterface.register(NAME, ExpertMeshEP)


def apply(model: nn.Module) -> int:
    """Run the experts of a loaded model on ours from now on; weights stay where they are.

    The choice of experts, their weights, shared experts and losses stay transformers' own. The choice is not saved with the model.
    Low-rank adapters of peft (`target_parameters`) that are there already run as the factors that they are.

    Args:
        model: a model of transformers with mixture-of-experts layers, one that peft has wrapped, or one such layer.

    Returns:
        How many experts modules it reached, one per mixture-of-experts layer.

    Raises:
        ConfigError: there is none (a dense model), or its weights are FP8 or MXFP4.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")
        >>> apply(model)
        48
    """
    check_module(model)
    register()
    found = [m for m in model.modules() if is_experts(m)]
    packed = [m for m in model.modules() if is_packed(m)]
    if packed:
        raise ConfigError(
            f"{type(model).__name__} has {len(packed)} modules of {type(packed[0]).__name__}: their weights are quantised, and "
            "expertmesh takes float32, bfloat16 and float16; load the model with dequantised weights"
        )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no module of experts that transformers dispatches (it is dense, or has experts of an "
            "older kind); use a mixture-of-experts model of transformers 5, or expertmesh's upcycle for a dense one"
        )
    for experts in found:
        config: Any = experts.config
        config._experts_implementation = NAME
    lend_factors(model, NAME)
    return len(found)


def is_experts(module: nn.Module) -> bool:
    """Whether it is a module of experts that transformers dispatches, of weights that are not packed."""
    return all(hasattr(module, name) for name in _MARKS) and not is_packed(module)


def is_packed(module: nn.Module) -> bool:
    """Whether it is a module of quantised experts, which ours do not compute."""
    return isinstance(module, FP8Experts) or type(module).__name__.startswith("Mxfp4")


def _refuse_fp8(experts: Any, *args: Tensor, **kwargs: Any) -> Tensor:
    """Say what a model of FP8 weights needs.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"experts_implementation={NAME!r}: this model's experts have FP8 weights, and expertmesh takes float32, bfloat16 and "
        "float16; load it with dequantised weights, or use another implementation"
    )
