"""Bits per byte, by hand; the trigram model."""

import math
import types

import numpy as np
import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.waits import waits
from torch import nn

from expertmesh.config.run import TrainConfig
from expertmesh.data.ngram import ByteTrigram
from expertmesh.data.windows import Windows
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.task import GPTTask, bits_per_byte
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.evaluate import evaluate, on_device

PRECISION = resolve_precision(TrainConfig(device="cpu", dtype="float64"))


class Uniform(nn.Module):
    """Predicts every token alike, and remembers in which mode it was asked."""

    def forward(self, ids_BS, *, targets_R, logit_rows_R):
        self.modes = (self.training, torch.is_grad_enabled())
        return types.SimpleNamespace(logprobs_R=torch.zeros(len(targets_R)).double() - math.log(8))


def measured(model, tokens, seq_len, sizes, *, batch_size=1):
    """The evaluation of a model on all windows of some tokens."""
    windows = Windows(tokens, seq_len, 0)
    data = types.SimpleNamespace(
        validation=lambda *most_and_size: (
            (ids, targets, sizes[targets]) for ids, targets in windows.batches(*most_and_size)
        )
    )
    return evaluate(
        GPTTask(GPTRunConfig()),
        model,
        data,
        batch_size=batch_size,
        max_samples=None,
        precision=PRECISION,
    )


def test_a_uniform_model_needs_log2_of_the_vocabulary_per_token():
    tokens = np.array([1, 2, 3, 0, 1, 2, 3], dtype=np.uint16)
    model = Uniform()
    found = measured(model, tokens, 3, torch.tensor([0, 1, 2, 5, 0, 0, 0, 0]))
    # Targets: 2 3 0 | 1 2 3, of 2 + 5 + 0 + 1 + 2 + 5 = 15 bytes.
    assert math.isclose(found["loss"], math.log(8))
    assert math.isclose(found["bits_per_byte"], 6 * 3 / 15)
    assert model.modes == (False, False) and model.training


def test_sums_on_the_host_and_on_the_device_are_one():
    """A number of the host goes along with a launch: a copy of it would wait."""
    on_meta = torch.ones(3, device="meta").sum()
    with waits() as watch:
        found = [on_device(value, torch.device("meta")) for value in (on_meta, 3, 0.5)]
    assert watch.found == [] and {t.dtype for t in found} == {torch.float64}
    assert on_device(0.5, torch.device("cpu")).item() == 0.5


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_the_batch_size_of_an_evaluation_does_not_matter(batch_size):
    torch.manual_seed(1)
    table = torch.randn(8, 8, dtype=torch.float64)

    class Bigram(nn.Module):
        def forward(self, ids_BS, *, targets_R, logit_rows_R):
            logprobs = table[ids_BS.flatten()].log_softmax(-1)
            return types.SimpleNamespace(logprobs_R=logprobs.gather(1, targets_R[:, None])[:, 0])

    tokens = np.arange(64, dtype=np.uint16) % 7
    sizes = torch.ones(8, dtype=torch.int64)
    found = measured(Bigram(), tokens, 9, sizes, batch_size=batch_size)
    ids = torch.from_numpy(tokens.astype(np.int64))
    nats = -table.log_softmax(-1)[ids[:-1], ids[1:]].sum()
    assert_close_fp64(found["bits_per_byte"], float(nats) / math.log(2) / 63, what="bits per byte")


def test_bits_per_byte_of_no_bytes_is_nan():
    assert math.isnan(bits_per_byte(1.0, 0))
    assert bits_per_byte(math.log(2) * 12, 3) == 4.0


def brute_force(training, text):
    """p(b | h) by the formula, with dictionaries."""
    counts = {}
    for document in training:
        data = b"\n\n" + document.encode()
        for i in range(2, len(data)):
            for n in range(3):
                history = data[i - n : i]
                counts.setdefault(history, {}).setdefault(data[i], 0)
                counts[history][data[i]] += 1

    def probability(history, byte):
        lower = probability(history[1:], byte) if history else 1 / 256
        seen = counts.get(history)
        if not seen:
            return lower
        total, kinds = sum(seen.values()), len(seen)
        return (seen.get(byte, 0) + kinds * lower) / (total + kinds)

    data = b"\n\n" + text.encode()
    bits = [-math.log2(probability(data[i - 2 : i], data[i])) for i in range(2, len(data))]
    return sum(bits) / len(bits)


def test_the_trigram_model_is_its_formula():
    training = ["abracadabra, said he", "caf\u00e9 abra", "x"]
    model = ByteTrigram.fit(training)
    text = "abra \u00e9 zx"
    ours = model.bits_per_byte([text])
    assert math.isclose(ours, brute_force(training, text), rel_tol=1e-5)
    sums = model.probabilities()[[97, 0], [98, 0]].sum(-1)
    assert np.allclose(sums, 1.0, atol=1e-5)


def test_documents_do_not_run_into_each_other():
    one = ByteTrigram.fit(["ab", "cd", "e"]).counts3
    other = ByteTrigram.fit(["e", "cd", "ab"]).counts3
    assert (one == other).all() and one.sum() == 5


def test_the_trigram_model_learns_what_repeats_and_not_what_is_random():
    generator = np.random.default_rng(0)
    training, fresh = ("".join(map(chr, generator.integers(65, 81, size))) for size in (400_000, 20_000))
    # Sixteen letters at random: four bits each, and no model can do better on text that it has not seen.
    assert 3.99 < ByteTrigram.fit([training]).bits_per_byte([fresh]) < 4.1
    assert ByteTrigram.fit(["abcabc" * 1000]).bits_per_byte(["abcabc" * 50]) < 0.1
    assert math.isnan(ByteTrigram.fit(["a"]).bits_per_byte([]))
