"""A byte-level tokenizer: a token for each byte, then special tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

MARKS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|begin|>")


def byte_tokenizer(marks=MARKS, *, start=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    if start is not None:
        pair = (start, found.token_to_id(start))
        found.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[pair])
    return found
