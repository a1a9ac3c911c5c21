"""patch_model against models built natively; undoing; isolation; what casts, copies and wrappers do; refusals."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, STATIC_METHODS, logits, make_model, method_options, token_ids
from torch import nn
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import extend_config, patch_model, patched, unpatch_model, verify_model
from hf_posenc.patching import describe
from hf_posenc.verification import RotaryMismatchError

IDS = token_ids(100, rows=2)  # past the original 64


def native(model: PreTrainedModel, method: str, factor: float, **options: Any) -> PreTrainedModel:
    """The same weights in a model that Transformers builds from the extended config."""
    built = type(model)(extend_config(model.config, method, factor, **options))
    built.load_state_dict(model.state_dict())
    # As from_pretrained(dtype=...) does: weights in the model's dtype, frequencies in float32.
    frequencies = {name: buffer.clone() for name, buffer in built.named_buffers() if "inv_freq" in name}
    built = built.to(model.dtype).eval()
    for name, value in frequencies.items():
        owner, buffer = name.rsplit(".", 1)
        built.get_submodule(owner)._buffers[buffer] = value
    return built


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


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
    with pytest.warns(UserWarning, match="picks one scale per forward"):
        expected = logits(native(model, "dynamic", 2, scope="sequence"), IDS)
    with pytest.warns(UserWarning, match="picks one scale per forward"):
        patch_model(model, "dynamic", 2, scope="sequence")
    assert model.config.max_position_embeddings == 64  # it is the original length that this rule reads
    assert torch.equal(logits(model, IDS), expected)
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
            model.activation_checkpointing_enable()
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
    with pytest.raises(RotaryMismatchError, match=r"model.rotary_emb: the live frequencies are not those of yarn"):
        verify_model(model)
    unpatch_model(model)
    patch_model(model, "yarn", 4)
    model.model.rotary_emb.attention_scaling = 1.0
    with pytest.raises(RotaryMismatchError, match=r"attention factor is 1, yarn asks for 1\.138"):
        verify_model(model)


def test_a_module_that_ignores_its_frequencies_is_refused_and_left_alone() -> None:
    model = make_model("Llama")
    rotary = model.model.rotary_emb
    frozen = rotary(torch.zeros(1), torch.arange(64).unsqueeze(0))
    rotary.forward = lambda x, position_ids: tuple(t[:, position_ids[0]] for t in frozen)
    before = state(model)
    with pytest.raises(RotaryMismatchError, match="does not use inv_freq as usual"):
        patch_model(model, "linear", 4)
    assert_same_state(state(model), before)
    assert describe(model)["method"] == "none"


# Users' pains: each is refused with a message before anything is changed.


def test_a_config_set_after_loading_is_found() -> None:  # pains row 1
    model = make_model("Llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    with pytest.raises(RotaryMismatchError, match="A config changed after loading has no effect"):
        verify_model(model)
    with pytest.raises(RotaryMismatchError):
        patch_model(model, "yarn", 4, on_scaled="replace", original_max_position_embeddings=64)


def test_the_tutorial_idiom_is_explained() -> None:  # row 18
    model = make_model("Llama")
    model.config.rope_parameters = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ValueError, match=r"has no rope_theta\. Assigning config\.rope_scaling"):
        patch_model(model, "yarn", 4)


def test_an_assigned_rope_theta_is_explained() -> None:  # row 19
    model = make_model("Llama")
    model.config.rope_theta = 1e6
    with pytest.raises(ValueError, match=r"Transformers 5 does not read .* Use method='abf'"):
        patch_model(model, "yarn", 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factor": 4, "context_length": 256}, ValueError, r"not both \(got 4 and 256\)"),
        ({"factor": 0.25}, ValueError, r"factor must be >= 1, got 0\.25"),
        ({"factor": "4"}, TypeError, "factor must be a number, got '4'"),
        ({"context_length": 32}, ValueError, "at least the original length, 64 tokens, got 32"),
        ({"context_length": 256.5}, ValueError, "whole number of tokens"),
        ({"factor": 4, "original_max_position_embeddings": 0}, ValueError, "must be >= 1, got 0"),
        ({"factor": 4, "on_scaled": "maybe"}, ValueError, "on_scaled must be 'refuse' or 'replace'"),
        ({"factor": 4, "attn_factor": 1.0}, TypeError, "takes no option 'attn_factor'"),
        ({"factor": 4, "method": "ntk2"}, ValueError, "Did you mean 'ntk'"),
        ({"factor": 4, "method": "dynamic"}, ValueError, "needs scope='sequence'"),
    ],
)
def test_bad_input_changes_nothing(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = make_model("Llama")
    before, config_before = state(model), model.config.to_dict()
    with pytest.raises(error, match=message):
        patch_model(model, **arguments)
    assert_same_state(state(model), before)
    assert model.config.to_dict() == config_before
    assert describe(model)["method"] == "none"


def test_patching_twice_is_refused() -> None:
    model = patch_model(make_model("Llama"), "yarn", 4)
    with pytest.raises(ValueError, match=r"already patched \(yarn, factor 4\)\. Call unpatch_model"):
        patch_model(model, "linear", 2)
    unpatch_model(model)
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(model)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=["yarn", "llama3", "linear"],
)  # fmt: skip
def test_an_already_scaled_base_is_refused_or_replaced(parameters: dict[str, Any]) -> None:  # row 9
    model = make_model("Llama", rope_parameters={"rope_theta": 1e4, **parameters})
    name = parameters["rope_type"]
    with pytest.raises(ValueError, match=rf"already scaled: {name}, factor 4, .*Pass on_scaled='replace'"):
        patch_model(model, "yarn", 8)
    original = None
    if name == "linear":
        with pytest.raises(ValueError, match="does not say what it was trained on"):
            patch_model(model, "yarn", 8, on_scaled="replace")
        original = 16
    plain = logits(model, IDS)
    base = make_model("Llama", max_position_embeddings=16)
    expected = logits(native(base, "yarn", 8), IDS)
    patch_model(model, "yarn", 8, on_scaled="replace", original_max_position_embeddings=original)
    assert torch.equal(logits(model, IDS), expected)
    assert "low_freq_factor" not in model.config.rope_parameters
    assert torch.equal(logits(unpatch_model(model), IDS), plain)


@pytest.mark.parametrize("target", [65, 96, 100, 160, 250])
def test_the_three_numbers_agree(target: int) -> None:  # rows 7 and 8
    config = extend_config(make_model("Llama").config, "yarn", context_length=target)
    parameters = config.rope_parameters
    assert parameters["original_max_position_embeddings"] == 64
    assert config.max_position_embeddings == target
    assert parameters["factor"] == target / 64
    by_factor = extend_config(make_model("Llama").config, "yarn", factor=target / 64)
    assert by_factor.to_dict() == config.to_dict()


def test_what_belongs_to_the_family_is_kept() -> None:
    config = make_model("GPTNeoX").config
    before = config.to_dict()
    extended = extend_config(config, "yarn", 4)
    assert extended.rope_parameters["partial_rotary_factor"] == 0.5
    assert extended.rope_parameters["rope_theta"] == 1e4
    assert config.to_dict() == before


def test_a_sliding_window_on_every_layer_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match=r"sliding_window is 128, so attention ends there .* to use 256"):
        patch_model(make_model("Mistral", sliding_window=128), "yarn", 4)


def test_what_cannot_be_scaled_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=r"expected a Transformers model .*, got Linear"):
        patch_model(nn.Linear(2, 2), "yarn", 4)
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    with pytest.raises(ValueError, match="model_type 'gpt2' has no rope_parameters"):
        patch_model(gpt2, "yarn", 4)
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 16, "head_dim": 8}
    gemma3 = Gemma3ForCausalLM(Gemma3TextConfig(**small, num_attention_heads=2, num_key_value_heads=1))
    with pytest.raises(ValueError, match="of its own for each layer type"):
        patch_model(gemma3, "yarn", 4)


def test_public_names() -> None:
    assert sorted(hf_posenc.__all__) == hf_posenc.__all__
    assert {*hf_posenc._MODULES, "__version__"} == set(hf_posenc.__all__)
    for name in hf_posenc.__all__:
        assert getattr(hf_posenc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pach_model'"):
        _ = hf_posenc.pach_model


def test_importing_the_package_does_not_wait_for_pytorch() -> None:
    code = "import sys, hf_posenc, hf_posenc.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_factor_and_length_the_factor_is_4() -> None:
    assert describe(patch_model(make_model("Llama")))["context_length"] == 256
