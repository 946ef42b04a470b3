"""AdamW whose moments take fewer bytes than FP32, and what Muon shares of it."""

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
    State,
    code_of,
    is_signed,
    of_rows,
    row_slices,
    rows,
    scale_rows,
)
from expertmesh.training.stochastic_rounding import Words, WordTables
from expertmesh.training.workspace import Workspace, Workspaces

_KEYS = "exp_avg", "exp_avg_sq"


class Compact(NamedTuple):
    """A parameter that has a gradient and whose moments are kept in few bytes.

    Attributes:
        parameter: it.
        name: of it in the model.
        code: the type of its moments.
        group: its options.
        state: its moments.
        scales: those of whole tensors, by name of the moment, that the moments have as they are.
    """

    parameter: nn.Parameter
    name: str
    code: Code
    group: dict[str, Any]
    state: State
    scales: dict[str, Tensor]

    @property
    def step(self) -> int:
        """Updates of it, the one that is under way included."""
        return int(self.state["step"])


def begin_step(
    optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]], *keys: str
) -> list[Compact]:
    """The parameters of some groups that have a gradient, with moments, their steps counted on.

    Args:
        optimizer: keeps their state.
        groups: of its groups, those of parameters that `code_of` has a type for.
        *keys: names of the moments.
    """
    found = []
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is None:
                continue
            code, state = code_of(parameter, group["state_dtype"]), optimizer.state[parameter]
            assert code is not None, f"{name} has no moments of {group['state_dtype']}"
            if not state:
                state.update(new_state(parameter, code, *keys))
            state["step"] += 1
            found.append(Compact(parameter, name, code, group, state, {}))
    return found


def new_state(parameter: Tensor, code: Code, *keys: str) -> State:
    """Moments of zeros, and the count of steps, which stays on the CPU.

    Args:
        parameter: whose they are.
        code: their type.
        *keys: their names.
    """
    state: State = {"step": torch.zeros((), dtype=torch.float32)}
    for key in keys:
        state |= code.new(parameter, key)
    return state


def words_of(found: Iterable[Compact]) -> Mapping[nn.Parameter, Words]:
    """The random words of this step for each parameter that needs any."""
    needing = [
        (one, place_of(one.parameter), own_part(one.parameter).device)
        for one in found
        if one.code.is_stochastic
    ]
    tables = {
        step: WordTables(step, [(place, d) for one, place, d in needing if one.step == step])
        for step in dict.fromkeys(one.step for one, *_ in needing)
    }
    return {
        one.parameter: tables[one.step].words(one.name, place, device)
        for one, place, device in needing
    }


def grow_scales(found: Iterable[Compact], decays: Mapping[str, Callable[[Any], float]]) -> None:
    """Set the scales of `fp16-scaled` to bounds of what the moments are going to be; every rank must call.

    Args:
        found: the parameters of this step.
        decays: by name of each moment, its decay in a group; that of exp_avg_sq is of squares.
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
    return torch.linalg.vector_norm(x, float("inf")).to(torch.float32)


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2): torch's fused update, of moments that are read and rounded some rows at a time.

    Args:
        groups: of named `params`, `weight_decay` and `state_dtype`; with "float32" they are torch's own.
        lr: of all groups.
        betas: decays of the moments.
        eps: of the denominator.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "state_dtype": "float32"})
        self._plain = self._for_plain()

    def _for_plain(self) -> torch.optim.AdamW | None:
        return fused_adamw(self, [g for g in self.param_groups if g["state_dtype"] == "float32"])

    def sharing(self, state: Any) -> "CompactAdamW":
        """The same, with the state of another optimiser, of which it has some groups."""
        self.state = state
        self._plain = self._for_plain()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, as `load_state_dict` does, which makes groups and state anew."""
        super().__setstate__(state)
        self._plain = self._for_plain()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state; torch's own would make every moment one of the parameter's type."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient; every rank must call.

        Args:
            closure: computes the loss again; None: gradients are there.
        """
        loss = loss_of(closure)
        groups = [group for group in self.param_groups if group["state_dtype"] != "float32"]
        found = begin_step(self, groups, *_KEYS)
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
    codes = [rows(state[key]) for key in _KEYS]
    scales = [scale_rows(state, key) for key in _KEYS]
    for part in row_slices(weight):
        some = weight[part]
        moments = [space.table(key, some.shape, some.dtype) for key in _KEYS]
        for index, moment in enumerate(moments):
            scale = one.scales.get(_KEYS[index], of_rows(scales[index], part))
            code.read(codes[index][part], scale, moment, space)
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
        for index, moment in enumerate(moments):
            drawn = None if words is None else words.of(part, space)
            code.write(
                moment,
                codes[index][part],
                of_rows(scales[index], part),
                drawn,
                space,
                signed=is_signed(_KEYS[index]),
            )


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What an optimiser's step returns: the loss computed again with gradients; None: there is nothing to compute it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def fused_adamw(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.AdamW | None:
    """Torch's AdamW of some groups of another optimiser and of its state, so that there is one of each to save and to set rates in.

    Args:
        optimizer: the other one.
        groups: of it; None are given where there are none.
    """
    if not groups:
        return None
    adamw = torch.optim.AdamW(groups, fused=True)
    adamw.state = optimizer.state
    return adamw


def keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Give moments the types that they have in a state that was loaded.

    Args:
        optimizer: has loaded it.
        state_dict: the state.
    """
    ids = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(ids, parameters, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            ours = optimizer.state[parameter].get(key)
            if isinstance(ours, Tensor) and ours.dtype != value.dtype:
                optimizer.state[parameter][key] = value.detach().to(ours.device, copy=True)


def state_dtype_of(optimizer: torch.optim.Optimizer) -> Mapping[nn.Parameter, StateDtype]:
    """The type that the moments of each parameter are to have, of any optimiser."""
    return {
        p: group.get("state_dtype", "float32")
        for group in optimizer.param_groups
        for p in group["params"]
    }
