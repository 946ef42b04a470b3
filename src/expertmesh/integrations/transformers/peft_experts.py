"""Low-rank adapters of peft on experts, computed from their factors.

In each forward peft parametrizes an expert stack and forms W + s B A, a tensor as large as all experts. Wrappers that
lend their factors to our operators avoid this, with any number of active adapters.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from expertmesh.errors import ConfigError
from expertmesh.moe.experts import GroupedExperts

_WRAPPER = "ParamWrapper"
"""Class name of peft's wrapper of a module with an adapted parameter."""
_LENT = "_expertmesh_adapters"


class PeftFactors(NamedTuple):
    """Low-rank addition to a stack of matrices, W + scaling * lhs @ rhs."""

    lhs: Tensor  # (E, rows, r)
    rhs: Tensor  # (E, r, columns)
    scaling: float


def weight_and_adapters(experts: Any, name: str) -> tuple[Tensor, tuple[PeftFactors, ...]]:
    """Weight of the experts, and the adapters on it; if they cannot be separated, their sum and no adapters."""
    lent: dict[str, tuple[PeftFactors, ...]] = experts.__dict__.get(_LENT, {})
    parametrised = getattr(experts, "parametrizations", {})
    if name not in parametrised:
        return getattr(experts, name), lent.get(name, ())
    added = list(parametrised[name])
    if not all(all(hasattr(one, field) for field in PeftFactors._fields) for one in added):
        return getattr(experts, name), ()
    own = tuple(PeftFactors(one.lhs, one.rhs, one.scaling) for one in added)
    return parametrised[name].original, own + lent.get(name, ())


def lend_factors(model: nn.Module, name: str) -> None:
    """Make peft's wrappers of expert stacks lend their factors, if the experts run on the `experts_implementation`."""
    for module in model.modules():
        wrapper: Any = module
        if type(module).__name__ == _WRAPPER and hasattr(module, "get_delta_factors"):
            plain = wrapper._activate_lora
            wrapper._activate_lora = partial(_lent, wrapper, plain, name)


def _lent(
    wrapper: Any,
    plain: Callable[[list[str]], AbstractContextManager[None]],
    name: str,
    active_adapters: list[str],
) -> AbstractContextManager[None]:
    experts = wrapper.get_base_layer()
    config = getattr(experts, "config", None)
    if wrapper.num_experts == 1 or getattr(config, "_experts_implementation", None) != name:
        return plain(active_adapters)
    return _while_lent(wrapper, experts, active_adapters)


@contextmanager
def _while_lent(wrapper: Any, experts: nn.Module, active_adapters: list[str]) -> Iterator[None]:
    active = [name for name in active_adapters if name in wrapper.lora_A]
    factors = tuple(PeftFactors(*wrapper.get_delta_factors(name)) for name in active)
    lent = experts.__dict__.setdefault(_LENT, {})
    lent[wrapper.parameter_name] = factors
    try:
        yield
    finally:
        del lent[wrapper.parameter_name]


def _refuse_stacks(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise a clear error before peft wraps a `GroupedExperts` stack with more axes than peft supports."""
    if type(wrapper).__name__ != _WRAPPER or not isinstance(module, GroupedExperts):
        return
    parameter: str = getattr(wrapper, "parameter_name", "")
    stack = getattr(module, parameter, None)
    if isinstance(stack, Tensor) and stack.ndim > 3:
        raise ConfigError(
            f"target_parameters: experts.{parameter} has {stack.ndim} axes, gate and up apart, and peft adapts stacks "
            "of 3; open the model again, leave it out, and add adapters on experts by expertmesh.lora.add(model.gpt, "
            "freeze=False) after get_peft_model"
        )


register_module_module_registration_hook(_refuse_stacks)
