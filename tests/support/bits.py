"""Deterministic mode and training of one model, held against each other to the bit."""

import torch

from expertmesh.engine.engine import Engine
from expertmesh.engine.on_policy import token_logprobs


def assert_bits_follow_no_neighbour_and_training_has_them(model, prompts, params, *caches):
    """Drawn tokens and logprobs are the same alone, together and under other caches, and training computes these
    logprobs."""

    def drawn_by(prompts, **options):
        each = [params] * len(prompts)  # which keep the seed, as a prompt alone does
        found = Engine(model, deterministic=True, **options).generate(prompts, each)
        return found, [(o.prompt_ids, o.index, o.token_ids, o.logprobs) for o in found]

    together, expected = drawn_by(prompts)
    for options in caches:
        assert drawn_by(prompts, **options)[1] == expected
    assert [one for p in prompts for one in drawn_by([p])[1]] == expected
    model.train()
    scores = token_logprobs(model, [[*o.prompt_ids, *o.token_ids] for o in together])
    for output, found in zip(together, scores, strict=True):
        drawn = torch.tensor([one.logprob for one in output.logprobs], dtype=found.dtype)
        assert torch.equal(found[len(output.prompt_ids) - 1 :], drawn)
