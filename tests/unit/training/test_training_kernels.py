"""When FlashAttention and Liger's kernels are put in, and that nothing of them stays: decisions, not run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hf_posenc import patch_model
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training import run_plan as planning
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.kernels import training_kernels
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_plan import RunPlan, plan_run
from older_transformers import skip_on_5_0


def plan_on(device: str, model: Any, **settings: Any) -> RunPlan:
    """The plan of a run on a model as if it were on a device."""
    facts = replace(ModelFacts.of(RotaryModel(model)), device=device)
    return plan_run(FinetuneConfig("unused", **{"bf16": True, **settings}), facts, Launch())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if there were a GPU with both packages."""
    monkeypatch.setattr(planning, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(planning, "is_flash_attn_2_available", lambda: True)
    return monkeypatch


@pytest.mark.usefixtures("gpu")
def test_nothing_changes_without_a_gpu(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    plan = plan_on("cpu", model)
    assert plan.stages[0].trainer["use_liger_kernel"] is False
    assert not plan.flash
    with training_kernels(RotaryModel(model), flash=plan.flash):
        assert model.config._attn_implementation == "sdpa"


def test_liger_leaves_the_loss_and_the_positions_alone(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Any
) -> None:
    model = tiny_llama()
    planned = plan_on("cuda", model).stages[0].trainer
    liger = {name: planned[name] for name in ("use_liger_kernel", "liger_kernel_config")}
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
    gpu.setattr(planning, "is_liger_kernel_available", lambda: False)
    assert plan_on("cuda", model).stages[0].trainer["use_liger_kernel"] is False


def test_flash_attention_is_put_in_and_taken_out(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model, requested = tiny_llama(), []

    def set_implementation(name: str) -> None:
        requested.append(name)

    gpu.setattr(model, "set_attn_implementation", set_implementation, raising=False)
    assert plan_on("cuda", model).flash
    with training_kernels(RotaryModel(model), flash=True):
        assert requested == ["flash_attention_2"]
    assert requested == ["flash_attention_2", "sdpa"]


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": False},
        {"per_device_train_batch_size": 2},
        {"position_schedule": "pose"},
        {"shifted_sparse_attention": True},
        {"method": "dynamic_yarn"},
    ],
)
def test_where_flash_attention_would_be_wrong(
    settings: dict[str, Any], gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    assert not plan_on("cuda", tiny_llama(), **settings).flash


def test_a_chosen_attention_and_a_method_in_the_attention_are_kept(
    gpu: pytest.MonkeyPatch, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    assert not plan_on("cuda", tiny_llama(attn_implementation="eager")).flash
    assert not plan_on("cuda", patch_model(tiny_llama(), "dynamic_yarn", 4)).flash


def test_what_liger_binds_is_unbound(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    norm, other = model.model.norm, model.model.layers[0].mlp
    vars(other)["forward"] = other.forward  # somebody else's
    with training_kernels(RotaryModel(model), flash=False):
        vars(norm)["forward"] = vars(norm)["_get_name"] = lambda *args: None  # as liger_kernel's monkey_patch does
    assert not {"forward", "_get_name"} & set(vars(norm))
    assert "forward" in vars(other)
