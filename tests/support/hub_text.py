"""Tiny folders of the hub with a byte-level tokenizer, which puts something before a text or nothing."""

import json

from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hub_models import tiny_model


def chats_file(path, answer="{n}", count=40):
    """A file of conversations of two turns, whose answers differ."""
    ask = {"role": "user", "content": "say"}
    talks = ([ask, {"role": "assistant", "content": answer.format(n=n)}] for n in range(count))
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    return path


def hub_folder(folder, name="qwen3_moe", *, tokenizer=None, options=None, **changes):
    """A model of the hub with a tokenizer; its config has no start."""
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    end = tokenizer.token_to_id("<|endoftext|>")
    small = {"num_experts": 4, "top_k": 2, "vocab_size": 264, "eos_token_id": end} | changes
    tiny_model(name, **small).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | (options or {})))
    return folder
