"""What must hold beside speed: saved bytes, repeatable bits, no waiting for the device, one CUDA graph,
torch.compile."""

from collections.abc import Callable, Mapping

import torch
from benchmarks.race.contenders import Inputs, Racer, WeightSet, ours
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import BYTES, SHAPES, RaceShape
from tests.support.memory import saved_bytes
from torch import Tensor, nn

REPEATS = 20
_INT32 = 4
_SLACK = 0.01


class _Step:
    """Forward and backward of ours on fixed tensors."""

    def __init__(self, shape: RaceShape, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.shape, self.device = shape, device
        self.weights = WeightSet.draw(shape, device, generator)
        self.inputs = Inputs.draw(shape, device, generator, 1)
        self.racer: Racer = ours(shape, device=device)
        self.racer.module.train()
        self.racer.take(self.weights)
        self.x_TD = self.inputs.batches[0].detach().requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x_TD, *self.racer.module.parameters()]

    def __call__(self) -> tuple[Tensor, ...]:
        y = self.racer(self.x_TD)
        return (y, *torch.autograd.grad(y, self.leaves, self.inputs.grad_TD))


def saved(step: _Step) -> str:
    """Autograd keeps X, H, int32 metadata, and what the router needs; nothing else."""
    shape = step.shape
    T, D, K, E = shape.num_tokens, shape.dim, shape.top_k, shape.num_experts
    x_and_h = (T * D + shape.num_rows * shape.num_branches * shape.hidden_dim) * BYTES
    metadata = _INT32 * (E + 1 + 3 * T * K) + 4 * T * K
    router = T * (8 * E + 24 * K)
    found = saved_bytes(lambda: step.racer(step.x_TD), parameters=step.racer.module.parameters())
    allowed = (x_and_h + metadata + router) * (1 + _SLACK)
    assert found <= allowed, f"{found:,} bytes saved, X + H are {x_and_h:,}, {allowed:,.0f} allowed"
    return f"{found / 1e6:.1f} MB saved; X + H are {x_and_h / 1e6:.1f} MB ({found / x_and_h:.3f} x)"


def repeatable(step: _Step) -> str:
    """Output and all gradients have the same bits in every run."""
    first = step()
    repeats = REPEATS if step.device.startswith("cuda") else 2
    for number in range(repeats):
        for name, a, b in zip(("y", "x", "router", "w_in", "w_out"), first, step(), strict=False):
            assert torch.equal(a, b), f"{name} differs in repetition {number + 1}"
    return f"{repeats} repetitions, bitwise equal"


def no_sync(step: _Step) -> str:
    """Forward and backward never wait for the device."""
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no synchronisation in forward and backward"


def one_graph(step: _Step) -> str:
    """One CUDA graph holds forward and backward and gives the bits of the eager step, for new tokens too."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            step.x_TD.normal_()
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b), "the graph gives other bits than the eager step"
    return "forward + backward in one graph, new routing in every replay"


class _Model(nn.Module):
    """The layer between two linear maps, as a model has it."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        place = {"device": step.device, "dtype": torch.bfloat16, "bias": False}
        dim = step.shape.dim
        self.first, self.last = nn.Linear(dim, dim, **place), nn.Linear(dim, dim, **place)
        self.moe = step.racer.module

    def forward(self, x_TD: Tensor) -> Tensor:
        y, stats = self.moe(self.first(x_TD))
        return self.last(y) + stats.aux_loss.to(y.dtype)


def compiled(step: _Step) -> str:
    """torch.compile of a model around the layer: one graph, no recompilation for another batch, the same to
    rounding."""
    model = _Model(step)
    fast = torch.compile(model, fullgraph=True, dynamic=True)
    worst = 0.0
    for number, num_tokens in enumerate((step.shape.num_tokens, step.shape.num_tokens // 2 + 1)):
        x_TD = step.inputs.batches[0][:num_tokens].clone()  # no view: its base would be guarded
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            y = fast(x_TD)
            y.float().square().mean().backward()
        expected = model(x_TD).detach().float()
        distance = float((y.detach().float() - expected).norm() / expected.norm())
        worst = max(worst, distance)
        # fused linear maps round differently; a wrong row would be far off
        assert distance < 0.02, f"compiled differs by {distance:.3f}"
    return f"fullgraph, second batch size without recompilation, {worst:.1e} from eager"


def batch_invariant(step: _Step) -> str:
    """In evaluation with `batch_invariant` a token's output has the same bits whatever batch it is in."""
    racer = ours(step.shape, device=step.device, batch_invariant=True)
    racer.module.eval()
    racer.take(step.weights)
    x_TD = step.inputs.batches[0]
    with torch.no_grad():
        whole = racer(x_TD)
        for part in (slice(0, 1), slice(1, 8), slice(len(x_TD) // 2, len(x_TD))):
            assert torch.equal(racer(x_TD[part]), whole[part]), f"tokens {part} differ"
    return "1, 7 and half of the tokens alone, bitwise equal"


ON_ANY_DEVICE: dict[str, Callable[[_Step], str]] = {
    "saved bytes": saved,
    "batch_invariant": batch_invariant,
    "repeatable bits": repeatable,
    "torch.compile": compiled,
}
ON_GPUS: dict[str, Callable[[_Step], str]] = {
    "no synchronisation": no_sync,
    "one CUDA graph": one_graph,
}


def properties(
    keep: Keep,
    *,
    device: str,
    tiny: bool = False,
    on_any_device: Mapping[str, Callable[[_Step], str]] = ON_ANY_DEVICE,
) -> list[dict[str, str]]:
    """A part: check them all; a failure is a row, not the end, since each says something of its own."""
    shape = SHAPES[0].tiny() if tiny else SHAPES[0]
    checks = {**on_any_device, **(ON_GPUS if device.startswith("cuda") else {})}
    rows: list[dict[str, str]] = []
    for name, check in checks.items():
        row = {"property": name, "holds": "yes"}
        try:
            row["what was seen"] = check(_Step(shape, device))
        except Exception as error:  # an assertion, or what PyTorch raises where it synchronises
            lines = str(error).strip().splitlines() or [type(error).__name__]
            row |= {"holds": "NO", "what was seen": lines[0][:200]}
        rows.append(row)
        keep(rows)
    return rows
