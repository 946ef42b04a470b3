"""Low-rank adapters of peft on experts, lent to our experts as the factors that they are.

peft parametrises an expert stack for each forward pass, which makes W + s B A: a tensor as large as all experts. A wrapper that
lends its factors instead makes nothing of the kind, with any number of active adapters.
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
"""peft's class around a module of whose parameters one is adapted."""
_LENT = "_expertmesh_adapters"


class PeftFactors(NamedTuple):
    """A low-rank addition to a stack of matrices, W + scaling * lhs @ rhs.

    Attributes:
        lhs: (E, rows, r).
        rhs: (E, r, columns).
        scaling: its factor.
    """

    lhs: Tensor
    rhs: Tensor
    scaling: float


def weight_and_adapters(experts: Any, name: str) -> tuple[Tensor, tuple[PeftFactors, ...]]:
    """A weight of the experts and the adapters on it; where they cannot be told apart, their sum.

    Args:
        experts: the module.
        name: of its parameter.
    """
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
    """Let peft's wrappers of expert stacks lend their factors, where the experts run on the implementation of this name.

    Args:
        model: may hold such wrappers; without any it is left alone.
        name: of `experts_implementation`.
    """
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
    """Refuse, before peft does without saying what to do, to wrap a stack of experts of ours with more axes than peft knows.

    Raises:
        ConfigError: it names the parameter.
    """
    if type(wrapper).__name__ != _WRAPPER or not isinstance(module, GroupedExperts):
        return
    parameter: str = getattr(wrapper, "parameter_name", "")
    stack = getattr(module, parameter, None)
    if isinstance(stack, Tensor) and stack.ndim > 3:
        raise ConfigError(
            f"target_parameters: experts.{parameter} has {stack.ndim} axes, gate and up apart, and peft adapts stacks of 3; open the "
            "model again, leave it out, and add adapters on experts by expertmesh.lora.add(model.gpt, freeze=False) after get_peft_model"
        )


register_module_module_registration_hook(_refuse_stacks)
