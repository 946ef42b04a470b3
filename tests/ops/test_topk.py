"""The operator for the choice of experts: backends agree, gradients flow, it compiles, mistakes are told."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times

from expertmesh.errors import ConfigError
from expertmesh.functional import choose_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = ["softmax", "sigmoid", "softmax_after_topk"]
GROUPED = {"num_expert_groups": 4, "num_limited_groups": 2}


def run(logits, backend, function, d_weights, d_scores, **options):
    x = logits.detach().requires_grad_()
    ids, weights, scores = choose_experts(
        x, 3, score_function=function, normalize=True, weight_scale=2.0, backend=backend, **options
    )
    total = (weights * d_weights.to(x.dtype)).sum() + (scores * d_scores.to(x.dtype)).sum()
    (d_logits,) = torch.autograd.grad(total, x)
    return ids, weights.detach(), scores.detach(), d_logits


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("options", [{}, GROUPED, GROUPED | {"group_score": "max"}], ids=["all", "grouped", "by_max"])
def test_triton_equals_torch(function, options):
    logits = torch.randn(9, 16, device=DEVICE)
    noise, bias = torch.randn_like(logits), torch.randn(16, device=DEVICE)
    grads = torch.randn(9, 3, device=DEVICE), torch.randn(9, 16, device=DEVICE)
    options = {"noise_TE": noise, "bias_E": bias, **options}
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    ours = run(logits, "triton", function, *grads, **options)
    same = run(logits, "torch", function, *grads, **options)
    oracle = run(logits.double(), "auto", function, *grads, **exact)
    assert torch.equal(ours[0], same[0])
    assert torch.equal(ours[0], oracle[0])
    for a, b, c in zip(ours[1:], same[1:], oracle[1:], strict=True):
        assert_two_times(a, b, c, what=function)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck_of_the_torch_backend(function):
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def weights_and_scores(x):
        return choose_experts(x, 3, score_function=function, normalize=True, **GROUPED)[1:]

    torch.autograd.gradcheck(weights_and_scores, (logits,))
    torch.autograd.gradgradcheck(weights_and_scores, (logits,))


def test_second_derivative_of_triton_is_an_error():
    logits = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    _, weights, _ = choose_experts(logits, 2, score_function="softmax", normalize=False, backend="triton")
    (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_compile_without_breaks_or_recompiles():
    def weights_of(x):
        ids, weights, scores = choose_experts(x, 2, score_function="sigmoid", normalize=True, backend="triton")
        return (weights * ids).sum() + scores.square().sum()

    compiled = torch.compile(weights_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, num_tokens in enumerate((6, 9)):
        x = torch.randn(num_tokens, 8, device=DEVICE, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            y = compiled(x)
        assert torch.equal(y, weights_of(x))
        y.backward()


def test_opcheck():
    logits = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    noise, bias = torch.randn(6, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    op = torch.ops.expertmesh.choose_experts.default
    # without test_aot_dispatch_dynamic, which adds up all outputs and starts with the integer ids
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for args in (
        (logits, noise, bias, 2, "sigmoid", True, 2.0, [4, 2]),
        (logits, None, None, 8, "softmax", False, 1.0, [1, 1]),
    ):
        torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 9}, "top_k is 9"),
        ({"top_k": 0}, "top_k is 0"),
        ({"score_function": "tanh"}, "tanh"),
        ({"num_expert_groups": 3}, "must divide"),
        ({"num_limited_groups": 2}, "num_limited_groups 2"),
        (
            {"num_expert_groups": 4, "top_k": 3},
            "top_k=3: must be at most the experts in num_limited_groups=1 groups, 2",
        ),
        ({"logits_TE": torch.randn(4, 8).double(), "backend": "triton"}, "float64"),
        ({"logits_TE": torch.randn(1, 2049), "backend": "triton"}, "2049 experts"),
        ({"logits_TE": torch.randn(8)}, r"\(8,\)"),
        ({"noise_TE": torch.randn(1, 8)}, r"noise has shape \(1, 8\); it must be \(4, 8\)"),
        ({"bias_E": torch.randn(7), "backend": "triton"}, r"bias has shape \(7,\)"),
    ],
)
def test_mistakes_are_told(change, words):
    call = {"logits_TE": torch.randn(4, 8), "top_k": 2, "score_function": "softmax", **change}
    with pytest.raises(ConfigError, match=words) as error:
        choose_experts(call.pop("logits_TE"), call.pop("top_k"), normalize=True, **call)
    assert "\n" not in str(error.value)


def test_auto_leaves_to_torch_what_triton_cannot_do():
    logits = torch.randn(2, 3000, dtype=torch.float64, device=DEVICE)
    ids, *_ = choose_experts(logits, 2, score_function="softmax", normalize=True)
    assert torch.equal(ids, logits.topk(2).indices)
