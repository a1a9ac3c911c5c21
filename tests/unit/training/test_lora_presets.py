"""Which weights a run with adapters trains, and adapters on a model that is loaded in 4 bits (QLoRA)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_posenc import load_extended, verify_model
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.checkpoint.quantised import keep_layout
from hf_posenc.planning.training_memory import predict_training_memory
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training.lora import LoraSettings, add_lora
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.trainer import LongTrainer
from refused_commands import refused
from tiny_models import logits, token_ids
from tiny_runs import SEQ, Build, config

pytestmark = pytest.mark.filterwarnings(
    # bitsandbytes imports torch.jit.
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)


def adapted(model: Any) -> set[str]:
    return {
        name.partition(".lora_A")[0].rpartition("model.")[2] for name, _ in model.named_parameters() if "lora_A" in name
    }


def trainable(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_adapters_on_all_linear_layers_are_those_peft_means(tiny_llama: Build):
    everywhere = add_lora(tiny_llama(), LoraSettings(4, 12, "all-linear", embeddings=False))
    theirs = get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear", r=4, lora_alpha=12))
    assert adapted(everywhere) == adapted(theirs)
    assert len(adapted(everywhere)) == 2 * 7  # q, k, v, o, gate, up, down
    assert trainable(everywhere) == trainable(theirs)  # adapters and nothing else
    attention = add_lora(tiny_llama(), LoraSettings(4, 12, embeddings=False))
    assert {name.split(".")[-1] for name in adapted(attention)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all("lora_" in name for name in trainable(attention))
    whole = add_lora(tiny_llama(), LoraSettings(4, 12, "all-linear"))
    others = {
        name.split(".modules_to_save")[0].rpartition("model.")[2] for name in trainable(whole) if "lora_" not in name
    }
    norms = {f"layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")}
    assert others == {"embed_tokens", "norm", *norms}
    scaling = whole.base_model.model.model.layers[0].mlp.up_proj.scaling
    assert scaling == {"default": 3.0}


def test_tied_embeddings_that_are_not_trained_stay_as_they_are(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = model.model.embed_tokens.weight.detach().clone()
    small = {"token_budget": 4 * SEQ, "eval_documents": 0, "lora": True, "trainable": "all"}
    result = finetune(model, tokenizer, documents, config(tmp_path / "run", lora_embeddings=False, **small))
    assert torch.equal(model.model.embed_tokens.weight, before)
    merged = load_extended(tmp_path / "run").merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    ids = token_ids(100) % 60
    torch.testing.assert_close(logits(merged.eval(), ids), logits(result.model.eval(), ids), rtol=0, atol=1e-5)


@pytest.fixture
def base(tmp_path: Path, tiny_llama: Build, tokenizer: Any) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_qlora_run_learns_saves_and_is_loaded(base: Path, tokenizer: Any):
    model, _ = load_model(base, device="cpu", load_in_4bit=True)
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14
    state = layers[0].weight.quant_state
    assert (state.quant_type, state.nested, layers[0].compute_dtype) == ("nf4", True, torch.float32)
    packed = layers[0].weight.data.clone()
    run = base.parent / "run"
    given = {"output_dir": str(run), "factor": 2.0, "token_budget": 8 * 2 * SEQ, "per_device_train_batch_size": 2}
    recipe = FinetuneConfig.from_recipe("qlora", **given, learning_rate=2e-2, warmup_steps=0, eval_documents=0)
    counting = [torch.arange(1, 11).repeat(20)] * 8  # little enough for adapters on random weights
    result = finetune(model, tokenizer, counting, recipe)
    losses = [line["loss"] for line in read_log(run / "train_log.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    assert torch.equal(layers[0].weight.data, packed)
    assert (read_manifest(run) or {})["context_length"] == 128
    assert "- trainable: all" in (run / "README.md").read_text()

    ids = token_ids(100) % 60
    request = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    again = load_extended(run, quantization_config=request)
    keep_layout(again)
    assert torch.equal(logits(again.eval(), ids), logits(result.model.eval(), ids))
    plain = load_extended(run).eval()  # by default, on the base model as it is
    verify_model(plain)
    assert not any(isinstance(module, Linear4bit) for module in plain.modules())
    difference = (logits(plain, ids) - logits(again, ids)).abs().max()
    assert 0 < difference < 0.5  # what 4 bits lose


def test_adamw_with_states_in_8_bits_learns_and_takes_what_is_predicted(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_llama()
    settings = {"optim": "adamw_bnb_8bit", "eval_documents": 0, "token_budget": 8 * 2 * SEQ, "learning_rate": 2e-2}
    run = config(tmp_path / "run", **settings)
    optimizers: list[Any] = []
    create = LongTrainer.create_optimizer

    def created(trainer: Any, *args: Any) -> Any:
        optimizers.append(create(trainer, *args))
        return optimizers[-1]

    monkeypatch.setattr(LongTrainer, "create_optimizer", created)
    finetune(model, tokenizer, [torch.arange(1, 11).repeat(20)] * 8, run)
    losses = [line["loss"] for line in read_log(tmp_path / "run" / "train_log.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    optimizer = optimizers[0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = {names[id(parameter)]: state["state1"].dtype for parameter, state in optimizer.state.items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.uint8
    assert kinds["model.embed_tokens.weight"] == kinds["model.norm.weight"] == torch.float32
    kept = ("state1", "state2", "absmax1", "absmax2")
    taken = sum(state[name].nbytes for state in optimizer.state.values() for name in kept if name in state)
    assert predict_training_memory(model.config, run.step, SEQ).optimizer == taken
    assert predict_training_memory(model.config, config(tmp_path).step, SEQ).optimizer > 2 * taken


def test_what_4_bits_cannot_be_is_said_before_anything_is_loaded(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_llama: Build
):
    train = ("finetune", base, "--documents", "nowhere", "--output-dir", base.parent / "out", "--load-in-4bit")
    assert "--lora" in refused(capsys, *train)
    assert "--load-in-4bit: a .gguf file" in refused(capsys, "finetune", "m.gguf", *train[2:], "--lora")
    with monkeypatch.context() as patch:
        find_spec = importlib.util.find_spec
        patch.setattr(
            "hf_posenc.checkpoint.quantised.find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name)
        )
        assert "install bitsandbytes" in refused(capsys, *train, "--lora")
        recipe = (*train[:-1], "--recipe", "qlora")
        assert "install bitsandbytes" in refused(capsys, *recipe)
        patch.setattr("hf_posenc.training.conflicts.find_spec", lambda name: None)
        for optim in ("adamw_bnb_8bit", "paged_adamw_32bit", "adamw_8bit"):
            states = (*train[:-1], "--optim", optim)
            assert f"--optim {optim}" in refused(capsys, *states)
    assert "--optim: unknown value 'adam8'." in refused(capsys, *train[:-1], "--optim", "adam8")
    settings = BitsAndBytesConfig(load_in_4bit=True)
    quantised = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings)
    quantised.save_pretrained(base.parent / "quantised")
    with pytest.raises(ValueError, match="--load-in-4bit"):
        load_model(base.parent / "quantised", load_in_4bit=True)
