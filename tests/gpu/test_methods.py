"""Every method on the GPU against float64 on the CPU, in each dtype, attention implementation and way of feeding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.utils import is_flash_attn_2_available

from attention_models import IDS, left_padded, sharp_model
from every_method import METHODS
from gpu.exact import ALLOWED, DTYPES, error, exact_model, logits_error, model_of, patched
from hf_posenc import unpatch_model, verify_model
from tiny_models import assert_same_state, logits, state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # torch's compiler
    pytest.mark.filterwarnings(
        "ignore:_compile flag on create_block_mask:DeprecationWarning"
    ),  # Transformers' own call
]
TEXT = IDS[:, :200]  # past the original 64 and past the windows of the rules
FLASH = pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is an optional package")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", METHODS)
def test_logits_are_those_of_float64(key: str, dtype: torch.dtype, device: torch.device) -> None:
    found, exact = model_of(key, dtype, device), exact_model(key, dtype)
    verify_model(found)
    assert logits_error(found, exact, TEXT) < ALLOWED[dtype]


@pytest.mark.parametrize("key", METHODS)
def test_gradients_are_those_of_float64(key: str, device: torch.device) -> None:
    gradients = []
    for model in (model_of(key, torch.float32, device), exact_model(key, torch.float32)):
        ids = TEXT.to(model.device)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, exact in gradients[1].items():
        assert error(gradients[0][name], exact) < 1e-4, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", [key for key in METHODS if key != "dynamic-sequence"])
def test_rows_in_a_padded_batch_and_fed_through_a_cache(key: str, dtype: torch.dtype, device: torch.device) -> None:
    model, exact = model_of(key, dtype, device), exact_model(key, dtype)
    rows = [TEXT, TEXT[:, :90]]
    ids, mask = left_padded(rows)
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for begin, end in ((0, 130), (130, 198), (198, 199), (199, 200)):
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            parts.append(model(ids[:, begin:end], past_key_values=cache, **given).logits)
    for output in (whole, torch.cat(parts, dim=1)):
        for row, alone in zip(output, rows, strict=True):
            assert error(row[-alone.shape[1] :], logits(exact, alone)[0]) < ALLOWED[dtype]


@pytest.mark.parametrize("inner", ["sdpa", "eager", "flex_attention", pytest.param("flash_attention_2", marks=FLASH)])
@pytest.mark.parametrize("key", ["yarn", "nope", "dynamic", "dynamic_yarn-log_n", "dca", "self_extend", "rope"])
def test_each_attention_implementation(key: str, inner: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if inner == "flash_attention_2" else torch.float32
    model = sharp_model("Llama", dtype).to(device)
    model.set_attn_implementation(inner)
    assert logits_error(patched(model, key), exact_model(key, dtype), TEXT) < ALLOWED[dtype]


@pytest.mark.parametrize("backend", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca"])
def test_each_kernel_of_sdpa(key: str, backend: str, cuda_only: torch.device) -> None:
    """A kernel that PyTorch does not have here for these shapes falls back to plain mathematics."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, exact = model_of(key, torch.bfloat16, cuda_only), exact_model(key, torch.bfloat16)
    with sdpa_kernel([getattr(SDPBackend, backend), SDPBackend.MATH], set_priority=True):
        assert logits_error(model, exact, TEXT) < ALLOWED[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", METHODS)
def test_undo_gives_every_bit_back(key: str, dtype: torch.dtype, device: torch.device) -> None:
    model = sharp_model("Llama", dtype).to(device)
    before, plain = state(model), logits(model, TEXT.to(device))
    patched(model, key)
    assert not torch.equal(logits(model, TEXT.to(device)), plain)
    unpatch_model(model)
    assert_same_state(state(model), before)
    assert all(tensor.device == device for tensor in state(model).values())
    assert torch.equal(logits(model, TEXT.to(device)), plain)


@pytest.mark.parametrize("key", METHODS)
def test_patched_and_then_moved_is_moved_and_then_patched(key: str, device: torch.device) -> None:
    moved = patched(sharp_model("Llama"), key).to(device)
    there = model_of(key, torch.float32, device)
    assert_same_state(state(moved), state(there))
    assert torch.equal(logits(moved, TEXT.to(device)), logits(there, TEXT.to(device)))


@pytest.mark.parametrize("key", ["yarn", "longrope", "dynamic_yarn", "dca", "alibi"])
def test_a_compiled_model_reads_the_same(key: str, device: torch.device) -> None:
    model = model_of(key, torch.float32, device)
    options: dict[str, Any] = {} if device.type == "cuda" else {"backend": "aot_eager"}
    compiled = torch.compile(model, **options)
    assert (
        error(logits(compiled, TEXT.to(device)), logits(exact_model(key, torch.float32), TEXT)) < ALLOWED[torch.float32]
    )


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "GPTNeoX", "Mixtral"])
@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca"])
def test_other_families(family: str, key: str, device: torch.device) -> None:
    found, exact = (patched(sharp_model(family).to(where), key) for where in (device, "cpu"))
    assert logits_error(found, exact, TEXT) < ALLOWED[torch.float32]


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "rerope"])
def test_packed_documents_are_each_alone(key: str, device: torch.device) -> None:
    model, exact = model_of(key, torch.float32, device), exact_model(key, torch.float32)
    rows = [TEXT, TEXT[:, :150]]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None].to(device)
    with torch.no_grad():
        packed = model(torch.cat(rows, dim=1).to(device), position_ids=positions, use_cache=False).logits[0]
    for found, row in zip((packed[:200], packed[200:]), rows, strict=True):
        assert error(found, logits(exact, row)[0]) < ALLOWED[torch.float32]


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "self_extend"])
def test_no_layer_but_the_first_waits_for_the_device(key: str, cuda_only: torch.device) -> None:
    """What depends on positions is read once, in the first layer; the others only start kernels."""
    model, ids = model_of(key, torch.bfloat16, cuda_only), TEXT.to(cuda_only)
    layer = model.model.layers[1].self_attn

    def read() -> None:
        cache = DynamicCache(config=model.config)
        try:
            model(ids, use_cache=False)
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with torch.no_grad():
        read()  # kernels are compiled
        layer.register_forward_pre_hook(lambda *args: torch.cuda.set_sync_debug_mode("error"))
        layer.register_forward_hook(lambda *args: torch.cuda.set_sync_debug_mode("default"))
        read()
        layer.register_forward_pre_hook(lambda *args: bool(ids.any()))
        with pytest.raises(RuntimeError, match="synchroniz"):  # what is looked for can be found
            read()
