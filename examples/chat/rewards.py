"""Rewards of answers to tasks, with the signature of TRL's reward functions."""


def right(completions, answer, **kwargs):
    """1 for the right answer, else 0."""
    said = [one[0]["content"].strip() for one in completions]
    return [float(one == known) for one, known in zip(said, answer, strict=True)]


def placed(completions, answer, **kwargs):
    """The share of numbers that stand where they should, 0 for too few or too many."""
    said = [one[0]["content"].split() for one in completions]
    return [_placed(one, known.split()) for one, known in zip(said, answer, strict=True)]


def _placed(said: list[str], known: list[str]) -> float:
    if len(said) != len(known):
        return 0.0
    return sum(one == other for one, other in zip(said, known, strict=True)) / len(known)
