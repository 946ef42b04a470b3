"""AdamW with moments in fewer bytes than FP32, and functions that it shares with Muon."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expertmesh.config.run import StateDtype
from expertmesh.parallel.matrices import own_part
from expertmesh.parallel.shard_place import maxima_over_ranks, place_of
from expertmesh.training.moment_types import (
    Code,
    Float16Scaled,
    Moment,
    State,
    code_of,
    is_signed,
    row_slices,
    rows,
)
from expertmesh.training.stochastic_rounding import Words, WordTables
from expertmesh.training.workspace import Workspace, Workspaces

ADAMW_KEYS = "exp_avg", "exp_avg_sq"
MUON_KEYS = ("momentum_buffer",)


class Compact(NamedTuple):
    """Parameter with a gradient and compact moments."""

    parameter: nn.Parameter
    name: str  # its name in the model
    code: Code  # storage type of its moments
    group: dict[str, Any]  # its parameter group
    state: State  # its optimizer state
    # current whole-tensor scales by name of the moment; the state's are already the next ones
    scales: dict[str, Tensor]

    @property
    def step(self) -> int:
        """Number of updates, including the current one."""
        return int(self.state["step"])


def begin_step(optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]], *keys: str) -> list[Compact]:
    """Parameters of some groups that have a gradient; creates their moments and increments their step.

    Args:
        groups: parameter groups whose parameters all have a `code_of`.
    """
    found = []
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is None:
                continue
            code, state = code_of(parameter, group["state_dtype"]), optimizer.state[parameter]
            if not state:
                state.update(new_state(parameter, code, *keys))
            state["step"] += 1
            found.append(Compact(parameter, name, code, group, state, {}))
    return found


def new_state(parameter: Tensor, code: Code, *keys: str) -> State:
    """Zero moments, and a step count: on the CPU, or where torch's fused AdamW has it; Muon in FP32 has none."""
    is_plain = code.name == "float32"
    where = parameter.device if is_plain else None
    state: State = {"step": torch.zeros((), dtype=torch.float32, device=where)}
    state = {} if is_plain and keys == MUON_KEYS else state
    for key in keys:
        state |= code.new(parameter, key)
    return state


def words_of(found: Iterable[Compact]) -> Mapping[nn.Parameter, Words]:
    """Random words of this step, for each parameter that uses stochastic rounding."""
    needing = [
        (one, place_of(one.parameter), own_part(one.parameter).device) for one in found if one.code.is_stochastic
    ]
    tables = {
        step: WordTables(step, [(place, d) for one, place, d in needing if one.step == step])
        for step in dict.fromkeys(one.step for one, *_ in needing)
    }
    return {one.parameter: tables[one.step].words(one.name, place, device) for one, place, device in needing}


def grow_scales(found: Iterable[Compact], decays: Mapping[str, Callable[[Any], float]]) -> None:
    """Set the scales of `fp16-scaled` to upper bounds of the next moments; every rank must call.

    Args:
        decays: for each moment, its decay as a function of the group; exp_avg_sq averages squares.
    """
    scaled = [one for one in found if isinstance(one.code, Float16Scaled)]
    if not scaled:
        return
    largest = [_largest(own_part(one.parameter.grad)) for one in scaled]  # type: ignore[arg-type]
    whole = maxima_over_ranks([one.parameter for one in scaled], largest)
    for one, value in zip(scaled, whole, strict=True):
        for key, decay in decays.items():
            size = value if is_signed(key) else value.square()
            scale = one.state[f"{key}_scale"]
            one.scales[key] = scale.clone()
            Float16Scaled.next_scale(scale, decay(one.group), size)


def _largest(x: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    result: Tensor = torch.linalg.vector_norm(x, float("inf")).to(torch.float32)
    return result


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with torch's fused update; moments are decoded and encoded some
    rows at a time.

    Args:
        groups: groups of named `params`, `weight_decay` and `state_dtype`; "float32" groups use torch's AdamW.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,  # learning rate of all groups
        betas: tuple[float, float] = (0.9, 0.95),  # decays of the moments
        eps: float = 1e-8,  # added to the denominator
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "state_dtype": "float32"})
        self._plain = self._for_plain()

    def _for_plain(self) -> torch.optim.AdamW | None:
        return fused_adamw(self, [g for g in self.param_groups if g["state_dtype"] == "float32"])

    def sharing(self, state: Any) -> "LowBitAdamW":
        """Switch this optimizer to the state of another optimizer that shares some groups, and return it."""
        self.state = state
        self._plain = self._for_plain()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; `load_state_dict` calls this with new groups and state."""
        super().__setstate__(state)
        self._plain = self._for_plain()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, keeping the dtypes of moments; torch's version casts them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; every rank must call."""
        loss = loss_of(closure)
        groups = [group for group in self.param_groups if group["state_dtype"] != "float32"]
        found = begin_step(self, groups, *ADAMW_KEYS)
        grow_scales(
            found,
            {"exp_avg": lambda group: group["betas"][0], "exp_avg_sq": lambda g: g["betas"][1]},
        )
        words = words_of(found)
        spaces = Workspaces()
        for one in found:
            _update(one, words.get(one.parameter), spaces[own_part(one.parameter).device])
        if self._plain is not None:
            self._plain.step()
        return loss


def _update(one: Compact, words: Words | None, space: Workspace) -> None:
    group, state, code = one.group, one.state, one.code
    gradient = one.parameter.grad
    assert gradient is not None
    weight = rows(one.parameter)
    gradient = own_part(gradient).reshape(weight.shape)
    step = torch.full((), one.step, dtype=torch.float32, device=weight.device)
    beta1, beta2 = group["betas"]
    stored = [Moment.of(state, key) for key in ADAMW_KEYS]
    for part in row_slices(weight):
        some = weight[part]
        moments = [space.table(key, some.shape, some.dtype) for key in ADAMW_KEYS]
        for key, kept, moment in zip(ADAMW_KEYS, stored, moments, strict=True):
            now = kept._replace(scales=one.scales.get(key, kept.scales))
            code.read(now.part(part), moment, space)
        torch._fused_adamw_(
            [some],
            [gradient[part]],
            moments[:1],
            moments[1:],
            [],
            [step],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for kept, moment in zip(stored, moments, strict=True):
            drawn = None if words is None else words.of(part, space)
            code.write(moment, kept.part(part), drawn, space)


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return value of an optimizer's step: the closure's loss with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def fused_adamw(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.AdamW | None:
    """AdamW of torch on some groups of another optimizer, sharing its state; None without groups.

    Sharing leaves one state to save and one set of groups to set learning rates in.
    """
    if not groups:
        return None
    adamw = torch.optim.AdamW(groups, fused=True)
    adamw.state = optimizer.state
    return adamw


def keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restore the dtypes that moments have in a loaded state."""
    ids = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(ids, parameters, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            ours = optimizer.state[parameter].get(key)
            if isinstance(ours, Tensor) and ours.dtype != value.dtype:
                optimizer.state[parameter][key] = value.detach().to(ours.device, copy=True)


def state_dtype_of(optimizer: torch.optim.Optimizer) -> Mapping[nn.Parameter, StateDtype]:
    """Requested type of each parameter's moments, for any optimizer."""
    return {p: group.get("state_dtype", "float32") for group in optimizer.param_groups for p in group["params"]}
