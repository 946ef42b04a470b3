"""Builder of encoder-decoders: construction, and interface for translation."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from expertmesh.models.builder import ModelBuilder
from expertmesh.models.decoder import CausalLM, Translation
from expertmesh.text.tokenizer import END_OF_TEXT_ID
from expertmesh_families.seq2seq.config import Seq2SeqRunConfig
from expertmesh_families.seq2seq.model import Seq2Seq
from expertmesh_families.seq2seq.parallel_text import languages_of, tag_id


class Seq2SeqBuilder(ModelBuilder):
    """Builder of a run's encoder-decoder."""

    config: Seq2SeqRunConfig
    is_built_empty = True

    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> Seq2Seq:
        """The whole model on one device, with weights drawn from the run's seed."""
        return Seq2Seq(self.config.model, device=device, dtype=dtype, seed=self.config.train.seed)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers of encoder and decoder."""
        assert isinstance(model, Seq2Seq)
        return [*model.encoder, *model.decoder]

    def decoder(self, model: nn.Module) -> CausalLM:
        """The model itself."""
        assert isinstance(model, Seq2Seq)
        return model

    def translation(self, tokenizer: Any, *, to: str) -> Translation:
        """Special tokens for a target language: sources begin with its tag, outputs with the end of text."""
        languages = languages_of(tokenizer)
        return Translation(
            before=(tag_id(languages, to),),
            after=(END_OF_TEXT_ID,),
            start=(END_OF_TEXT_ID,),
            end_id=END_OF_TEXT_ID,
        )
