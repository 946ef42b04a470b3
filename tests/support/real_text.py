"""Real text that is always there: the project's own pages, as bytes in windows."""

from pathlib import Path

import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"


def byte_windows(length, *, split="train"):
    """(windows, length) int64 bytes of pages; those of the validation split are of other pages.

    In an order of chance, so that the first of them are from everywhere: a page may begin with a drawing.
    """
    pages = sorted(DOCS.glob("*.md"))
    chosen = pages[::8] if split == "validation" else [p for p in pages if p not in pages[::8]]
    text = b"".join(page.read_bytes() for page in chosen)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = ids[: len(ids) // length * length].view(-1, length)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
