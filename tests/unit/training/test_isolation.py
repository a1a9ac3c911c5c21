"""Models whose layers see tokens without a mask: packing is refused by structure, and the advice trains right."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from hf_posenc import FinetuneConfig, finetune
from hf_posenc.cli.main import main
from hf_posenc.errors import InvalidRequestError, RunStoppedError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.unmasked_layers import unmasked_layers
from hf_posenc.planning import plan, plan_text
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.start_checks import probe_isolation
from tiny_runs import SEQ, make_tokenizer
from training_blocks import blocks_of_a_run

SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
LINEAR: dict[str, Any] = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 0, "mlp_only_layers": [0, 1]}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 32}
HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_multiple_of=16),
    "falcon_h1": lambda: FalconH1Config(**SIZES, **MAMBA, head_dim=16),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES, **LINEAR, head_dim=16, layer_types=["linear_attention", "full_attention"]
    ),
}
UNMASKED = {"lfm2": {"conv": 1}, "falcon_h1": {"hybrid": 2}, "qwen3_next": {"linear_attention": 1}}
# Where these modules write: nearly nothing passes through them if it is small.
OUTPUTS = ("conv.out_proj", "mamba.out_proj", "linear_attn.out_proj")


def build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    return model


def documents() -> list[torch.Tensor]:
    """Shorter than a block, of one block, and of several."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 128, (n,), generator=generator) for n in (40, SEQ - 1, 300, 70, 2 * SEQ)]


def run_in(folder: Path, **changes: Any) -> FinetuneConfig:
    given: dict[str, Any] = {"factor": 2.0, "token_budget": 4 * SEQ, "learning_rate": 1e-3, "eval_documents": 0}
    return FinetuneConfig(str(folder), **{**given, **changes})


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_the_probe_is_not_misled_by_weak_weights(family: str, scale: float) -> None:
    model = build(HYBRIDS[family]())
    with torch.no_grad():
        written = [module for name, module in model.named_modules() if name.endswith(OUTPUTS)]
        for module in written:
            module.weight.mul_(scale)
    assert written
    with pytest.raises(RunStoppedError, match=r"packing=False\.") as caught:
        probe_isolation(RotaryModel(model))
    assert "per_device_train_batch_size" not in str(caught.value)  # which is 1, as the attention is SDPA
    assert "sdpa'" not in str(caught.value).partition("Try ")[2]
    assert probe_isolation(RotaryModel(model), packed=False) == 0


def test_attention_alone_is_kept_apart_to_the_last_bit() -> None:
    for config in (LlamaConfig(**SIZES), Lfm2Config(**SIZES, layer_types=["full_attention"] * 2)):
        rotary = RotaryModel(build(config))
        assert (unmasked_layers(rotary), probe_isolation(rotary, 2)) == ({}, 0)


@pytest.mark.parametrize("family", HYBRIDS)
def test_packing_is_refused_before_training_and_the_advice_trains_each_document_as_if_alone(
    family: str, tmp_path: Path
) -> None:
    model = build(HYBRIDS[family]())
    assert unmasked_layers(RotaryModel(model)) == UNMASKED[family]
    with pytest.raises(InvalidRequestError, match=r"Give packing=False"):
        finetune(model, make_tokenizer(), documents(), run_in(tmp_path / "packed"))
    assert not (tmp_path / "packed").exists()
    steps = 4
    finetune(model, make_tokenizer(), documents(), run_in(tmp_path / "run", packing=False))
    assert len(read_log(tmp_path / "run" / "train_log.jsonl")) == steps


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_loss_of_a_padded_block_is_that_of_its_document(family: str) -> None:
    model = build(HYBRIDS[family]()).eval()
    blocks = blocks_of_a_run([documents()[0]], SEQ, 1, one_document=True)
    block = {name: value[None] for name, value in blocks[0].items()}
    alone = documents()[0][None]
    with torch.no_grad():
        expected = model(input_ids=alone, labels=alone).loss
        with chunked_lm_loss(model):
            assert model(**block).loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_command_line_refuses_without_weights_and_runs_what_plan_prints(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = tmp_path / "model", tmp_path / "text.txt"
    build(HYBRIDS[family]()).save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    text.write_text(" ".join(f"w{1 + i * 7919 % 127}" for i in range(600)))
    weights = source / "model.safetensors"
    hidden = weights.rename(tmp_path / "hidden")
    small = ["--documents", str(text), "--token-budget", "512", "--eval-documents", "0"]
    flags = ["--context-length", str(SEQ), "--output-dir", str(tmp_path / "out")]
    assert main(["finetune", str(source), *small, *flags]) == 2
    assert "--packing false" in capsys.readouterr().err
    hidden.rename(weights)
    made = plan_text(plan(source, SEQ, training=True, run=FinetuneConfig("plan", bf16=True), gpu_memory="24GB"))
    assert "(--packing false)" in made  # and why
    (command,) = [line.split() for line in made.splitlines() if line.startswith("  hf-posenc finetune")]
    assert command[command.index("--packing") + 1] == "false"
    command[command.index("OUT")] = str(tmp_path / "out")
    command[command.index("TEXTS")] = str(text)
    assert main([*command[1:], "--token-budget", "512", "--eval-documents", "0"]) == 0
    losses = [line["loss"] for line in read_log(tmp_path / "out" / "train_log.jsonl")]
    assert len(losses) == 4
    assert all(loss < 1.1 * math.log(128) for loss in losses)


class _Mixed(nn.Module):
    """A layer that convolves its hidden states, which its config does not say."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.conv1d = layer, nn.Conv1d(64, 64, 3, padding=2, groups=64)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(hidden + self.conv1d(hidden.mT)[..., : hidden.shape[1]].mT, *args, **kwargs)


def test_a_convolution_that_the_config_does_not_name_is_found() -> None:
    model: Any = build(LlamaConfig(**SIZES))
    model.model.layers[1] = _Mixed(model.model.layers[1])
    assert unmasked_layers(RotaryModel(model)) == {"convolution": 1}
    with pytest.raises(RunStoppedError, match="outputs have"):
        probe_isolation(RotaryModel(model))
