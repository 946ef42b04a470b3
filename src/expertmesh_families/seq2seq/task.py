"""Task of encoder-decoders: data, loss and measure of translation and denoising."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from expertmesh.data.labels import labels_to_record
from expertmesh.models.task import Batch, Loss, Part, Task
from expertmesh.models.token_losses import token_losses
from expertmesh.parallel.ranks import Ranks
from expertmesh.text.tokenizer import END_OF_TEXT_ID
from expertmesh_families.seq2seq.builder import Seq2SeqBuilder
from expertmesh_families.seq2seq.config import Seq2SeqRunConfig
from expertmesh_families.seq2seq.data import TranslationData
from expertmesh_families.seq2seq.model import Seq2SeqOutput


class Seq2SeqTask(Task):
    """Translation and denoising by an encoder-decoder; evaluated by the loss of translations."""

    config: Seq2SeqRunConfig
    builder_class = Seq2SeqBuilder
    measures_items = True
    _directions: tuple[str, ...] = ()

    def prepare(self) -> TranslationData:
        """Parallel text as tokens; see `TranslationData`."""
        model = self.config.model
        data = TranslationData(
            self.config.data,
            vocab_size=model.vocab_size,
            max_source_len=model.max_source_len,
            max_target_len=model.max_seq_len,
            seed=self.config.train.seed,
        )
        self._directions = data.directions
        self.labels = labels_to_record(data.tasks, "directions")
        return data

    def num_items(self, batch: Batch) -> int:
        """Number of target tokens, ends of texts included."""
        return int(batch[3].sum())

    def num_routed(self, batch: Batch, ranks: Ranks) -> list[int]:
        """Source tokens for each MoE layer of the encoder, target tokens for each of the decoder."""
        sides = zip(self.config.model.experts_per_layer(), (batch[1], batch[3]), strict=True)
        return [int(lengths_B.sum()) for layers, lengths_B in sides for n in layers if n]

    def label_of(self, batch: Batch) -> Tensor:
        """Index (B,) of each sample's task: a direction, or the language of a text to denoise."""
        found: Tensor = batch[4]
        return found

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """Cross-entropy of the target tokens in nats, smoothed over the vocabulary."""
        output, targets_N, _ = self._forward(model, batch, part)
        losses_N = token_losses(
            output.logits_NV[None],
            targets_N[None],
            label_smoothing=self.config.model.label_smoothing,
            overwrite_logits=True,
        )
        return Loss(losses_N.sum(), output.stats)

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """Sums of cross-entropy in nats and of target tokens, in total and for each direction."""
        output, targets_N, rows_N = self._forward(model, batch, part)
        losses_N = token_losses(output.logits_NV[None], targets_N[None])
        _, _, _, lengths_B, tasks_B = batch
        count = len(self._directions)
        nats = losses_N.new_zeros(count).index_add_(0, tasks_B[rows_N], losses_N)
        items = lengths_B.new_zeros(count).index_add_(0, tasks_B, lengths_B)
        found: dict[str, Tensor | float] = {"nats": losses_N.sum(), "items": len(losses_N)}
        for index, name in enumerate(self._directions if count > 1 else ()):
            found[f"nats_{name}"], found[f"items_{name}"] = nats[index], items[index]
        return found

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean cross-entropy per target token in nats, over all validation samples and for each direction."""
        found = {"loss": sums["nats"] / sums["items"]}
        for name in self._directions:
            if sums.get(f"items_{name}"):
                found[f"loss_{name}"] = sums[f"nats_{name}"] / sums[f"items_{name}"]
        return found

    def _forward(self, model: nn.Module, batch: Batch, part: Part) -> tuple[Seq2SeqOutput, Tensor, Tensor]:
        """Model output, the N target tokens to predict, and the batch row of each."""
        source_BS, source_lengths_B, target_BS, target_lengths_B, _ = batch
        device = source_BS.device
        source_mask_BS, target_mask_BS = (
            torch.arange(ids.shape[1], device=device) < lengths[:, None]
            for ids, lengths in ((source_BS, source_lengths_B), (target_BS, target_lengths_B))
        )
        num_targets = part.num_items
        if num_targets is None:
            num_targets = int(target_lengths_B.sum())
        # the n-th target token is where the running count of the mask reaches n, found without a device synchronisation
        ordinals_N = torch.arange(1, num_targets + 1, device=device)
        places_N = torch.searchsorted(target_mask_BS.flatten().cumsum(0), ordinals_N)
        start_B1 = torch.full_like(target_BS[:, :1], END_OF_TEXT_ID)
        output = model(
            source_BS,
            torch.cat((start_B1, target_BS[:, :-1]), 1),
            source_mask_BS=source_mask_BS,
            target_mask_BS=target_mask_BS,
            source_index_T=part.token_index(source_BS.shape[1], device),
            target_index_T=part.token_index(target_BS.shape[1], device),
            target_places_N=places_N,
        )
        return output, target_BS.flatten()[places_N], places_N // target_BS.shape[1]
