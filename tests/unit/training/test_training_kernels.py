"""When FlashAttention and Liger's kernels are put in, and that nothing of them stays: decisions, not run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hf_posenc import patch_model
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
    assert liger_arguments(model) == {}
    assert flash_reason(model, RUN, bf16=True) == "the model is not on a GPU"
    with training_kernels(model, RUN, bf16=True):
        assert model.config._attn_implementation == "sdpa"


def test_liger_leaves_the_loss_and_the_positions_alone(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Any
) -> None:
    model, told = tiny_llama(), liger_arguments(tiny_llama())
    assert told["use_liger_kernel"] is True
    off = {"rope", "cross_entropy", "fused_linear_cross_entropy"}
    assert {name for name, on in told["liger_kernel_config"].items() if not on} == off
    assert {name for name, on in told["liger_kernel_config"].items() if on} == {"rms_norm", "swiglu", "geglu"}
    skip_on_5_0("calls liger-kernel in another way")
    given: list[Any] = []  # what Trainer hands to liger-kernel
    gpu.setattr("transformers.trainer.apply_liger_kernel", lambda model, config: given.append((model, config)))
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", report_to="none", **told)
    dataset = [{"input_ids": [1, 2], "labels": [1, 2]}]
    Trainer(model, args, train_dataset=dataset).train()  # type: ignore[arg-type]  # a list serves as well
    assert given == [(model, told["liger_kernel_config"])]
    gpu.setattr(kernels, "is_liger_kernel_available", lambda: False)
    assert liger_arguments(model) == {}


def test_flash_attention_is_put_in_and_taken_out(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model, asked = tiny_llama(), []

    def set_implementation(name: str) -> None:
        asked.append(name)

    gpu.setattr(model, "set_attn_implementation", set_implementation, raising=False)
    assert flash_reason(model, RUN, bf16=True) is None
    with training_kernels(model, RUN, bf16=True):
        assert asked == ["flash_attention_2"]
    assert asked == ["flash_attention_2", "sdpa"]


@pytest.mark.parametrize(
    ("told", "bf16", "reason"),
    [
        ({}, False, "half precision"),
        ({"per_device_train_batch_size": 2}, True, "per_device_train_batch_size"),
        ({"position_schedule": "pose"}, True, "one after the other"),
        ({"shifted_sparse_attention": True}, True, "changes the attention"),
    ],
)
def test_where_flash_attention_would_be_wrong(
    told: dict[str, Any],
    bf16: bool,
    reason: str,
    gpu: pytest.MonkeyPatch,
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    found = flash_reason(tiny_llama(), FinetuneConfig("unused", **told), bf16=bf16)
    assert found is not None
    assert reason in found


def test_a_chosen_attention_and_the_door_are_kept(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    assert "chosen by the caller" in str(flash_reason(tiny_llama(attn_implementation="eager"), RUN, bf16=True))
    runs_in_attention = patch_model(tiny_llama(), "dynamic_yarn", 4)
    assert flash_reason(runs_in_attention, RUN, bf16=True) is not None


def test_what_liger_binds_is_unbound(gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    gpu.setattr(kernels, "is_flash_attn_2_available", lambda: False)
    norm, other = model.model.norm, model.model.layers[0].mlp
    vars(other)["forward"] = other.forward  # somebody else's
    with training_kernels(model, RUN, bf16=True):
        vars(norm)["forward"] = vars(norm)["_get_name"] = lambda *args: None  # as liger_kernel's monkey_patch does
    assert not {"forward", "_get_name"} & set(vars(norm))
    assert "forward" in vars(other)
