"""Our GPT as a model of transformers: the same numbers, saved and loaded to the bit, generating and trained by
transformers' own means."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.oracle import numerics
from tests.support.generation import written_ids
from tests.support.real_text import byte_windows
from transformers import AutoModelForCausalLM, StaticCache, Trainer, TrainingArguments

from expertmesh.config.moe import MoEConfig
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.transformers import (
    BalanceExperts,
    ExpertMeshConfig,
    ExpertMeshForCausalLM,
)
from expertmesh.models.gpt.config import ModelConfig


def config_of(**moe):
    moe = MoEConfig(num_experts=(4,), top_k=2, hidden_dim=16, **moe)
    options = {"vocab_size": 256, "max_seq_len": 64, "dim": 32, "num_layers": 2, "num_heads": 2}
    model = ModelConfig(**options, num_kv_heads=1, ffn_hidden_dim=48, init_std=0.1, moe=moe)
    return ExpertMeshConfig(gpt=model, eos_token_id=0, pad_token_id=0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ExpertMeshForCausalLM(config_of(aux_loss_weight=0.3, z_loss_weight=0.1)).eval()


def test_the_loss_is_that_of_the_predicted_tokens_and_of_the_routers(model):
    model = copy.deepcopy(model).double().train()
    ids = torch.randint(1, 256, (2, 9))
    labels = ids.clone()
    labels[0, :4] = -100
    found, plain = model(ids, labels=labels), model.gpt(ids)
    assert torch.equal(found.logits, plain.logits_BSV)
    routers = sum(s.aux_loss + s.z_loss for s in plain.stats)
    assert found.aux_loss == routers > 0.3
    text = F.cross_entropy(plain.logits_BSV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    numerics.assert_close_fp64(found.loss, text + routers, what="loss")
    parts = [model(ids[[i]], labels=labels[[i]], num_items_in_batch=13) for i in (0, 1)]
    own = sum(p.aux_loss * n / 13 for p, n in zip(parts, (5, 8), strict=True))
    numerics.assert_close_fp64(sum(p.loss for p in parts), text + own, what="loss of two parts")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocab", "dim"), [(97, 100), (251, 36), (300, 64)])
def test_loaded_weights_lie_as_those_that_were_saved(vocab, dim, tied, tmp_path):
    """Mapped from a file they begin anywhere, and products of one row round by that."""
    gpt = ModelConfig(**config_of().gpt).updated({"vocab_size": vocab, "dim": dim, "tie_embeddings": tied})
    torch.manual_seed(0)
    model = ExpertMeshForCausalLM(ExpertMeshConfig(gpt=gpt, eos_token_id=0, pad_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    again, _ = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {p.data_ptr() % 64 for p in again.parameters()} == {0}
    ids = torch.randint(1, 90, (2, 1))
    assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_and_loaded_to_the_bit(model, dtype, tmp_path):
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(again) is ExpertMeshForCausalLM and again.config.gpt == model.config.gpt
    for name, tensor in model.state_dict().items():
        kept = torch.float32 if "router" in name else dtype
        assert torch.equal(again.state_dict()[name], tensor.to(kept)), name
        assert again.state_dict()[name].dtype == kept
    assert not again.gpt.layers[0].moe.noise_key.any()


def test_missing_weights_are_refused_by_name(model, tmp_path):
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["gpt.layers.1.moe.experts.w_out"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gpt\.layers\.1\.moe\.experts\.w_out: is missing"):
        ExpertMeshForCausalLM.from_pretrained(tmp_path)


def test_weights_that_stay_on_disk_are_not_missing(tmp_path):
    pytest.importorskip("accelerate")
    gpt = config_of(num_shared_experts=1, shared_gate=True).model
    config = ExpertMeshConfig(gpt=gpt.model_copy(update={"qk_norm": True}))
    model = ExpertMeshForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    where = dict.fromkeys(("gpt.embedding", "gpt.layers.0", "gpt.final_norm"), "cpu")
    again = ExpertMeshForCausalLM.from_pretrained(
        tmp_path, device_map=where | {"gpt.layers.1": "disk"}, offload_folder=tmp_path / "disk"
    )
    assert again.gpt.layers[1].moe.experts.w_in.is_meta
    ids = torch.randint(1, 256, (2, 9))
    with torch.no_grad():
        found, plain, oracle = (one(ids).logits for one in (again, model, copy.deepcopy(model).double()))
    # the norms of queries and keys are not taken in one pass with the rotation
    numerics.assert_two_times(found, plain, oracle, what="logits")
    tied = where | {"gpt.layers.1": "cpu", "gpt.embedding": "disk"}
    tied = ExpertMeshForCausalLM.from_pretrained(tmp_path, device_map=tied, offload_folder=tmp_path / "disk")
    with pytest.raises(ConfigError, match="gpt.embedding rests on the CPU or on disk"):
        tied(ids)


def test_generates_what_our_engine_does_cached_or_not(model):
    prompts = [[5, 9, 200, 31], [77, 8]]
    expected = written_ids(model.gpt, prompts, max_tokens=6)
    ids = torch.tensor([prompts[0], [0, 0, *prompts[1]]])
    how = {"attention_mask": (ids != 0).long(), "max_new_tokens": 6, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}
    for use_cache in (True, False):
        found = model.generate(ids, use_cache=use_cache, **how)
        assert found[:, 4:].tolist() == expected
    assert model.generate(ids, num_beams=2, **how).shape == (2, 10)


def test_what_cannot_work_is_refused_in_one_line(model):
    ids = torch.randint(1, 256, (1, 4))
    with pytest.raises(ConfigError, match="StaticCache has a fixed size"):
        model(ids, past_key_values=StaticCache(model.config, max_cache_len=8))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=r"has shape \(1, 4\); it must be \(1, 5\), .* \(4 tokens in the cache\)"):
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    window = model.gpt.config.max_seq_len
    full = model(torch.ones(1, window, dtype=torch.int64), use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=f"{window + 1} tokens, {window} of them in the cache"):
        model(ids[:, :1], past_key_values=full)
    with pytest.raises(ConfigError, match="labels need the logits"):
        model(ids, labels=ids, logits_to_keep=1)
    with pytest.raises(ConfigError, match="returns no tuples"):
        model(ids, return_dict=False)


def trained(model, folder, *, steps, callbacks=(), **options):
    """The Trainer after some steps, and the validation loss before."""
    data = [{"input_ids": row, "labels": row} for row in byte_windows(32)]
    check = [{"input_ids": row, "labels": row} for row in byte_windows(32, split="validation")[:64]]
    args = TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=steps, seed=0,
        learning_rate=5e-3, per_device_train_batch_size=8, per_device_eval_batch_size=64,
        save_strategy="no", **options,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=check, callbacks=list(callbacks))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, before


def test_the_trainer_learns_real_text(tmp_path):
    pytest.importorskip("accelerate")
    model = ExpertMeshForCausalLM(config_of(aux_loss_weight=0.01))
    names = {"activation_checkpointing", "gradient_checkpointing"} & TrainingArguments.__dataclass_fields__.keys()
    options = {min(names): True}  # versions before 5.23 know the second name alone
    trainer, before = trained(model, tmp_path, steps=20, gradient_accumulation_steps=2, **options)
    assert model.gpt.activation_checkpointing
    after = trainer.evaluate()["eval_loss"]
    assert before - after > 0.3, (before, after)
    trainer.save_model(tmp_path / "out")
    again = ExpertMeshForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_the_trainer_smooths_labels_of_the_next_tokens(tmp_path, caplog):
    """It takes the labels then, and must shift them itself; of the routers' losses it knows nothing."""
    pytest.importorskip("accelerate")
    model, ids = (
        ExpertMeshForCausalLM(config_of(aux_loss_weight=0.3)),
        torch.randint(1, 256, (2, 9)),
    )
    options = {"label_smoothing_factor": 0.1, "use_cpu": True, "report_to": []}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options))
    model.train()
    batch = {"input_ids": ids, "labels": ids.clone()}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(16))
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
    assert sum("without the routers' losses" in message for message in caplog.messages) == 1


def test_the_trainer_moves_balancing_biases(tmp_path):
    pytest.importorskip("accelerate")
    options = {"score_function": "sigmoid", "bias_update_rate": 0.01, "aux_loss_weight": 0.0}
    model = ExpertMeshForCausalLM(config_of(**options))
    trained(model, tmp_path, steps=1, callbacks=[BalanceExperts()])
    for block in model.gpt.layers:
        assert block.moe.expert_bias_E.abs().max() == torch.tensor(0.01)
    with pytest.raises(ConfigError, match="no layer has a balancing bias"):
        trained(ExpertMeshForCausalLM(config_of()), tmp_path, steps=1, callbacks=[BalanceExperts()])
