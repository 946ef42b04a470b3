"""Answers that are JSON of a schema, or match a list, a regular expression or a grammar: masks of allowed next tokens,
by llguidance (extra `json`)."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from expertmesh.config.sampling import GUIDES, SamplingParams
from expertmesh.engine.checks import params_of
from expertmesh.engine.grammar_trial import (
    TOO_LARGE,
    TRIAL,
    is_given_up,
    matcher_of,
    matcher_of_grammar,
)
from expertmesh.engine.guided_calls import GuidedCalls
from expertmesh.engine.schema_check import SchemaCheck
from expertmesh.engine.schema_patterns import readable_pattern
from expertmesh.engine.schema_reading import MOST_CHARACTERS, read_schema
from expertmesh.errors import ConfigError
from expertmesh.text.stream import TextStream
from expertmesh.text.tokenizer import special_ids

_MOST_KEPT = 64
"""Maximum number of compiled guides to keep."""
PROBLEMS = tuple(f"{name}: " for name in GUIDES)
"""Beginnings of the error of an answer whose guide cannot be kept."""
_OWN = "x-guidance"  # llguidance's keyword that overrides its options
_Check = Callable[[str], str | None]
_BEFORE = "\x02"  # no token crosses this character


class AnswerRule:
    """Rule of one answer. Every call gets all tokens so far, so answers may be rolled back."""

    def __init__(
        self,
        matcher: Any,  # llguidance matcher at its start, owned by this rule
        *,
        tokens: Seq[bytes],  # bytes of each of V tokens
        end_ids: Iterable[int],
        check: _Check | None,  # reason why a whole answer does not validate, or None; None: every one does
        guide: str,  # name of the option
    ) -> None:
        self._matcher, self._tokens, self._check, self._guide = matcher, tokens, check, guide
        self.end_ids = frozenset(end_ids)
        self._wrong: str | None = None  # reason why an answer may not end after `_seen`
        self._seen: list[int] = []
        self._found_V: NDArray[np.bool_] | None = None  # allowed tokens after `_seen`

    def allowed(self, ids: Seq[int], *, may_end: bool = True) -> NDArray[np.bool_] | None:
        """Tokens that may follow.

        Args:
            may_end: False: mask end tokens, unless nothing else is allowed.

        Returns:
            (V,) bool with at least one True; None: the answer has left it (as wrong draft tokens do).
        """
        if not self._follow(ids):
            return None
        if self._found_V is None:
            data = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(data, bitorder="little", count=len(self._tokens))
            self._found_V = bits.view(np.bool_)
            self._forbid_wrong_end(self._found_V)
        found_V = self._found_V
        if not may_end:
            others_V = found_V.copy()
            others_V[list(self.end_ids)] = False
            found_V = others_V if others_V.any() else found_V
        return found_V if found_V.any() else None

    def problem(self, ids: Seq[int]) -> str | None:
        """Reason why no token can follow a valid answer; None: one can."""
        if self.allowed(ids) is not None:
            return None
        reason = self._wrong or "no token of this vocabulary goes on"
        reason = TOO_LARGE if is_given_up(self._matcher) else reason
        return f"{self._guide}: cannot be kept any further ({reason}); give another {_READ[self._guide].what}"

    def _forbid_wrong_end(self, found_V: NDArray[np.bool_]) -> None:
        """Forbid end tokens where the answer is whole and does not validate, whatever the compiler says."""
        ends = list(self.end_ids)
        self._wrong = None
        # without a check the text is not put together: it would be at every token that may be the last
        if self._check is not None and found_V[ends].any():
            text = b"".join(self._tokens[i] for i in self._seen).decode(errors="replace")
            self._wrong = self._check(text)
            if self._wrong is not None:
                found_V[ends] = False

    def _follow(self, ids: Seq[int]) -> bool:
        """Move the matcher to the end of some tokens; returns whether they fit."""
        same = 0
        for old, new in zip(self._seen, ids, strict=False):
            if old != new:
                break
            same += 1
        if same < len(self._seen):
            self._matcher.rollback(len(self._seen) - same)
            del self._seen[same:]
            self._found_V = None
        more = list(ids[same:])
        if more and self._matcher.validate_tokens(more) < len(more):
            return False
        if more and not self._matcher.consume_tokens(more):
            return False
        if more:
            self._seen += more
            self._found_V = None
        return not self._matcher.is_error()


class Compiled:
    """Value of an option that is compiled; pickled and copied it is what was given alone."""

    owner: "AnswerRules"
    _make: Callable[[], AnswerRule]
    _given: Any
    _lock: Lock

    def made_by(self, owner: "AnswerRules", make: Callable[[], AnswerRule], given: Any) -> Self:
        """The value, after its compiler, what makes the rule of an answer and what was given are noted."""
        self.owner, self._make, self._given, self._lock = owner, make, given, Lock()
        return self

    def rule(self) -> AnswerRule:
        """Rule at the start of an answer."""
        with self._lock:
            return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        """The given value alone."""
        return _same, (self._given,)


class CompiledSchema(Compiled, dict[str, Any]):
    """JSON schema."""


class CompiledChoice(Compiled, tuple[str, ...]):
    """Texts to choose from."""


class CompiledText(Compiled, str):
    """Regular expression or grammar."""


class _Reading(NamedTuple):
    """Compiler's reading of a guide."""

    text: str  # what the trial gets
    # makes the check of whole answers, or None: the compiler's word is enough
    check: Callable[[], _Check | None] = lambda: None


