"""The shapes of the race: sizes, goals, operations, bytes, and the memory that a run of one needs. No torch."""

from dataclasses import dataclass, replace

PHASES = ("forward", "backward", "both")
_PASSES = {"forward": 1, "backward": 2, "both": 3}
"""Operations of a phase in forward passes."""
BYTES = 2
"""Of an element; the race is run in BF16."""
_SPARE_BYTES = 4 << 30
"""CUDA's own memory, the buffer that flushes the L2, fragments."""
_PEER_ROWS = 2
"""A peer out of PyTorch operators holds about this many copies of what ours holds per row: it saves inputs and
results."""


@dataclass(frozen=True)
class Goals:
    """TFLOP/s to reach per phase; None: no goal."""

    forward: float | None = None
    backward: float | None = None
    both: float | None = None

    def of(self, phase: str) -> float | None:
        return getattr(self, phase)


@dataclass(frozen=True)
class RaceShape:
    """One line of the table.

    Attributes:
        name: short, for `--shapes` and the table.
        title: what it is.
        num_tokens: T.
        dim: D.
        hidden_dim: F.
        num_experts: E.
        top_k: K.
        activation: swiglu or gelu.
        goals: TFLOP/s wanted on an H200.
        against_einsum: also race the einsum dispatch, whose tensors grow with T * E * C.
    """

    name: str
    title: str
    num_tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    goals: Goals = Goals()
    against_einsum: bool = False

    @property
    def num_branches(self) -> int:
        return 2 if self.activation == "swiglu" else 1

    @property
    def num_rows(self) -> int:
        """N = T * K."""
        return self.num_tokens * self.top_k

    @property
    def weight_bytes(self) -> int:
        """One set of the experts' weights."""
        matrices = self.num_branches + 1
        return matrices * self.num_experts * self.dim * self.hidden_dim * BYTES

    def flops(self, phase: str) -> int:
        """2 T K D F per matrix: 6 T K D F forward for gated experts, 4 for plain ones; backward twice that."""
        forward = 2 * (self.num_branches + 1) * self.num_rows * self.dim * self.hidden_dim
        return forward * _PASSES[phase]

    def least_bytes(self, phase: str) -> int:
        """Bytes that our kernels move at least (docs/kernels.md): every operand of every product once.

        Gathered rows count once per token, as if the L2 held the other K - 1 reads.
        """
        T, D, F, E, G, N = (
            self.num_tokens,
            self.dim,
            self.hidden_dim,
            self.num_experts,
            self.num_branches,
            self.num_rows,
        )
        up = T * D + E * G * F * D + N * G * F + N * F
        down = N * F + E * D * F + N * D
        combine = N * D + T * D
        hidden_grad = T * D + E * D * F + N * G * F + N * F + N * G * F
        input_grad = N * G * F + E * G * F * D + N * D
        weight_grads = T * D + N * F + E * D * F + T * D + N * G * F + E * G * F * D
        forward = up + down + combine
        backward = hidden_grad + input_grad + combine + weight_grads
        elements = {"forward": forward, "backward": backward, "both": forward + backward}
        return elements[phase] * BYTES

    def floor_s(self, phase: str, *, flops_per_s: float, bytes_per_s: float) -> float:
        """The shortest time that these ceilings allow."""
        return max(self.flops(phase) / flops_per_s, self.least_bytes(phase) / bytes_per_s)

    def activation_bytes(self) -> int:
        """The most that a contender holds beside weights and their gradients, roughly; peers are the larger ones."""
        row = 3 * self.dim + (2 * self.num_branches + 2) * self.hidden_dim
        most = (_PEER_ROWS * self.num_rows * row + 6 * self.num_tokens * self.dim) * BYTES
        if self.against_einsum:
            capacity = 1.1 * self.num_rows / self.num_experts
            # dispatch and combine (T, E, C), and what autograd keeps of making them
            most += int(6 * self.num_tokens * self.num_experts * capacity * BYTES)
        return most

    def peak_bytes(self, weight_sets: int) -> int:
        """Weights, one gradient of them, what a contender holds, and the spare."""
        return (
            (weight_sets + 1) * self.weight_bytes
            # one peer's copy while it is made, or a gradient in another layout
            + self.weight_bytes // 2
            + self.activation_bytes()
            + _SPARE_BYTES
        )

    def weight_sets(self, total_bytes: int) -> int:
        """How many sets of weights to rotate: two where they fit, else one; 0: not even that.

        The L2 is flushed anyway, so one set is no cheat; two also change addresses and pages.
        """
        return next((n for n in (2, 1) if self.peak_bytes(n) <= total_bytes), 0)

    def tiny(self) -> "RaceShape":
        """For a dry run of the whole benchmark on a CPU."""
        experts = min(self.num_experts, 8)
        return replace(
            self,
            num_tokens=self.num_tokens // 512,
            dim=64,
            hidden_dim=96,
            num_experts=experts,
            top_k=min(self.top_k, experts),
        )

    def smallest(self) -> "RaceShape":
        """For a dry run of the kernels in Triton's interpreter, which takes a second for a few tiles."""
        return replace(self, num_tokens=8, dim=32, hidden_dim=48, num_experts=3, top_k=2)


