"""A GPT with experts in a training loop of one's own, without the trainer: python examples/gpt_from_python.py"""

import torch
import torch.nn.functional as F

import expertmesh as em

# A recipe's model with some options changed; `expertmesh train gpt-moe-test --help` lists them.
config = em.recipe(
    "gpt-moe-test",
    {"model.vocab_size": 257, "model.moe.num_experts": (8,), "model.moe.drop_policy": "random"}
    | {"model.moe.capacity_factor": 1.5},
)
model = em.GPT(config.model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

# Bytes as tokens: what this model learns to continue.
text = "To be, or not to be, that is the question. " * 50
ids = torch.tensor(list(text.encode()))

for step in range(30):
    starts = torch.randint(len(ids) - 33, (8,)).tolist()
    batch = torch.stack([ids[start : start + 33] for start in starts])
    output = model(batch[:, :-1])
    loss = F.cross_entropy(output.logits_BSV.flatten(0, 1), batch[:, 1:].flatten())
    routing = sum(stats.aux_loss + stats.z_loss for stats in output.stats)
    optimizer.zero_grad()
    (loss + routing).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 9:
        dropped = sum(stats.num_dropped.item() for stats in output.stats)
        print(f"step {step + 1}: loss {loss.item():.3f}, {dropped} rows dropped")

model.eval()
context = list(b"To be, or")
with torch.no_grad():
    for _ in range(20):
        logits = model(torch.tensor([context])).logits_BSV
        context.append(int(logits[0, -1].argmax()))
print(bytes(context).decode(errors="replace"))
