"""When FlashAttention and Liger's kernels are put in, and that nothing of them stays: decisions, not run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hf_posenc import patch_model
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training import kernels
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.kernels import flash_reason, liger_arguments, training_kernels
from older_transformers import skip_on_5_0

RUN = FinetuneConfig("unused")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if there were a GPU with both packages."""
    monkeypatch.setattr(kernels, "_on_gpu", lambda model: True)
    monkeypatch.setattr(kernels, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: True)
    return monkeypatch


def test_nothing_changes_without_a_gpu(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    assert liger_arguments(RotaryModel(model)) == {}
    assert flash_reason(RotaryModel(model), RUN, bf16=True) == "the model is not on a GPU"
    with training_kernels(RotaryModel(model), RUN, bf16=True):
        assert model.config._attn_implementation == "sdpa"


def test_liger_leaves_the_loss_and_the_positions_alone(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Any
) -> None:
    model, liger = tiny_llama(), liger_arguments(RotaryModel(tiny_llama()))
    assert liger["use_liger_kernel"] is True
    off = {"rope", "cross_entropy", "fused_linear_cross_entropy"}
    assert {name for name, on in liger["liger_kernel_config"].items() if not on} == off
    assert {name for name, on in liger["liger_kernel_config"].items() if on} == {"rms_norm", "swiglu", "geglu"}
    skip_on_5_0("calls liger-kernel in another way")
    given: list[Any] = []  # what Trainer hands to liger-kernel
    gpu.setattr("transformers.trainer.apply_liger_kernel", lambda model, config: given.append((model, config)))
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", report_to="none", **liger)
    dataset = [{"input_ids": [1, 2], "labels": [1, 2]}]
    Trainer(model, args, train_dataset=dataset).train()  # type: ignore[arg-type]  # a list serves as well
    assert given == [(model, liger["liger_kernel_config"])]
    gpu.setattr(kernels, "is_liger_kernel_available", lambda: False)
    assert liger_arguments(RotaryModel(model)) == {}


def test_flash_attention_is_put_in_and_taken_out(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model, requested = tiny_llama(), []

    def set_implementation(name: str) -> None:
        requested.append(name)

    gpu.setattr(model, "set_attn_implementation", set_implementation, raising=False)
    assert flash_reason(RotaryModel(model), RUN, bf16=True) is None
    with training_kernels(RotaryModel(model), RUN, bf16=True):
        assert requested == ["flash_attention_2"]
    assert requested == ["flash_attention_2", "sdpa"]


@pytest.mark.parametrize(
    ("liger", "bf16", "reason"),
    [
        ({}, False, "half precision"),
        ({"per_device_train_batch_size": 2}, True, "per_device_train_batch_size"),
        ({"position_schedule": "pose"}, True, "one after the other"),
        ({"shifted_sparse_attention": True}, True, "changes the attention"),
    ],
)
def test_where_flash_attention_would_be_wrong(
    liger: dict[str, Any],
    bf16: bool,
    reason: str,
    gpu: pytest.MonkeyPatch,
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    found = flash_reason(RotaryModel(tiny_llama()), FinetuneConfig("unused", **liger), bf16=bf16)
    assert found is not None
    assert reason in found


def test_a_chosen_attention_and_a_method_in_the_attention_are_kept(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    assert "chosen by the caller" in str(
        flash_reason(RotaryModel(tiny_llama(attn_implementation="eager")), RUN, bf16=True)
    )
    needs_hf_posenc = patch_model(tiny_llama(), "dynamic_yarn", 4)
    assert flash_reason(RotaryModel(needs_hf_posenc), RUN, bf16=True) is not None


def test_what_liger_binds_is_unbound(gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    gpu.setattr(kernels, "is_flash_attn_2_available", lambda: False)
    norm, other = model.model.norm, model.model.layers[0].mlp
    vars(other)["forward"] = other.forward  # somebody else's
    with training_kernels(RotaryModel(model), RUN, bf16=True):
        vars(norm)["forward"] = vars(norm)["_get_name"] = lambda *args: None  # as liger_kernel's monkey_patch does
    assert not {"forward", "_get_name"} & set(vars(norm))
    assert "forward" in vars(other)
