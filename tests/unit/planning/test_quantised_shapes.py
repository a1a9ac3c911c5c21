"""Weights in 8 and 4 bits as shapes, held against bitsandbytes' own and against the published bits a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.checkpoint.quantised import in_4bit
from hf_posenc.planning.quantised_shapes import QuantisedLinear, quantise_shapes
from hf_posenc.planning.training_memory import predict_training_memory
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import LoraSettings, add_lora
from tiny_runs import Build

pytestmark = pytest.mark.filterwarnings(
    # bitsandbytes imports torch.jit.
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)


def constants_of(weight: Any) -> int:
    """Return the bytes of a quantised weight's constants, without the tables that all weights share."""
    state = getattr(weight, "quant_state", None)
    return int(weight.SCB.nbytes if state is None else state.absmax.nbytes + state.state2.absmax.nbytes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_they_are_those_of_bitsandbytes(bits: int, tied: bool, tmp_path: Path, tiny_llama: Build) -> None:
    tiny_llama(tie_word_embeddings=tied, hidden_size=96, intermediate_size=300).save_pretrained(tmp_path)
    settings = in_4bit(torch.float32) if bits == 4 else {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    real = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **settings)
    shape = meta_model(real.config, torch.float32)
    assert len(quantise_shapes(shape, bits)) == 2 * 7
    ours = dict(shape.named_modules())
    theirs = {name: module for name, module in real.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, one in ours.items() if isinstance(one, nn.Linear)} == {*theirs}
    for name, module in theirs.items():
        if name == "lm_head":
            assert type(ours[name]) is type(module) is nn.Linear
        else:
            assert ours[name].weight.nbytes == module.weight.nbytes
            assert ours[name].constants.nbytes == constants_of(module.weight), name


def test_nested_nf4_takes_4_127_bits_a_weight() -> None:
    linear = QuantisedLinear(nn.Linear(3584, 18944, device="meta", dtype=torch.bfloat16), 4)
    taken = linear.weight.nbytes + linear.constants.nbytes
    assert 8 * taken / (3584 * 18944) == pytest.approx(4.127, abs=5e-4)  # QLoRA, section 3


def test_adapters_on_4_bits_need_less_by_the_weights_and_are_the_same(tiny_llama: Build) -> None:
    config = tiny_llama().config
    run = FinetuneConfig("unused", lora=True, lora_embeddings=False, gradient_checkpointing=True)
    whole = predict_training_memory(config, run.step, 64)
    packed = predict_training_memory(config, run.step, 64, load_in_4bit=True)
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    saved = whole.weights - packed.weights
    assert saved == pytest.approx(matrices * (4 - 4.127 / 8), rel=0.01)
    assert packed.trained_parameters == whole.trained_parameters
    assert packed.optimizer == whole.optimizer
    shape = meta_model(config)
    quantise_shapes(shape, 4)
    adapted = add_lora(shape, LoraSettings(embeddings=False))
    inside = [
        module for module in adapted.modules() if isinstance(getattr(module, "base_layer", None), QuantisedLinear)
    ]
    assert len(inside) == 2 * 4  # q, k, v, o