class _Kind(NamedTuple):
    """Kind of a guide."""

    what: str  # the value in words
    read: Callable[[str], _Reading]  # reads the text of a value; raises ValueError
    holder: Callable[[Any], Compiled]  # class of compiled values


def _read_schema(text: str) -> _Reading:
    read = read_schema(json.loads(text))
    return _Reading(
        json.dumps(read.schema),
        lambda: SchemaCheck(text, read.anchors, _Patterns(read.patterns)).problem,
    )


def _read_choice(text: str) -> _Reading:
    texts = frozenset(json.loads(text))
    return _Reading(text, lambda: lambda said: None if said in texts else "it is none of the list")


def _read_regex(text: str) -> _Reading:
    return _Reading(readable_pattern(json.loads(text)))


def _read_grammar(text: str) -> _Reading:
    return _Reading(json.loads(text))


_READ = {
    "json_schema": _Kind("JSON schema", _read_schema, CompiledSchema),
    "choice": _Kind("list", _read_choice, CompiledChoice),
    "regex": _Kind("regular expression", _read_regex, CompiledText),
    "grammar": _Kind("grammar", _read_grammar, CompiledText),
}
"""Kinds by the name of the option."""


class AnswerRules:
    """Compiler of guides; thread-safe. One that takes long holds up nobody whose own is known already.

    Args:
        tokenizer: tokenizer of the model; None: every guide is an error.
        vocab_size: V, at least the tokenizer's.

    Attributes:
        trial: the process that tries guides first.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self.trial = tokenizer, vocab_size, TRIAL
        self._ends = sorted(end_ids)
        self._words: tuple[Any, Seq[bytes]] | None = None
        self._kept: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._lock, self._making = Lock(), Lock()

    def ready(self, params: SamplingParams | None) -> SamplingParams:
        """Checked parameters (`params_of`), whose guide is compiled (`compiled`)."""
        params = params_of(params)
        found = params.guide
        if found is None or (isinstance(found[1], Compiled) and found[1].owner is self):
            return params
        guide, value = found
        return params.model_copy(update={guide: self.compiled(guide, value)})

    def known(self, guide: str, value: Any) -> Compiled | None:
        """The compiled value, if it was compiled lately; never waits for one that is being compiled."""
        if self._tokenizer is None:
            raise ConfigError(f"{guide}: is about text, and the engine has no tokenizer")
        if find_spec("llguidance") is None:
            raise ConfigError(f"{guide}: needs llguidance; install it with: pip install 'expertmesh[json]'")
        key = guide, _key(guide, value)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def compiled(self, guide: str, value: Any) -> Compiled:
        """A guide that is ready for answers, tried in another process first (`GrammarTrial`)."""
        found = self.known(guide, value)
        if found is not None:
            return found
        text = _text(guide, value)
        try:
            read = _READ[guide].read(text)
            if (problem := self.trial.problem(guide, read.text)) is not None:
                raise ValueError(problem)
            tokenizer, tokens = self._of_model()
            check = read.check()
            if isinstance(value, GuidedCalls):
                assert check is not None  # of a schema
                assert self._tokenizer is not None  # see `known`
                specials = special_ids(self._tokenizer)
                grammar = value.grammar(lambda one: read_schema(one).schema, specials)
                matcher, check = matcher_of_grammar(grammar, tokenizer), _of_list(value, check)
            else:
                matcher = matcher_of(guide, read.text, tokenizer)
        except (ValueError, RecursionError) as error:
            raise _refused(guide, str(error)) from None

        def make() -> AnswerRule:
            own = matcher.deep_copy()
            return AnswerRule(own, tokens=tokens, end_ids=self._ends, check=check, guide=guide)

        if (said := make().problem([])) is not None:
            raise ConfigError(said)
        found = _READ[guide].holder(value).made_by(self, make, _plain(value))
        with self._lock:
            self._kept[guide, _key(guide, value)] = found
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return found

    def _of_model(self) -> tuple[Any, Seq[bytes]]:
        """llguidance's tokenizer of the model, and the bytes of its tokens."""
        from llguidance import LLTokenizer

        assert self._tokenizer is not None
        with self._making:
            if self._words is None:
                words: Any = _Words(self._tokenizer, self._vocab_size, self._ends)
                made = LLTokenizer(words, n_vocab=self._vocab_size, eos_token=self._ends)
                self._words = made, words.tokens
            return self._words


