"""Our GPT as a model of transformers: saved, loaded, generating and trained by transformers' own means; nothing is downloaded."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from expertmesh.config.base import saved_run
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.transformers.check_call import IGNORED, check_call
from expertmesh.integrations.transformers.past_key_values import SequencesOf
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.inputs import check_count
from expertmesh.models.token_losses import token_losses
from expertmesh.models.vocabulary import resize_vocabulary
from expertmesh.runs.open import open_model
from expertmesh.training.routing_losses import routing_losses

_log = logging.getLogger("expertmesh.integrations")


class ExpertMeshConfig(PreTrainedConfig):
    """The configuration of a GPT of ours, as transformers keeps one.

    Args:
        gpt: our options by name, or a `ModelConfig`; None: the default ones. The usual names (hidden_size, ...) follow from them.
        **kwargs: whatever transformers knows beside them, such as `eos_token_id`.

    Raises:
        ConfigError: an option breaks a rule.
    """

    model_type = "expertmesh_gpt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "aux_loss"]
    gpt: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Works out what transformers calls our options."""
        with saved_run():
            model = ModelConfig.model_validate({} if self.gpt is None else self.gpt)
        self.gpt = model.model_dump(mode="json")
        usual = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_size,
            "max_position_embeddings": model.max_seq_len,
            "tie_word_embeddings": False,  # a tied matrix is one parameter of ours
        }
        super().__post_init__(**{**kwargs, **usual})

    @property
    def model(self) -> ModelConfig:
        """Our configuration."""
        with saved_run():
            return ModelConfig.model_validate(self.gpt)


