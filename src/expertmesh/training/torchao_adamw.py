"""AdamW of torchao with 8-bit or 4-bit moments, on one process."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import torch
from torch import Tensor, nn

from expertmesh.config.run import StateDtype
from expertmesh.errors import ConfigError
from expertmesh.ops.cpu.compiled_loops import compiler_problem
from expertmesh.spec.moments import FORMATS
from expertmesh.training.low_bit_adamw import LowBitAdamW, loss_of

_CLASSES: Mapping[StateDtype, str] = {
    "torchao-int8": "AdamW8bit",
    "torchao-int4": "AdamW4bit",
}


def check_torchao(parameters: Iterable[nn.Parameter], state_dtype: StateDtype, *, num_ranks: int = 1) -> ModuleType:
    """Module `torchao.optim`, after a check that its optimizers can take these parameters."""

    def refusal(rule: str, fix: str) -> ConfigError:
        return ConfigError("optim.state_dtype", state_dtype, rule, fix)

    ours = "use int8, which is ours and does"
    if num_ranks > 1:
        raise refusal("works on one process (torchao skips its own FSDP2 tests from torch 2.11 on)", ours)
    parameters = list(parameters)
    for parameter in parameters:
        if getattr(parameter, "device_mesh", None) is not None:
            raise refusal("takes no parameters that FSDP2 spreads", ours)
        if parameter.dtype == torch.float64:
            raise refusal("computes in FP32, and this run in float64", "leave it out")
    try:
        with _quiet():
            import torchao.optim
    except ImportError as error:
        fix = "install it with: pip install 'expertmesh[torchao]'"
        if not (isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("torchao")):
            fix = f"its import says: {str(error).partition(chr(10))[0]}"
        raise refusal("needs torchao", fix) from None
    on_cpu = any(parameter.device.type == "cpu" for parameter in parameters)
    if on_cpu and (problem := compiler_problem()):
        fix = f"install g++, or name a compiler in CXX, or {ours}"
        raise refusal(f"is compiled, and there is no C++ compiler ({problem})", fix)
    found: ModuleType = torchao.optim
    return found


class TorchaoAdamW(LowBitAdamW):
    """AdamW of torchao for large tensors and of torch (fused) for the rest, with one state and one set of groups.

    The first step compiles a loop for each shape, which takes some seconds each on a CPU. For arguments see
    `LowBitAdamW`.
    """

    def _for_plain(self) -> torch.optim.AdamW | None:
        self._groups = [g for g in self.param_groups if g["state_dtype"] != "float32"]
        (kind,) = {group["state_dtype"] for group in self._groups}
        module = check_torchao([p for group in self._groups for p in group["params"]], kind)
        keys = "params", "lr", "betas", "eps", "weight_decay"
        groups = [{key: group[key] for key in keys} for group in self._groups]
        self._theirs: torch.optim.Optimizer = getattr(module, _CLASSES[kind])(groups)
        self._theirs.state = self.state
        self._has_stepped = False
        return super()._for_plain()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = loss_of(closure)
        for group, theirs in zip(self._groups, self._theirs.param_groups, strict=True):
            # torchao's rate is a tensor, so a new value does not recompile
            theirs["lr"].fill_(group["lr"])
        with nullcontext() if self._has_stepped else _quiet(), _as_compiled_or_not():
            self._theirs.step()
        self._has_stepped = True
        if self._plain is not None:
            self._plain.step()
        return loss


def torchao_state(parameter: Tensor, state_dtype: StateDtype) -> dict[str, Tensor]:
    """Zero step and moments in torchao's format."""
    with _quiet():
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
    kind = OptimState8bit if state_dtype == "torchao-int8" else OptimState4bit
    block, where = FORMATS[state_dtype].torchao_block, parameter.device
    moments = {
        key: kind.zeros(parameter.shape, key == "exp_avg", block, where, dtype=parameter.dtype)
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {"step": torch.tensor(0.0), **moments}


def plain_tensors(key: str, value: Tensor) -> dict[str, Tensor]:
    """Tensors of an optimizer state entry in a checkpoint: codes and scales of a torchao moment, else the entry
    itself."""
    codes, scale = (getattr(value, name, None) for name in ("codes", "scale"))
    return {key: value} if codes is None or scale is None else {key: codes, f"{key}_scale": scale}


def _as_compiled_or_not() -> AbstractContextManager[object]:
    """Context in which torchao's compiled step runs as it is where Dynamo is off: with fullgraph torch would raise."""
    is_off = torch._dynamo.config.disable
    return torch.compiler.set_stance("force_eager") if is_off else nullcontext()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context that silences torchao's messages about its libraries and torch's caches."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
