"""A mixture-of-experts layer in a model and a training loop of one's own: python examples/layer_in_your_model.py"""

import torch
import torch.nn.functional as F
from torch import nn

import expertmesh as em


class Block(nn.Module):
    """A residual block whose feed-forward layer is a mixture of 8 experts, of which a token uses 2."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.moe = em.MoELayer(dim=dim, hidden_dim=2 * dim, num_experts=8, top_k=2)

    def forward(self, x):
        y, stats = self.moe(self.norm(x))
        return x + y, stats


class Model(nn.Module):
    def __init__(self, dim=16, num_blocks=2, num_classes=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        routing_losses = 0.0
        for block in self.blocks:
            x, stats = block(x)
            # Both are weighted already (aux_loss_weight, z_loss_weight of the layer).
            routing_losses = routing_losses + stats.aux_loss + stats.z_loss
        return self.head(x), routing_losses, stats


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(2000, 16)
    target = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)  # the quarter of the plane of two coordinates
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(100):
        which = torch.randint(len(x), (64,))
        logits, routing_losses, stats = model(x[which])
        loss = F.cross_entropy(logits, target[which])
        (loss + routing_losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            load = stats.num_tokens_per_expert_E.tolist()
            print(f"step {step + 1}: loss {loss.item():.3f}, tokens per expert {load}")
    model.eval()
    with torch.no_grad():
        right = (model(x)[0].argmax(1) == target).float().mean()
    print(f"{right.item():.1%} right")
