"""Tokens of long texts: the tokenizer's own, while other threads run."""

import threading
import time

import pytest
from tests.support.sentencepiece_vocabulary import sentencepiece_tokenizer

from expertmesh.text.chat import OwnFormat
from expertmesh.text.format import text_format
from expertmesh.text.tokenizer import END_OF_TEXT, ids_of_text, train_tokenizer

WORDS = f"words {END_OF_TEXT} of <s> a </s> 日本 text\n"
BYTE_LEVEL = train_tokenizer([WORDS] * 20, vocab_size=300, marks=("<|user|>",))


@pytest.mark.parametrize("is_text", [True, False], ids=["names are text", "names are tokens"])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, sentencepiece_tokenizer()], ids=["BPE", "<s>"])
def test_short_and_long_texts_have_the_tokenizers_own_tokens(tokenizer, is_text):
    tokenizer.encode_special_tokens = is_text
    for text in ("", "a", WORDS, WORDS * 500):
        assert ids_of_text(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


WAYS = {
    "text": lambda text: text_format(BYTE_LEVEL).prompt_ids(text),
    "chat": lambda text: OwnFormat(BYTE_LEVEL).prompt([{"role": "user", "content": text}]),
}


@pytest.mark.parametrize("encode", WAYS.values(), ids=WAYS)
def test_other_threads_run_while_a_long_text_is_encoded(encode):
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(1e-4):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        encode("ab" * 200_000)
        end = time.perf_counter()
    finally:
        is_over.set()
        thread.join()
    assert sum(begin < tick < end for tick in ticks) > 20
