"""patch_model against models built natively; undoing; isolation; what casts, copies and wrappers do; refusals."""

from __future__ import annotations

import copy
import inspect
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import extend_config, patch_model, patched, unpatch_model, verify_model
from hf_posenc.patching.api import describe
from hf_posenc.patching.verification import RotaryMismatchError
from older_transformers import skip_on_5_0
from tiny_models import (
    FAMILIES,
    STATIC_METHODS,
    assert_same_state,
    logits,
    make_model,
    method_options,
    native,
    recompute_activations,
    state,
    token_ids,
)

IDS = token_ids(100, rows=2)  # past the original 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", STATIC_METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_equals_native_and_unpatch_restores(family: str, method: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    name, options = method_options(method, model)
    before, config_before, plain = state(model), model.config.to_dict(), logits(model, IDS)
    expected = logits(native(model, name, 4, **options), IDS)

    assert patch_model(model, name, 4, **options) is model
    extended = logits(model, IDS)
    assert torch.equal(extended, expected)
    assert not torch.equal(extended, plain)
    assert model.config.max_position_embeddings == 256
    assert type(model.config.max_position_embeddings) is int
    assert verify_model(model).modules[0].inv_freq_error < 1e-6

    assert unpatch_model(model) is model
    assert_same_state(state(model), before)
    assert model.config.to_dict() == config_before
    assert torch.equal(logits(model, IDS), plain)


def test_dynamic_equals_transformers_own_for_a_fresh_call() -> None:
    model = make_model("Llama")
    with pytest.warns(UserWarning, match="per forward"):
        expected = logits(native(model, "dynamic", 2, scope="sequence"), IDS)
    with pytest.warns(UserWarning, match="per forward"):
        patch_model(model, "dynamic", 2, scope="sequence")
    assert model.config.max_position_embeddings == 64  # it is the original length that this rule reads
    assert torch.equal(logits(model, IDS), expected)
    skip_on_5_0("keeps the length of the last forward where nothing reads it")
    verify_model(model)  # also in the state that a long forward leaves
    model.to(torch.float64).to(torch.float32)
    assert torch.equal(logits(model, IDS), expected)


def test_the_context_manager_undoes_also_after_an_error() -> None:
    model = make_model("Llama")
    plain = logits(model, IDS)

    def fail() -> None:
        with patched(model, "linear", 2) as same:
            assert same is model
            assert not torch.equal(logits(model, IDS), plain)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(logits(model, IDS), plain)
    assert describe(model)["method"] == "none"


def test_two_models_from_one_config_do_not_touch_each_other() -> None:
    one = make_model("Llama")
    config_before = one.config.to_dict()
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())
    plain = logits(other, IDS)
    patch_model(one, "yarn", 4)
    assert other.config.to_dict() == config_before
    assert torch.equal(logits(other, IDS), plain)
    assert type(other.model.rotary_emb) is type(make_model("Llama").model.rotary_emb)
    patch_model(other, "linear", 2)
    unpatch_model(one)
    assert describe(other)["method"] == "linear"


def _with_to_empty(model: PreTrainedModel) -> PreTrainedModel:
    weights = model.state_dict()
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(weights)
    return model


def _through_pickle(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16().float(),
        lambda m: m.half(),
        lambda m: m.to("cpu", torch.float16),
        copy.deepcopy,
        lambda m: copy.deepcopy(m).bfloat16(),
        _with_to_empty,
        _through_pickle,
        lambda m: dispatch_model(m, {"": "cpu"}, main_device="cpu", force_hooks=True),
    ],
    ids=["to-bf16", "bf16-and-back", "half", "to-fp16", "deepcopy", "copy-bf16", "to_empty", "pickle", "dispatch"],
)
def test_frequencies_stay_float32_and_unrounded(change: Any) -> None:
    model = patch_model(make_model("Llama"), "yarn", 4)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.float32)
    changed = change(model)
    rotary = changed.model.rotary_emb
    assert rotary.inv_freq.dtype == rotary.original_inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, frequencies)
    verify_model(changed)
    unpatch_model(changed)
    assert torch.equal(changed.model.rotary_emb.inv_freq, make_model("Llama").model.rotary_emb.inv_freq)