@dataclass
class ExpertMeshOutput(ModelOutput):
    """What a forward pass returns.

    Attributes:
        loss: scalar with labels: cross-entropy, and in training the routers' losses beside it.
        logits: (B, S, V), or of the last positions only.
        past_key_values: the cache, where one was asked for.
        aux_loss: scalar, the routers' share of the training loss: balance and z-losses of all layers, weighted; None for a dense model.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    aux_loss: Tensor | None = None


_ALIGNED_BYTES = 64
"""Of the memory that torch gives tensors on CPUs."""


class ExpertMeshForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT of ours behind the interface of transformers' models.

    `save_pretrained`, `from_pretrained`, `generate` (any strategy, with a growing cache) and `Trainer` are transformers' own.
    `AutoModelForCausalLM` finds the class once this module has been imported.

    Args:
        config: of the model.
        gpt: the model to wrap, of the same configuration; None: a new one, drawn from torch's default generator.

    Raises:
        ConfigError: an option breaks a rule.

    Example:
        >>> model = ExpertMeshForCausalLM.from_run("runs/text")
        >>> model.save_pretrained("text-gpt")
        >>> model = ExpertMeshForCausalLM.from_pretrained("text-gpt")
    """

    config_class = ExpertMeshConfig
    base_model_prefix = "gpt"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = ["router", "expert_bias_E"]
    _supports_sdpa = True

    def __init__(self, config: ExpertMeshConfig, gpt: GPT | None = None) -> None:
        super().__init__(config)
        self.gpt = GPT(config.model) if gpt is None else gpt
        self._has_warned = False
        self._draws_itself = self.gpt.device.type != "meta"
        self.post_init()

    @classmethod
    def from_run(
        cls, run: str | Path, *, dtype: torch.dtype | None = None
    ) -> "ExpertMeshForCausalLM":
        """The model of a run of ours, with the weights of its newest good checkpoint, that ends a text by the run's tokens.

        Args:
            run: the run directory, or a folder as transformers saves one.
            dtype: of the parameters (the router keeps FP32); None: as the checkpoint has them.

        Raises:
            ConfigError: this is no run directory, or not of a GPT.
            CheckpointError: it has no usable checkpoint, or no tokenizer.
        """
        opened = open_model(run, dtype=dtype)
        model = opened.model
        if not isinstance(model, GPT):
            raise ConfigError(
                f"run {run}: is of family {opened.run.family.name}; transformers' door takes a gpt"
            )
        text = opened.text
        first = text.start_ids[0] if text.start_ids else None
        ids: dict[str, Any] = {"bos_token_id": first, "eos_token_id": list(text.end_ids)}
        return cls(ExpertMeshConfig(gpt=model.config, **ids), model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        capacity_factor: float | None = None,
        **unused: Any,
    ) -> ExpertMeshOutput:
        """One pass. Synchronises with the device where a mask is given, to see whether it masks anything.

        Arguments are checked before anything is computed or kept: shapes, types and devices everywhere, values on CPUs only.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, tokens in the cache + S) zeros and ones, 0 for padding; None: there is none.
            past_key_values: a growing cache with the tokens before these; gets those of these.
            labels: (B, S) integers, input_ids as a rule; the model shifts them. -100: not predicted.
            use_cache: make a cache if there is none.
            logits_to_keep: only the last so many positions get logits; 0: all.
            num_items_in_batch: predicted tokens of the whole batch, of which this call sees a part; None: this is all of it. With labels.
            return_dict: not False; transformers passes it.
            capacity_factor: of all MoE layers, for this call only; inf: dropless; None: theirs.
            **unused: what peft and others pass to every model, None or False.

        Returns:
            Loss (mean over the predicted tokens; in training plus the routers' share), logits, cache.

        Raises:
            ConfigError: an argument of another shape, type, device or range, too many tokens, a cache of a fixed size, of another model or
                of other sequences, labels beside logits_to_keep, an argument that this model has not, or a tied embedding that a
                device_map has left without a device.
        """
        check_call(
            self.gpt.config,
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch,
            return_dict=return_dict,
            unused=unused,
        )
        assert input_ids is not None
        if self.gpt.output is None and self.gpt.embedding.weight.is_meta and not input_ids.is_meta:
            raise ConfigError(
                "device_map: gpt.embedding rests on the CPU or on disk, and is the output projection, too (tie_embeddings); give it a "
                "device that computes"
            )
        mask_BK = None if attention_mask is None else attention_mask.bool()
        if mask_BK is not None and bool(mask_BK.all()):
            mask_BK = None
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        context = None
        if past_key_values is not None:
            context = SequencesOf(past_key_values, mask_BK).begin(
                input_ids.shape[1],
                device=input_ids.device,
                counts_padding=self.gpt.counts_padding,
            )
        output = self.gpt(
            input_ids,
            token_mask_BS=None if mask_BK is None else mask_BK[:, -input_ids.shape[1] :],
            context=context,
            num_logits=logits_to_keep or None,
            capacity_factor=capacity_factor,
        )
        loss: Tensor | None = None
        aux_loss: Tensor | None = None
        if output.stats:
            balance, z = routing_losses(output.stats, output.logits_BSV)
            aux_loss = balance + z
        if labels is None and num_items_in_batch is not None and aux_loss is not None:
            self._warn_of_loss()
        if labels is not None:
            loss = self._loss(output.logits_BSV, labels, aux_loss, num_items_in_batch)
        return ExpertMeshOutput(loss, output.logits_BSV, past_key_values, aux_loss)

    def _loss(
        self,
        logits_BSV: Tensor,
        labels_BS: Tensor,
        aux_loss: Tensor | None,
        num_items: Tensor | int | None,
    ) -> Tensor:
        """Of the tokens that follow, and in training of the routers by this part's share of the batch."""
        targets_BS = nn.functional.pad(labels_BS[:, 1:].long(), (0, 1), value=IGNORED)
        is_target_T = (targets_BS != IGNORED).flatten()
        losses_T = token_losses(logits_BSV, targets_BS.clamp(min=0))
        total = torch.where(is_target_T, losses_T, 0).sum()
        count = is_target_T.sum()
        whole = count.clamp(min=1) if num_items is None else num_items
        whole = whole.to(total.device) if isinstance(whole, Tensor) else whole
        loss = total / whole
        if aux_loss is None or not self.training:
            return loss
        return loss + aux_loss.to(loss) * count / whole

    def _warn_of_loss(self) -> None:
        """Say once that Trainer takes the loss itself."""
        weights = self.config.model.moe.aux_loss_weight, self.config.model.moe.z_loss_weight
        if self.training and any(weights) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Trainer takes the loss itself (label_smoothing_factor or compute_loss_func), without the routers' losses: leave it "
                "to the model, add outputs.aux_loss in a compute_loss_func, or balance by bias_update_rate"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate by transformers' means, in evaluation mode (the mode before is put back), and without drops for a capacity.

        So a row says what `expertmesh.generate` says, and what it says alone, with the two exceptions that hold there as well:
        max_capacity_factor bounds the rows of an expert, and experts that choose (expert_choice) do so among the tokens of a call.
        A row that has ended still counts among these here, and not there.

        Raises:
            ConfigError: as `forward`, and at once where the new tokens have no room in the model's window.
        """
        theirs: Any = super()
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            return theirs.generate(*args, **kwargs)
        finally:
            for module, mode in modes:
                module.training = mode

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a step's `forward`, as transformers makes them; no token is to be dropped in it."""
        theirs: Any = super()
        found = theirs.prepare_inputs_for_generation(*args, **kwargs)
        return {"capacity_factor": self.gpt.config.moe.dropless_factor, **found}

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """The lengths of a generation, as transformers finds them.

        Raises:
            ConfigError: they pass the model's window.
        """
        theirs: Any = super()
        found = theirs._prepare_generated_length(*args, **kwargs)
        window = self.gpt.max_seq_len
        if found.max_length is not None and found.max_length > window:
            asked = "max_length" if found.max_new_tokens is None else "max_new_tokens"
            raise ConfigError(
                f"{asked}={getattr(found, asked)}: a sequence of {found.max_length} tokens passes the model's max_seq_len={window}; "
                "shorten the prompt, or ask for fewer"
            )
        return found

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.gpt.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """The vocabulary belongs to the configuration.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"vocab_size={self.config.vocab_size}: the embedding of a GPT of expertmesh is no module to replace; use "
            "resize_token_embeddings(), or copy into its weight"
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """As `set_input_embeddings`."""
        self.set_input_embeddings(new_embeddings)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; weights on CPUs lie as those of a new model do.

        transformers maps files into memory, where a weight begins at any byte, and products round by where their
        operands begin: the model would differ by a last bit from the one that was saved.
        """
        found = super().from_pretrained(*args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNED_BYTES:
                tensor.data = tensor.data.clone()
        return found

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Give the model another number of tokens, tied or not; nothing is changed where this is refused.

        Args:
            new_num_tokens: rows are added at the end, or taken from there; None: as many as there are.
            pad_to_multiple_of: the number is raised to a multiple of this.
            mean_resizing: new rows are the mean of the old ones; else they are N(0, init_std^2).

        Returns:
            The embedding.

        Raises:
            ConfigError: a number breaks a rule, an id with a meaning (`eos_token_id`, ...) would have no row, or the model is spread or wrapped.
        """
        for name, value in (
            ("new_num_tokens", new_num_tokens),
            ("pad_to_multiple_of", pad_to_multiple_of),
        ):
            if value is not None:
                check_count(name, value, least=1, fix="leave it out to change nothing")
        size = self.gpt.vocab_size if new_num_tokens is None else new_num_tokens
        size += -size % (pad_to_multiple_of or 1)
        for config in (self.config, self.generation_config):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                value = getattr(config, name, None)
                ids = value if isinstance(value, list) else [value]
                if any(isinstance(one, int) and one >= size for one in ids):
                    raise ConfigError(
                        f"new_num_tokens={size}: leaves no row for {name}={value}; keep more, or change {name} first"
                    )
        resize_vocabulary(self.gpt, size, from_mean=mean_resizing)
        self.config.gpt = self.gpt.config.model_dump(mode="json")
        self.config.vocab_size = size
        return self.gpt.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The projection to the vocabulary; of a tied model the embedding."""
        return self.gpt.embedding if self.gpt.output is None else self.gpt.output

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = None,
        every_n_layers: int = 1,
    ) -> None:
        self.gpt.set_activation_checkpointing(enable)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """After loading, what no file holds: noise keys begin at zero, and nothing else may be missing."""
        if self._draws_itself:
            return
        tensors: Mapping[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is None or tensor.is_meta or getattr(tensor, "_is_hf_initialized", False):
                continue  # on "meta": in the files, and to stay on disk
            if name in module._non_persistent_buffers_set:
                tensor.zero_()
                continue
            where = next(path for path, one in self.named_modules() if one is module)
            raise CheckpointError(
                f"{where}.{name}: is missing in the files of the weights; restore them, or use the config.json of these files"
            )


# Trainer shifts labels for models of this table alone where it takes the loss itself (label_smoothing_factor).
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ExpertMeshConfig.model_type] = ExpertMeshForCausalLM.__name__
AutoConfig.register(ExpertMeshConfig.model_type, ExpertMeshConfig, exist_ok=True)
AutoModelForCausalLM.register(ExpertMeshConfig, ExpertMeshForCausalLM, exist_ok=True)
