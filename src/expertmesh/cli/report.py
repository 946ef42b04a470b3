"""`expertmesh report --run DIR`: what a run learned, against a trigram model, with samples.

The share of sampled lines that tokenise follows one rule: every line of a continuation is stripped and given on its own
to Python's `tokenize`; it counts if that neither raises nor finds an error token. Empty lines do not count, nor does the
last line of a continuation that was cut off at its length.
"""

import io
import tokenize
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expertmesh.cli.flags import OptionParser
from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from expertmesh.models.gpt.model import GPT
    from expertmesh.training.run_dir import Run

_PROMPTS = (
    "import os\nimport sys\n",
    "def main(",
    "class Test",
    "    def __init__(self",
    "if __name__ ==",
    "for i in range(",
    "    return ",
    "try:\n    ",
)
_CURVE_ROWS = 12


@dataclass(frozen=True)
class Sample:
    """One continuation.

    Attributes:
        prompt: what the model was given.
        text: what it went on with.
        is_cut: whether it ended at its length, not at the end of the text.
    """

    prompt: str
    text: str
    is_cut: bool


def run(argv: list[str]) -> int:
    """Runs the verb.

    Args:
        argv: words after `report`.

    Returns:
        0 if the model needs fewer bits per byte than the trigram model, else 1.

    Raises:
        ConfigError: a value breaks a rule, or the run's data are not there any more.
        CheckpointError: the run has no usable checkpoint.
    """
    parser = OptionParser(prog="expertmesh report", description="Summarises a run.")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--samples", type=int, default=8, help="continuations to sample (8)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens for each (100)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (0.7)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    options = parser.parse_args(argv)
    if options.samples < 0 or options.tokens < 1 or not 0 <= options.temperature < float("inf"):
        raise ConfigError(
            f"--samples {options.samples} --tokens {options.tokens} --temperature {options.temperature}: "
            "must be at least 0, 1 and 0; change them"
        )
    return _report(options)