def test_a_model_cast_before_patching_gets_exact_frequencies_and_its_rounded_ones_back() -> None:
    model = make_model("Llama", torch.bfloat16)
    rounded = model.model.rotary_emb.inv_freq.clone()
    assert rounded.dtype == torch.bfloat16  # what Transformers does to it
    patch_model(model, "linear", 4)
    exact = native(make_model("Llama"), "linear", 4).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    unpatch_model(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, rounded)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = patch_model(make_model("Llama"), "yarn", 4).train()
        if checkpointing:
            recompute_activations(model)
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_sees_the_patch(when: str) -> None:
    model = make_model("Llama")
    expected = logits(native(model, "yarn", 4), IDS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if when == "after":
        plain = logits(compiled, IDS)
    patch_model(compiled, "yarn", 4)
    torch.testing.assert_close(logits(compiled, IDS), expected, rtol=0, atol=1e-6)
    if when == "after":
        unpatch_model(compiled)
        torch.testing.assert_close(logits(compiled, IDS), plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
def test_peft_wrap_and_merge_keep_the_patch(order: str) -> None:
    model = make_model("Llama")
    expected = logits(native(model, "yarn", 4), IDS)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if order == "patch-then-wrap":
        wrapped = get_peft_model(patch_model(model, "yarn", 4), lora)
    else:
        wrapped = patch_model(get_peft_model(model, lora), "yarn", 4)
    torch.testing.assert_close(logits(wrapped, IDS), expected, rtol=0, atol=1e-6)  # fresh LoRA adds zero
    assert wrapped.config.max_position_embeddings == 256
    merged = wrapped.merge_and_unload()
    verify_model(merged)
    torch.testing.assert_close(logits(merged, IDS), expected, rtol=0, atol=1e-6)
    unpatch_model(merged)
    assert describe(merged)["method"] == "none"


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "llama3", "yarn-paper"])
def test_with_a_kv_cache_the_logits_are_those_of_one_forward(method: str) -> None:
    model = make_model("Llama")
    name, options = method_options(method, model)
    patch_model(model, name, 4, **options)
    whole = logits(model, IDS)
    with torch.no_grad():
        first = model(IDS[:, :50], use_cache=True)
        rest = model(IDS[:, 50:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=0, atol=1e-5)


def test_generation_uses_the_new_length() -> None:
    model = patch_model(make_model("Llama"), "yarn", 4)
    generated = model.generate(
        token_ids(80), attention_mask=torch.ones(1, 80, dtype=torch.long), min_new_tokens=40, max_new_tokens=40
    )
    assert generated.shape == (1, 120)


def test_tampering_is_found() -> None:
    model = patch_model(make_model("Llama"), "yarn", 4)
    verify_model(model)
    model.model.rotary_emb.inv_freq[3] *= 1.001
    with pytest.raises(RotaryMismatchError, match=r"model.rotary_emb:"):
        verify_model(model)
    unpatch_model(model)
    patch_model(model, "yarn", 4)
    model.model.rotary_emb.attention_scaling = 1.0
    with pytest.raises(RotaryMismatchError, match=r"1,.*1\.138"):
        verify_model(model)


def test_a_module_that_ignores_its_frequencies_is_refused_and_left_alone() -> None:
    model = make_model("Llama")
    rotary = model.model.rotary_emb
    frozen = rotary(torch.zeros(1), torch.arange(64).unsqueeze(0))
    rotary.forward = lambda x, position_ids: tuple(t[:, position_ids[0]] for t in frozen)
    before = state(model)
    with pytest.raises(RotaryMismatchError, match="inv_freq"):
        patch_model(model, "linear", 4)
    assert_same_state(state(model), before)
    assert describe(model)["method"] == "none"


# Users' pains: each is refused with a message before anything is changed.


def test_public_names() -> None:
    assert sorted(hf_posenc.__all__) == hf_posenc.__all__
    assert {*hf_posenc._MODULES, "__version__", "install"} == set(hf_posenc.__all__)
    for name in hf_posenc.__all__:
        assert getattr(hf_posenc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pach_model'"):
        _ = hf_posenc.pach_model


def test_extend_config_takes_the_arguments_of_patch_model() -> None:
    of_model, of_config = (
        {
            name: (each.kind, each.default, each.annotation)
            for name, each in inspect.signature(function).parameters.items()
        }
        for function in (patch_model, extend_config)
    )
    of_model.pop("model")
    of_model.pop("tokenizer")
    of_config.pop("config")
    assert list(of_config.items()) == list(of_model.items())


def test_importing_the_package_does_not_wait_for_pytorch() -> None:
    code = "import sys, hf_posenc, hf_posenc.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_factor_and_length_the_factor_is_4() -> None:
    assert describe(patch_model(make_model("Llama")))["context_length"] == 256
