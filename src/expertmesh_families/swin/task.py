"""Task of Swin Transformers: data, loss and measure of image classification."""

import torch
from torch import Tensor, nn

from expertmesh.data.labels import labels_to_record
from expertmesh.models.task import Baseline, Batch, Data, Loss, Part, Task
from expertmesh.models.token_losses import token_losses
from expertmesh_families.swin.builder import SwinBuilder
from expertmesh_families.swin.config import SwinRunConfig
from expertmesh_families.swin.images import ImageData
from expertmesh_families.swin.model import SwinOutput

_NEIGHBOURS = 5
_MOST_DISTANCES = 1 << 28


class SwinTask(Task):
    """Image classification by a Swin Transformer; evaluated by accuracy."""

    config: SwinRunConfig
    builder_class = SwinBuilder
    _folder_of_class: Tensor

    def prepare(self) -> ImageData:
        """The images; see `ImageData`."""
        model = self.config.model
        data = ImageData(
            self.config.data,
            image_size=model.image_size,
            num_channels=model.num_channels,
            num_classes=model.num_classes,
            seed=self.config.train.seed,
        )
        folders = tuple(dict.fromkeys(data.folder_of_class))
        self.labels = labels_to_record(folders, "folders")
        self._folder_of_class = torch.tensor([folders.index(n) for n in data.folder_of_class])
        return data

    def label_of(self, batch: Batch) -> Tensor:
        """Index (B,) in `labels` of the folder of each image's class."""
        return self._folder_of_class.to(batch[1].device)[batch[1]]

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """Cross-entropy of the classes in nats, with label smoothing; classes of mixed images are weighted."""
        images_BCHW, labels_B, partner_labels_B, weights_B = batch
        index_B = part.token_index(1, images_BCHW.device)
        output: SwinOutput = model(images_BCHW, image_index_B=index_B)
        smoothing = self.config.model.label_smoothing
        own_B, other_B = (
            token_losses(output.logits_BC[None], labels[None], label_smoothing=smoothing)
            for labels in (labels_B, partner_labels_B)
        )
        weights_B = weights_B.to(own_B.dtype)
        return Loss((own_B * weights_B + other_B * (1 - weights_B)).sum(), output.stats)

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """Sums of cross-entropy in nats, of correct classes, and of images."""
        images_BCHW, labels_B, *_ = batch
        logits_BC = model(images_BCHW).logits_BC
        losses_B = token_losses(logits_BC[None], labels_B[None])
        right = (logits_BC.argmax(1) == labels_B).sum()
        return {"loss": losses_B.sum(), "accuracy": right, "items": len(labels_B)}

    def baseline(self, data: Data) -> Baseline | None:
        """Five nearest neighbours by pixels; None if there are too many pairs of images to compare."""
        assert isinstance(data, ImageData)
        found = data.neighbours(_NEIGHBOURS, most_distances=_MOST_DISTANCES)
        if found is None:
            return None
        share = float(found.double().mean())
        return Baseline(f"{_NEIGHBOURS} nearest neighbours by pixels", "nearest neighbours", share)
