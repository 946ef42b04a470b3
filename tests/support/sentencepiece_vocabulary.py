"""A tokenizer as Mixtral's: blanks are U+2581, single bytes are tokens, and a text begins with <s>."""

from tokenizers import Tokenizer, decoders, models, normalizers, processors

START, END = 1, 2


def sentencepiece_tokenizer() -> Tokenizer:
    """290 tokens: three special ones, the bytes, letters, and a letter behind a blank."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_, "▁", *"abcdefghijklmnopqrstuvwxyz", "▁w"]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "w")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", START)]
    )
    return tokenizer
