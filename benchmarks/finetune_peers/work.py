"""The work that both sides get: a model of Qwen3-30B-A3B's sizes, its data, the adapters, and one clock for the steps.
No torch."""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 8, 512
RANK, ALPHA = 8, 16.0
LENGTH, ROWS = 256, 4
PROMPT, ANSWER, PROMPTS, GROUP = 48, 16, 4, 4
"""Reinforcement learning: tokens of a prompt and of an answer, prompts per step, answers to each."""
OBJECTIVES = ("sft", "dpo", "grpo")
SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
REWARDS = '''"""A reward that needs no model."""


def early(completion_ids, **kwargs):
    """The share of tokens among the first hundred."""
    return [sum(i < 100 for i in ids) / max(len(ids), 1) for ids in completion_ids]
'''
END = "<|endoftext|>"


def make(folder: Path) -> None:
    """Write model, tokenizer, data and rewards, unless they are there."""
    if (folder / "rewards.py").exists():
        return
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, eos_token_id=256, bos_token_id=None))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    for objective in OBJECTIVES:
        lines = "\n".join(json.dumps(one) for one in records(objective, 200))
        (folder / f"{objective}.jsonl").write_text(lines)
    (folder / "rewards.py").write_text(REWARDS)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes, and the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def records(objective: str, count: int, length: int = LENGTH) -> list[dict[str, str]]:
    """Records of plain texts: a token is a byte, and each row has all of its tokens."""
    draw = random.Random(objective)

    def text(size: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=size))

    if objective == "grpo":
        return [{"prompt": text(PROMPT)} for _ in range(count)]
    sides = ("completion",) if objective == "sft" else ("chosen", "rejected")
    answer = length - PROMPT - 1  # and the end
    return [{"prompt": text(PROMPT)} | {one: text(answer) for one in sides} for _ in range(count)]


class Gate:
    """Waits between steps for the other side's turn, and measures each step: CPU time of the process, and its peak
    memory."""

    def __init__(self) -> None:
        self.level = _resident()  # of the libraries alone, as nothing is loaded yet
        self.began = 0.0

    def between(self, loss: float | None) -> None:
        """Report the step that has ended, and wait for the next one."""
        spent = time.process_time() - self.began
        self._say(cpu_s=spent, peak=_peak() - self.level, loss=loss)
        self._wait()

    def ready(self) -> None:
        """Report that all is loaded, and wait for the first step."""
        self._say(loaded=_resident() - self.level)
        self._wait()

    def _say(self, **values: float | None) -> None:
        print("@" + json.dumps(values), file=sys.__stdout__, flush=True)

    def _wait(self) -> None:
        sys.__stdin__.readline()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.began = time.process_time()


def _resident() -> int:
    """Resident bytes, mapped files left out."""
    return _status("VmRSS") - _status("RssFile")


def _peak() -> int:
    """Largest resident bytes since the last wait, mapped files left out."""
    return _status("VmHWM") - _status("RssFile")


def _status(name: str) -> int:
    """Bytes of a line of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def worker(run: Callable[[Gate, str, Path, int], None], objective: str, folder: Path) -> None:
    """Run one side in a process of its own, with one thread, until it is killed."""
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    run(Gate(), objective, folder, 1000)
