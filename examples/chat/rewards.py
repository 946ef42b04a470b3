"""Rewards of answers to tasks, with the signature of TRL's reward functions."""


def right(completions, answer, **kwargs):
    """1 for the right number, else 0."""
    said = [one[0]["content"].strip() for one in completions]
    return [float(one == known) for one, known in zip(said, answer, strict=True)]


def near(completions, answer, **kwargs):
    """1 for the right number, half of it for each step away from it, 0 for what is no number."""
    said = [one[0]["content"].strip() for one in completions]
    return [_near(one, int(known)) for one, known in zip(said, answer, strict=True)]


def _near(said: str, known: int) -> float:
    is_number = said.removeprefix("-").isdecimal() and len(said) < 5
    return 2.0 ** -abs(int(said) - known) if is_number else 0.0
