"""Group-relative policy optimisation of a tiny mixture, whose training sees the rollouts' logprobs to the bit.

    python examples/rl_on_policy.py [updates 60] [seed 0]

The task: continue a digit with four tokens, all of which repeat it; the reward is the share that does. Several answers
to a prompt are compared with one another (Shao et al. 2024, arXiv 2402.03300); two updates are made with each batch,
and the ratio of the second one is clipped. A line is printed per batch; the difference is the largest between the
logprob that the engine gave a token and the one that training computes for it before the first update: exactly 0.
"""

import sys

import torch

import expertmesh as em
from expertmesh.models.gpt.config import ModelConfig

DIGITS, LENGTH, PROMPTS, ANSWERS, CLIP = 10, 4, 10, 8, 0.2


def reward(prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """What a program can check."""
    return sum(token == prompt[0] for token in answer) / LENGTH


def main() -> None:
    """Train, and print a line per batch."""
    updates, seed = map(int, (sys.argv[1:] + ["60", "0"][len(sys.argv) - 1 :])[:2])
    model = em.GPT(
        ModelConfig(
            vocab_size=16,
            dim=32,
            num_layers=2,
            num_heads=2,
            max_seq_len=8,
            batch_invariant=True,
            moe={"num_experts": (4,), "hidden_dim": 32},
        ),
        seed=seed,
    ).eval()
    engine = em.Engine(model, deterministic=True, max_len=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for update in range(1, updates + 1):
        params = em.SamplingParams(n=ANSWERS, max_tokens=LENGTH, logprobs=0, seed=1000 * seed + update)
        outputs = engine.generate([[digit] for digit in range(PROMPTS)], params)
        rewards = torch.tensor([reward(one.prompt_ids, one.token_ids) for one in outputs])
        groups = rewards.view(PROMPTS, ANSWERS)
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()[:, None]
        drawn = torch.tensor([[one.logprob for one in output.logprobs] for output in outputs])
        whole = [[*one.prompt_ids, *one.token_ids] for one in outputs]
        for turn in range(2):
            scores = torch.stack(em.token_logprobs(model, whole))
            if turn == 0:
                difference = (scores.detach() - drawn).abs().max().item()
            ratio = (scores - drawn).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        engine.update_weights({})  # they were changed in place: known prefixes are of the old ones
        print(f"update {update} reward {rewards.mean():.3f} difference {difference:g}", flush=True)


if __name__ == "__main__":
    main()
