"""GPT as a transformers model: saved, loaded, generated from and trained with transformers' API; nothing is
downloaded."""

import logging
from collections.abc import Mapping
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
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from expertmesh.config.base import saved_run
from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.transformers.check_call import IGNORED, check_call
from expertmesh.integrations.transformers.past_key_values import SequencesOf
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.token_losses import token_losses
from expertmesh.models.vocabulary import resize_vocabulary
from expertmesh.runs.open import open_model
from expertmesh.training.routing_losses import routing_losses

_ROWS = Number(1, fix="leave it out to change nothing", types=WHOLE, optional=True)
_log = logging.getLogger("expertmesh.integrations")


class ExpertMeshConfig(PreTrainedConfig):
    """Transformers configuration of our GPT.

    Args:
        gpt: options by name, or a `ModelConfig`; None: defaults. Transformers' names (hidden_size, ...) are derived
            from them.
        **kwargs: further options of transformers, such as `eos_token_id`.

    Raises:
        ConfigError: an option breaks a rule.
    """

    model_type = "expertmesh_gpt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache", "aux_loss"]
    gpt: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Derive transformers' options from ours."""
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
            "tie_word_embeddings": False,  # our tied matrix is a single parameter
        }
        super().__post_init__(**{**kwargs, **usual})

    @property
    def model(self) -> ModelConfig:
        """Configuration of the GPT."""
        with saved_run():
            return ModelConfig.model_validate(self.gpt)


ExpertMeshOutput = MoeCausalLMOutputWithPast
"""Output of a forward pass: transformers' own, whose field of the cache follows its version."""
_CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
"""Name of an output's cache, which transformers 5.24 renamed."""
_ALIGNED_BYTES = 64
"""Alignment of CPU tensors that torch allocates."""


class ExpertMeshForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT with the interface of transformers' models.

    `save_pretrained`, `from_pretrained`, `generate` (any strategy, with a growing cache) and `Trainer` are
    transformers' own. Importing this module registers the class with `AutoModelForCausalLM`.

    Args:
        config: configuration of the model.
        gpt: model to wrap, of the same configuration; None: a new one, initialized from torch's default generator.

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
    def from_run(cls, run: str | Path, *, dtype: torch.dtype | None = None) -> "ExpertMeshForCausalLM":
        """Model of a run with the weights of its newest good checkpoint, and the run's end-of-text tokens.

        Args:
            run: a run directory, or a folder saved by transformers.
            dtype: dtype of the parameters (the router stays FP32); None: the checkpoint's.

        Raises:
            ConfigError: the path is not a run directory, or not of a GPT.
            CheckpointError: the run has no usable checkpoint, or no tokenizer.
        """
        opened = open_model(run, dtype=dtype)
        model = opened.model
        if not isinstance(model, GPT):
            raise ConfigError(f"run {run}: is of family {opened.run.family.name}; transformers' door takes a gpt")
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
        cache: Cache | None = None,
        **unused: Any,
    ) -> ExpertMeshOutput:
        """Forward pass. With a mask it synchronizes with the device, to see whether anything is masked.

        Arguments are checked before anything is computed or stored: shapes, dtypes and devices always, values on CPUs
        only.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, tokens in the cache + S) zeros and ones, 0 for padding; None: no padding.
            past_key_values: a growing cache with the preceding tokens; these tokens are appended.
            labels: (B, S) integers, usually input_ids; the model shifts them. -100: not predicted.
            use_cache: create a cache if none is given.
            logits_to_keep: number of last positions with logits; 0: all.
            num_items_in_batch: with labels, predicted tokens of the whole batch, of which this call is a part; None:
                this call is the batch.
            return_dict: passed by transformers; must not be False.
            capacity_factor: capacity factor of all MoE layers for this call; inf: dropless; None: their own.
            cache: past_key_values by its name from transformers 5.24 on.
            **unused: arguments that peft and others pass to every model; must be None or False.

        Returns:
            loss (scalar: mean over the predicted tokens, in training plus the routing losses), aux_loss (scalar:
            weighted balance and z-losses of all layers; None for a dense model), logits (B, S, V) or of the last
            positions, cache.

        Raises:
            ConfigError: an argument has a wrong shape, dtype, device or range; there are too many tokens; the cache has
                a fixed size or is of another model or other sequences; labels are given with logits_to_keep; an
                argument is unsupported; or device_map leaves a tied embedding without a device.
        """
        past_key_values = cache if past_key_values is None else past_key_values
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
                "device_map: gpt.embedding rests on the CPU or on disk, and is the output projection, too "
                "(tie_embeddings); give it a device that computes"
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
        of_cache: dict[str, Any] = {_CACHE: past_key_values}
        return ExpertMeshOutput(loss=loss, aux_loss=aux_loss, logits=output.logits_BSV, **of_cache)

    def _loss(
        self,
        logits_BSV: Tensor,
        labels_BS: Tensor,
        aux_loss: Tensor | None,
        num_items: Tensor | int | None,
    ) -> Tensor:
        """Next-token cross-entropy, in training plus the routing losses weighted by this call's share of the batch."""
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
        """Warn once that Trainer computes the loss itself, without the routing losses."""
        weights = self.config.model.moe.aux_loss_weight, self.config.model.moe.z_loss_weight
        if self.training and any(weights) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Trainer takes the loss itself (label_smoothing_factor or compute_loss_func), without the routers' "
                "losses: leave it to the model, add outputs.aux_loss in a compute_loss_func, or balance by "
                "bias_update_rate"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with transformers' implementation, in evaluation mode (restored afterwards) and dropless.

        A row's text therefore equals `expertmesh.generate`'s, and does not depend on other rows, with two exceptions:
        max_capacity_factor bounds the rows of an expert, and expert-choice routers choose among the tokens of a call. A
        finished row is still among these tokens here, but not in `expertmesh.generate`.

        Raises:
            ConfigError: see `forward`; also if the new tokens exceed the model's maximum length.
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
        """Arguments of `forward` for a generation step, from transformers, with a dropless capacity factor."""
        theirs: Any = super()
        found = theirs.prepare_inputs_for_generation(*args, **kwargs)
        return {"capacity_factor": self.gpt.config.moe.dropless_factor, **found}

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """Lengths of a generation, from transformers.

        Raises:
            ConfigError: they exceed the model's maximum length.
        """
        theirs: Any = super()
        found = theirs._prepare_generated_length(*args, **kwargs)
        window = self.gpt.max_seq_len
        if found.max_length is not None and found.max_length > window:
            asked = "max_length" if found.max_new_tokens is None else "max_new_tokens"
            raise ConfigError(
                f"{asked}={getattr(found, asked)}: a sequence of {found.max_length} tokens passes the model's "
                f"max_seq_len={window}; shorten the prompt, or ask for fewer"
            )
        return found

    def get_input_embeddings(self) -> nn.Module:
        """Token embedding."""
        return self.gpt.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Unsupported: the vocabulary belongs to the configuration.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"vocab_size={self.config.vocab_size}: the embedding of a GPT of expertmesh is no module to replace; use "
            "resize_token_embeddings(), or copy into its weight"
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Unsupported; see `set_input_embeddings`."""
        self.set_input_embeddings(new_embeddings)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, with aligned CPU weights.

        transformers memory-maps files, where a weight starts at any byte, and rounding of matmuls depends on the
        alignment of their operands: without alignment the model would differ in the last bit from the saved one.
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
        """Resize the vocabulary, tied or not; on an error nothing is changed.

        Args:
            new_num_tokens: new size; rows are added or removed at the end. None: unchanged.
            pad_to_multiple_of: the size is rounded up to a multiple of this.
            mean_resizing: new rows are the mean of the old ones; else N(0, init_std^2).

        Returns:
            The embedding.

        Raises:
            ConfigError: a number breaks a rule, a special token id (`eos_token_id`, ...) would have no row, or the
                model is sharded or wrapped.
        """
        for name, value in (
            ("new_num_tokens", new_num_tokens),
            ("pad_to_multiple_of", pad_to_multiple_of),
        ):
            _ROWS.check(name, value)
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
        """Projection to the vocabulary; for a tied model, the embedding."""
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
        """Initialize buffers that no file holds (noise keys) to zero after loading; any other missing tensor is an
        error."""
        if self._draws_itself:
            return
        tensors: Mapping[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is None or tensor.is_meta or getattr(tensor, "_is_hf_initialized", False):
                continue  # on the meta device: offloaded to disk
            if name in module._non_persistent_buffers_set:
                tensor.zero_()
                continue
            where = next(path for path, one in self.named_modules() if one is module)
            raise CheckpointError(
                f"{where}.{name}: is missing in the files of the weights; restore them, or use the config.json of "
                "these files"
            )


# With label_smoothing_factor Trainer computes the loss, and shifts labels only for models in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ExpertMeshConfig.model_type] = ExpertMeshForCausalLM.__name__
AutoConfig.register(ExpertMeshConfig.model_type, ExpertMeshConfig, exist_ok=True)
AutoModelForCausalLM.register(ExpertMeshConfig, ExpertMeshForCausalLM, exist_ok=True)