def _report(options: Any) -> int:
    from expertmesh.training.metrics import read_metrics
    from expertmesh.training.run_dir import RunDir, load_run

    found = load_run(options.run)
    folder = RunDir(options.run)
    metrics = read_metrics(folder.metrics)
    model = _load_model(found)
    print(curve_table(metrics))
    before = next(
        (m["initial_eval_bits_per_byte"] for m in metrics if "initial_eval_loss" in m), None
    )
    after, baseline = _bits_per_byte(found, model)
    steps = f"after step {metrics[-1]['step']:,}" if metrics else "now"
    print()
    if before is not None:
        print(f"validation bits per byte, before training    {before:.4f}")
    print(f"validation bits per byte, {steps:<18} {after:.4f}")
    print(f"byte trigram with back-off (Witten-Bell)     {baseline:.4f}")
    samples = sample(
        model,
        found,
        count=options.samples,
        num_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    _print_samples(samples)
    if after < baseline:
        print("the model is better than the trigram model")
        return 0
    print("the model is NOT better than the trigram model")
    return 1


def _load_model(found: "Run") -> "GPT":
    from expertmesh.models.gpt.model import GPT
    from expertmesh.training.precision import resolve_precision
    from expertmesh.training.state import load_weights

    precision = resolve_precision(found.config.train, record=found.arithmetic)
    model = GPT(found.config.model, device=precision.device, dtype=precision.master_dtype, seed=0)
    load_weights(found.checkpoint, model)
    return model


def _bits_per_byte(found: "Run", model: "GPT") -> tuple[float, float]:
    """Bits per byte of the model and of the trigram model, on all of the validation split."""
    import torch

    from expertmesh.training.checkpoint import read_state
    from expertmesh.training.corpus import texts
    from expertmesh.training.evaluate import evaluate
    from expertmesh.training.loader import Windows
    from expertmesh.training.ngram import ByteTrigram
    from expertmesh.training.precision import resolve_precision
    from expertmesh.training.shards import prepare_data
    from expertmesh.training.state import check_same_data
    from expertmesh.training.tokenizer import load_tokenizer, token_num_bytes

    config = found.config
    data = prepare_data(config.data, vocab_size=config.model.vocab_size)
    check_same_data(read_state(found.checkpoint)["data_key"], data, where=found.checkpoint)
    sizes = token_num_bytes(load_tokenizer(found.tokenizer), config.model.vocab_size)
    result = evaluate(
        model,
        Windows(data.validation.tokens_N, config.data.seq_len, config.train.seed),
        torch.from_numpy(sizes),
        batch_size=config.train.micro_batch_size or config.train.batch_size,
        max_samples=None,
        precision=resolve_precision(config.train, record=found.arithmetic),
    )
    baseline = ByteTrigram.fit(texts(data.corpus.training))
    return result.bits_per_byte, baseline.bits_per_byte(texts(data.corpus.validation))


def sample(
    model: "GPT", found: "Run", *, count: int, num_tokens: int, temperature: float, seed: int
) -> list[Sample]:
    """Continuations of fixed prompts, each from the beginning of a text.

    Args:
        model: the model.
        found: its run.
        count: how many; prompts repeat after the last.
        num_tokens: most tokens for each.
        temperature: 0: the most likely token always.
        seed: of the random numbers.
    """
    from expertmesh.infer.engine import generate_batch
    from expertmesh.infer.sampling import Sampling
    from expertmesh.training.tokenizer import END_OF_TEXT_ID, load_tokenizer

    if count == 0:
        return []
    tokenizer = load_tokenizer(found.tokenizer)
    sampling = Sampling(
        greedy=temperature == 0, temperature=temperature or 1.0, top_p=0.95, seed=seed
    )
    prompts = [_PROMPTS[i % len(_PROMPTS)] for i in range(count)]
    prompt_ids = [[END_OF_TEXT_ID, *tokenizer.encode(p).ids] for p in prompts]
    room = model.config.max_seq_len - max(map(len, prompt_ids))
    outputs: list[list[int]] = [[] for _ in prompts]
    is_cut = [True] * count
    steps = generate_batch(
        model,
        prompt_ids,
        max_new_tokens=min(num_tokens, room),
        sampling=sampling,
        eos_id=END_OF_TEXT_ID,
    )
    for step in steps:
        for i, token_id in enumerate(step):
            if token_id is None:
                is_cut[i] = False
            else:
                outputs[i].append(token_id)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    return [Sample(p, t, c) for p, t, c in zip(prompts, texts, is_cut, strict=True)]


def countable_lines(sampled: Sample) -> list[str]:
    """The stripped lines of prompt and continuation that the rule in this module's docstring looks at.

    Lines that hold nothing but prompt are left out.
    """
    lines = (sampled.prompt + sampled.text).split("\n")
    first = sampled.prompt.count("\n")
    chosen = lines[first : len(lines) - 1 if sampled.is_cut else len(lines)]
    return [line.strip() for line in chosen if line.strip()]


def tokenises(line: str) -> bool:
    """Whether Python's `tokenize` takes a line on its own."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def curve_table(metrics: list[dict[str, Any]]) -> str:
    """Some steps of the learning curve as a table; the rows with an evaluation first of all."""
    if not metrics:
        return "no metrics"
    evaluated = [m for m in metrics if "eval_loss" in m]
    rows = evaluated or metrics
    stride = -(-len(rows) // _CURVE_ROWS)
    chosen = [m for i, m in enumerate(rows) if (len(rows) - 1 - i) % stride == 0]
    if chosen[0] is not metrics[0]:
        chosen.insert(0, metrics[0])
    head = (
        f"{'step':>8} {'tokens':>12} {'loss':>8} {'bits/byte':>10} {'tokens/s':>9} {'imbalance':>9}"
    )
    lines = [head]
    for m in chosen:
        bits = f"{m['eval_bits_per_byte']:.4f}" if "eval_bits_per_byte" in m else ""
        lines.append(
            f"{m['step']:>8,} {m['tokens']:>12,} {m['loss']:>8.4f} {bits:>10} {m['tokens_per_second']:>9,.0f}"
            f" {m['load_imbalance']:>9.2f}"
        )
    return "\n".join(lines)


def _print_samples(samples: list[Sample]) -> None:
    for number, sampled in enumerate(samples, 1):
        print(f"\n--- sample {number}, prompt {sampled.prompt!r}")
        print(sampled.prompt + sampled.text)
    lines = [line for sampled in samples for line in countable_lines(sampled)]
    good = sum(map(tokenises, lines))
    print()
    share = f" ({good / len(lines):.0%})" if lines else ""
    print(f"sampled lines that tokenise as Python: {good} of {len(lines)}{share}")
