"""What the scripts in `scripts` share: a batch, ten steps; and the losses that Tutel's formulas give, in plain
PyTorch."""

import torch
from torch.nn import functional as F

BATCH, TOKENS, D, H, STEPS, RATE = 4, 16, 32, 24, 10, 0.01
GATE = {"type": "top", "k": 2, "fp32_gate": True, "capacity_factor": 1.25}


def mark(_, parameter):
    parameter.skip_allreduce = True


def batch():
    torch.manual_seed(0)
    return torch.randn(BATCH, TOKENS, D), torch.zeros(BATCH, dtype=torch.long)


def loss_of(y, target):
    return F.nll_loss(F.log_softmax(y.sum(2), 1), target)


def averaged(model, net):
    """Average the gradients of what ranks share."""
    for p in model.parameters():
        if not hasattr(p, "skip_allreduce"):
            p.grad = net.simple_all_reduce(p.grad / net.get_world_size())


def ten_steps(call, optimizer, reduce=lambda: None, l_aux_wt=0.0):
    """Losses of ten steps; `call` maps tokens and the number of the step to the output."""
    (x, target), losses = batch(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        y = call(x, step)
        loss = loss_of(y, target)
        if l_aux_wt:
            loss = loss + l_aux_wt * y.l_aux
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def of_ranks(ranks, draw):
    """All experts; each rank draws its own with the seed of its number plus 1."""
    experts = []
    for rank in range(ranks):
        torch.manual_seed(rank + 1)
        experts += draw()
    return experts


def drawn_ffn(count=2):
    """Experts as Tutel's `ffn` draws them: parameters, and a function of rows each."""

    def one():
        w1, w2 = ((torch.rand(H, D) * (n**-0.5 + n**-0.5) - n**-0.5).requires_grad_() for n in (D, H))
        b1, b2 = (torch.zeros(n).requires_grad_() for n in (H, D))
        return (w1, w2, b1, b2), lambda x: F.relu(x @ w1.T + b1) @ w2 + b2

    return [one() for _ in range(count)]


def plain_losses(ranks, experts, *, k=2, factor=1.25, l_aux_wt=0.0, score=None):
    """Losses of ten steps of `ranks` ranks that have the same tokens.

    Args:
        ranks: number of ranks.
        experts: parameters and a function of rows, of every expert.
        k: experts per token.
        factor: capacity factor, above 0; 0: nothing is dropped.
        l_aux_wt: weight of the balance loss.
        score: the gate's function of tokens and weights; None: their product.
    """
    torch.manual_seed(1)
    gate = torch.nn.Linear(D, len(experts), bias=False).weight
    score = score or (lambda x, w: x @ w.T)
    (x, target), losses = batch(), []
    x = x.view(-1, D)
    rows = k * int(factor * -(-len(x) // len(experts))) if factor else len(x)
    for _ in range(STEPS):
        scores = torch.softmax(score(x, gate), 1)
        weights, ids = scores.topk(k, 1)
        weights = weights / weights.sum(1, keepdim=True) if k > 1 else weights
        y, used = torch.zeros_like(x), [0] * len(experts)
        for j in range(k):
            for e, (_, function) in enumerate(experts):
                tokens = (ids[:, j] == e).nonzero()[:, 0]
                kept = tokens[: max(rows - used[e], 0)]
                used[e] += len(tokens)
                y = y.index_add(0, kept, weights[kept, j, None] * function(x[kept]))
        share = torch.bincount(ids[:, 0], minlength=len(experts)) / len(x)
        loss = loss_of(y.view(BATCH, TOKENS, D), target)
        loss = loss + l_aux_wt * len(experts) * (scores.mean(0) * share).sum()
        own = [p for parameters, _ in experts for p in parameters]
        for p, grad in zip([gate, *own], torch.autograd.grad(loss, [gate, *own]), strict=True):
            times = 1 if p is gate else ranks  # experts' gradients are sums over ranks
            p.data -= RATE * times * grad
        losses.append(float(loss.detach()))
    return losses