class _Patterns:
    """Whether regular expressions are found in texts, by llguidance: Python's take exponential time."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        from llguidance import LLTokenizer

        bytes_ = LLTokenizer("byte")
        self._matchers = {
            given: matcher_of("json_schema", json.dumps({"type": "string", "pattern": one}), bytes_)
            for given, one in patterns.items()
        }

    def __call__(self, pattern: str, text: str) -> bool:
        """Whether a regular expression is found in a text."""
        matcher = self._matchers[pattern].deep_copy()
        data = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f").encode()
        fits = matcher.validate_tokens(list(data)) == len(data)
        return bool(fits and matcher.consume_tokens(list(data)) and matcher.is_accepting())


class _Words:
    """Tokenizer wrapper for llguidance, with the bytes of every token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        stream = TextStream(tokenizer)
        self._tokenizer, self.eos_token_id = tokenizer, end_ids[0]
        self.tokens = [stream.bytes_of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({*special_ids(tokenizer).values(), *end_ids})
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that follows other text: SentencePiece adds a space at the start of a text."""
        before, ids = self._encode(_BEFORE), self._encode(_BEFORE + text)
        ids = ids[len(before) :]
        if b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return self._longest(text.encode())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _longest(self, left: bytes) -> list[int]:
        """Greedy longest-match tokens of some bytes; stops where no token matches."""
        found = []
        while left:
            fits = (i for i in range(len(self.tokens)) if i not in self._special)
            fits = (i for i in fits if self.tokens[i] and left.startswith(self.tokens[i]))
            best = max(fits, key=lambda i: len(self.tokens[i]), default=None)
            if best is None:
                break
            found.append(best)
            left = left[len(self.tokens[best]) :]
        return found


def _plain(value: Any) -> Any:
    """A value that was not compiled."""
    if isinstance(value, Compiled):
        return value._given
    return value if isinstance(value, GuidedCalls | str | tuple) else dict(value)


def _same(given: Any) -> Any:
    return given


def _of_list(calls: GuidedCalls, check: _Check) -> _Check:
    """Check of an answer, by the list of its calls."""
    return lambda answer: check(calls.listed(answer))


def _key(guide: str, value: Any) -> str:
    return _text(guide, value) + (value.key if isinstance(value, GuidedCalls) else "")


def _text(guide: str, value: Any) -> str:
    """Value as JSON."""
    try:
        if isinstance(value, Mapping):
            value = {name: one for name, one in value.items() if name != _OWN}
        text = json.dumps(value, allow_nan=False)
    except RecursionError:
        raise _refused(guide, "it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refused(guide, str(error)) from None
    if len(text) > MOST_CHARACTERS:
        raise _refused(guide, f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    return text


def _refused(guide: str, reason: str) -> ConfigError:
    line = " ".join(reason.split())[:200]
    return ConfigError(f"{guide}: cannot be kept ({line}); give another {_READ[guide].what}")
