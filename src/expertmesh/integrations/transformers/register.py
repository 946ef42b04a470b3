"""Registration of our experts implementation in transformers, and its use by a loaded model."""

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
    """Add `experts_implementation="expertmesh"` to transformers in this process; repeated calls are allowed.

    If transformers supports `ep_implementation` in `DistributedConfig`, "expertmesh" is added there as well: our
    exchange sends tokens to the experts of all ranks.

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
    except ImportError:  # older versions of transformers have no such interface
        return
    from expertmesh.integrations.transformers.expert_parallel import ExpertMeshEP

    EPImplementationInterface.register(NAME, ExpertMeshEP)


def apply(model: nn.Module) -> int:
    """Switch the experts of a loaded model to our operators; weights are neither moved nor copied.

    Routing, routing weights, shared experts and losses remain transformers' own. The switch is not saved with the
    model. Existing low-rank adapters of peft (`target_parameters`) are computed from their factors.

    Args:
        model: a model of transformers with MoE layers, also wrapped by peft, or one such layer.

    Returns:
        Number of experts modules switched, one per MoE layer.

    Raises:
        ConfigError: the model has no experts, or its weights are FP8 or MXFP4.

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
            f"{type(model).__name__} has {len(packed)} modules of {type(packed[0]).__name__}: their weights are "
            "quantised, and expertmesh takes float32, bfloat16 and float16; load the model with dequantised weights"
        )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no module of experts that transformers dispatches (it is dense, or has "
            "experts of an older kind); use a mixture-of-experts model of transformers 5, or expertmesh's upcycle for "
            "a dense one"
        )
    for experts in found:
        config: Any = experts.config
        config._experts_implementation = NAME
    lend_factors(model, NAME)
    return len(found)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is an experts module that transformers dispatches, with unpacked weights."""
    return all(hasattr(module, name) for name in _MARKS) and not is_packed(module)


def is_packed(module: nn.Module) -> bool:
    """Whether a module holds quantized experts, which our operators do not support."""
    return isinstance(module, FP8Experts) or type(module).__name__.startswith("Mxfp4")


def _refuse_fp8(experts: Any, *args: Tensor, **kwargs: Any) -> Tensor:
    """Experts implementation for FP8 weights, which are not supported."""
    raise ConfigError(
        f"experts_implementation={NAME!r}: this model's experts have FP8 weights, and expertmesh takes float32, "
        "bfloat16 and float16; load it with dequantised weights, or use another implementation"
    )
