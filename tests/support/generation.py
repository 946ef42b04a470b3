"""Token ids that a model writes, for tests that compare them."""

from expertmesh.engine.request import SamplingParams
from expertmesh.engine.texts import continue_prompts


def written_ids(model, prompts, *, ends=None, temperature=0.0, seed=0, **options):
    """New ids of each prompt, without the end.

    Args:
        model: any that writes text.
        prompts: lists of ids.
        ends: ids that end an answer; None: none, the model's own neither.
        temperature: 0: greedy.
        seed: of all prompts; see `SamplingParams.seed`.
        **options: of `SamplingParams`.
    """
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        stop_token_ids=tuple(ends or ()),
        ignore_eos=ends is None,
        **options,
    )
    outputs = continue_prompts(model, prompts, params)
    return [list(o.token_ids[: -1 if o.finish_reason == "stop" else None]) for o in outputs]
