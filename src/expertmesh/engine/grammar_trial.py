"""Trial of a schema or grammar in a process of its own, which ends where it takes too much time or memory.

Its compiler can be kept busy for minutes by one line, and cannot be interrupted; a process can.
"""

import json
import signal
from typing import Any

from expertmesh.config.child_process import ChildEndedError, ChildProcess, answer_requests

SECONDS = 5
MOST_BYTES = 2**30
OPTIONS: Any = {
    "lenient": False,  # an unsupported keyword is an error, not ignored
    "coerce_one_of": False,
    # bounded: otherwise a model could write whitespace forever
    "whitespace_pattern": r"\n[ ]{0,32}|[ ]?",
}
TOO_LARGE = "it is too large to follow; make its patterns and lengths smaller"
_ITEMS = 10_000
"""Bound on the work of a parser for one token, about 0.1 s: grammars can be as ambiguous as they like."""
_STEPS = 64
"""Number of tokens of an answer that are tried: some schemas compile, and fail at their first string."""
_MODULE = "expertmesh.engine.grammar_trial"


def matcher_of(guide: str, text: str, tokenizer: Any) -> Any:
    """llguidance matcher at the start of an answer. `text`: its value; the JSON of a schema or of a list of texts."""
    from llguidance import LLParserLimits

    limits = LLParserLimits() if guide == "json_schema" else LLParserLimits(step_max_items=_ITEMS)
    return matcher_of_grammar(_grammar(guide, text), tokenizer, limits)


def matcher_of_grammar(grammar: str, tokenizer: Any, limits: Any = None) -> Any:
    """llguidance matcher of a grammar; raises ValueError if nothing fits it."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar, tokenizer, limits=limits)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if problem or matcher.get_error():
        raise ValueError(problem or matcher.get_error())
    return matcher


def _grammar(guide: str, text: str) -> str:
    """llguidance's grammar of a guide."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if guide == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
    if guide == "regex":
        return LLMatcher.grammar_from_regex(text)
    if guide == "choice":
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(text)))}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises what its parser falls over
        raise ValueError(str(error) or type(error).__name__) from None


def is_given_up(matcher: Any) -> bool:
    """Whether llguidance has given up on a schema in the middle of an answer; false where no token fits."""
    return bool(matcher.is_error()) and "NoExtension" not in matcher.get_error()


class GrammarTrial:
    """Process that tries schemas and grammars, one at a time; it starts at the first one and waits for others.
    Thread-safe."""

    def __init__(self, module: str = _MODULE) -> None:
        self._child = ChildProcess(module, "json_schema: the process that tries schemas and grammars")

    def problem(self, guide: str, text: str) -> str | None:
        """Reason why a guide (see `matcher_of`) cannot be kept; None: it can, with an ordinary amount of time and
        memory."""
        try:
            return self._child.ask(json.dumps([guide, text]).encode()).decode() or None
        except ChildEndedError:
            return f"it takes more than {SECONDS} s or {MOST_BYTES >> 30} GiB to compile; make it smaller"

    def close(self) -> None:
        """End the process; the next trial starts another one."""
        self._child.end()


TRIAL = GrammarTrial()
"""The trial of this process."""


def main() -> None:
    """Try schemas and grammars; the answers are reasons, or empty."""
    import resource

    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    tokenizer = LLTokenizer("byte")

    def tried(text: bytes) -> bytes:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        guide, given = json.loads(text)
        problem = _tried(guide, given, tokenizer) or ""
        signal.setitimer(signal.ITIMER_REAL, 0)
        return problem.encode(errors="replace")

    answer_requests(tried)


def _tried(guide: str, text: str, tokenizer: Any) -> str | None:
    """Reason why a guide cannot be kept, found by compiling it and following one answer."""
    try:
        matcher = matcher_of(guide, text, tokenizer)
    except ValueError as error:
        return str(error)
    for step in range(_STEPS):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
        if is_given_up(matcher):
            return TOO_LARGE
        if not allowed:
            return None if step else "nothing fits it"
        matcher.consume_tokens([allowed[step * 7919 % len(allowed)]])
    return None


if __name__ == "__main__":
    main()