_QWEN3 = {"dim": 2048, "hidden_dim": 768, "num_experts": 128, "top_k": 8}
_OLMOE = {"dim": 2048, "hidden_dim": 1024, "num_experts": 64, "top_k": 8}
_BLOG = {
    "num_tokens": 32_768,
    "dim": 2048,
    "hidden_dim": 2048,
    "top_k": 2,
    "activation": "gelu",
    "goals": Goals(540, 480, 500),
    "against_einsum": True,
}

SHAPES: tuple[RaceShape, ...] = (
    RaceShape("qwen3-8k", "Qwen3-30B-A3B", 8192, **_QWEN3, goals=Goals(420, 380, 390)),
    RaceShape("qwen3-32k", "Qwen3-30B-A3B", 32_768, **_QWEN3, goals=Goals(520, 450, 470)),
    RaceShape("mixtral-8k", "Mixtral-8x7B", 8192, 4096, 14_336, 8, 2, goals=Goals(620, 500, 530)),
    RaceShape("fine-32k", "fine-grained", 32_768, 4096, 512, 128, 8, goals=Goals(510, 500, 500)),
    RaceShape("olmoe-32k", "OLMoE", 32_768, **_OLMOE, goals=Goals(540, 470, 490)),
    RaceShape(
        "deepseek-8k",
        "DeepSeek-V3, all experts here",
        8192,
        7168,
        2048,
        256,
        8,
        goals=Goals(450, 420, 430),
    ),
    RaceShape("blog-e2", "Tutel's blog setting", num_experts=2, **_BLOG),
    RaceShape("blog-e16", "Tutel's blog setting", num_experts=16, **_BLOG),
)
"""In the order in which they are run: the ones that say most first."""
GOAL_SHAPES = ("qwen3-8k", "qwen3-32k", "mixtral-8k", "fine-32k")
"""Those whose kernels are timed one by one."""

DECODE_TOKENS = (1, 8, 32, 128)


def decode_shapes() -> list[RaceShape]:
    """Decoding steps of Qwen3 and OLMoE layers."""
    return [
        RaceShape(f"{name}-decode-{tokens}", title, tokens, **sizes)
        for name, title, sizes in (("qwen3", "Qwen3-30B-A3B", _QWEN3), ("olmoe", "OLMoE", _OLMOE))
        for tokens in DECODE_TOKENS
    ]


def chosen(names: tuple[str, ...]) -> list[RaceShape]:
    """The shapes of these names, all if there are none.

    Raises:
        ValueError: there is no shape of a name.
    """
    known = {shape.name: shape for shape in SHAPES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no shape {unknown[0]}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(SHAPES)
