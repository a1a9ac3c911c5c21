"""Nothing of ours stays on the CPU: every method on a simulated CUDA device, where a tensor of the CPU is an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel, StaticCache

from attention_models import IDS, left_padded, sharp_model
from every_method import METHODS, missing_methods, patch
from hf_posenc import load_extended, perplexity, save_extended, unpatch_model, verify_model
from hf_posenc.attention.rotation import angles_at
from hf_posenc.attention.shifted import shifted_sparse_attention
from hf_posenc.training.chunked_loss import chunked_lm_loss
from simulated_cuda import CUDA, MixedDevicesError, SimulatedCuda, simulated_cuda
from tiny_models import assert_same_state, logits, state

SHORT = IDS[:, :100]  # past the original 64, and past the windows of the rules
CLOSE = {"atol": 1e-5, "rtol": 1e-4}  # other kernels than the CPU's own attention


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    with simulated_cuda() as device:
        yield device


def model_on(device: torch.device | str, key: str) -> PreTrainedModel:
    """A patched model; it is patched on the device, so that patching, its probes and its verification run there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamic with scope='sequence' picks one scale per forward", UserWarning)
        return patch(sharp_model("Llama").to(device), key)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that has to be on the simulated device."""
    assert isinstance(tensor, SimulatedCuda), tensor
    return tensor.held


# ---- the simulation itself: as strict as PyTorch's own, and right ----

MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda one, other: one + other,
    "multiply": lambda one, other: one * other,
    "matmul": lambda one, other: one @ other,
    "cat": lambda one, other: torch.cat([one, other]),
    "where": lambda one, other: torch.where(one > 0, one, other),
    "greater": lambda one, other: one > other,
    "minimum": lambda one, other: torch.minimum(one, other),
    "gather": lambda one, other: one.gather(0, other.long()),
    "add in place": lambda one, other: one.add_(other),
    "masked_fill": lambda one, other: one.masked_fill(other > 0, 0.0),
    "index_select": lambda one, other: one.index_select(0, other.long()),
    "a number": lambda one, other: one + other.new_zeros(()).to("cpu"),
    "moved": lambda one, other: one + other.to(one.device),
    "by device": lambda one, other: one + torch.zeros(3, device=one.device),
}


def refuses(work: Callable[[torch.Tensor, torch.Tensor], Any], on_cuda: Callable[[], torch.Tensor]) -> bool:
    try:
        work(on_cuda(), torch.ones(3))
    except RuntimeError:
        return True
    return False


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", MIXED)
def test_the_simulation_refuses_what_pytorchs_fake_tensors_refuse(name: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        theirs = refuses(MIXED[name], lambda: torch.ones(3, device=CUDA))
    with simulated_cuda():
        ours = refuses(MIXED[name], lambda: torch.ones(3, device=CUDA))
    assert ours == theirs == (name not in ("a number", "moved", "by device"))


def test_the_simulation_holds_values_and_gradients(cuda: torch.device) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], device=cuda))
    (weight[1:] * torch.arange(2.0, 4.0, device=cuda)).sum().backward()
    assert here(weight.grad).tolist() == [0.0, 2.0, 3.0]
    weight.data[0] = 7
    assert type(weight.cpu().detach()) is torch.Tensor
    assert weight.cpu().tolist() == [7.0, 2.0, 3.0]
    assert weight.device == CUDA
    assert not weight.is_meta
    with pytest.raises(MixedDevicesError, match=r"cuda:0.*CPU,.*\(3,\)"):
        weight + torch.arange(3)


def test_a_tensor_left_on_the_cpu_is_found(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of the tests below would say if our code forgot a device."""
    model = model_on(cuda, "dynamic_yarn")
    monkeypatch.setattr(
        "hf_posenc.attention.rotating_attention.angles_at", lambda *args: angles_at(*args) + torch.arange(8.0)
    )
    with pytest.raises(MixedDevicesError, match=r"aten.add.Tensor.*cuda:0.*CPU"):
        logits(model, SHORT.to(cuda))


# ---- every method ----


def test_no_method_is_left_out() -> None:
    assert missing_methods() == set()


@pytest.mark.parametrize("key", METHODS)
def test_patch_forward_backward_cache_and_undo(key: str) -> None:
    """Patched, verified, read, trained on, fed through caches and undone there, with the CPU's results."""
    on_cpu = model_on("cpu", key)
    expected = logits(on_cpu, SHORT)
    on_cpu(SHORT, labels=SHORT, use_cache=False).loss.backward()
    with simulated_cuda() as cuda:
        model, ids = model_on(cuda, key), SHORT.to(cuda)
        verify_model(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert isinstance(tensor, SimulatedCuda), name
        torch.testing.assert_close(here(logits(model, ids)), expected, **CLOSE)
        model(ids, labels=ids, use_cache=False).loss.backward()
        for (name, ours), theirs in zip(model.named_parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(here(ours.grad), theirs.grad, atol=1e-5, rtol=1e-3, msg=name)
        if key != "dynamic-sequence":  # whose scale is that of the longest forward so far
            steps = [98, 1]
            for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=128)):
                torch.testing.assert_close(here(fed(model, ids, steps, cache)), expected, **CLOSE)
        unpatch_model(model)
        plain = {name: here(tensor) for name, tensor in state(model).items()}
    assert_same_state(plain, state(sharp_model("Llama")))


def fed(model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], cache: Any) -> torch.Tensor:
    """Feed a prefill and single tokens through a cache, as ``generate`` does, and return all logits."""
    parts, begin = [], 0
    with torch.no_grad():
        while begin < ids.shape[1]:
            end = begin + sizes[min(len(parts), len(sizes) - 1)]
            positions = torch.arange(begin, end, device=ids.device)[None]
            parts.append(model(ids[:, begin:end], past_key_values=cache, position_ids=positions).logits)
            begin = end
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "learned"])
def test_generation_of_a_padded_batch(key: str) -> None:
    ids, mask = left_padded([IDS[:, :70], IDS[:, :40]])
    kwargs: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    expected = model_on("cpu", key).generate(ids, attention_mask=mask, **kwargs)
    with simulated_cuda() as cuda:
        found = model_on(cuda, key).generate(ids.to(cuda), attention_mask=mask.to(cuda), **kwargs)
        assert torch.equal(here(found), expected)


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "learned"])
def test_saved_from_the_device(key: str, tmp_path: Path) -> None:
    with simulated_cuda() as cuda:
        save_extended(model_on(cuda, key), tmp_path / "model")
    loaded = load_extended(tmp_path / "model").eval()
    assert loaded.device == torch.device("cpu")
    assert torch.equal(logits(loaded, SHORT), logits(model_on("cpu", key), SHORT))


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "alibi", "rope", "xpos", "t5_bias"])
def test_moved_after_patching(key: str) -> None:
    """What a model holds from patching on the CPU goes with it."""
    model = model_on("cpu", key)
    expected = logits(model, SHORT)
    with simulated_cuda() as cuda:
        torch.testing.assert_close(here(logits(model.to(cuda), SHORT.to(cuda))), expected, **CLOSE)


def test_frequencies_stay_float32_on_the_device_in_another_dtype() -> None:
    model = model_on("cpu", "yarn")
    expected = model.model.rotary_emb.inv_freq.clone()
    with simulated_cuda() as cuda:
        model.to(cuda, torch.bfloat16)
        assert torch.equal(here(model.model.rotary_emb.inv_freq), expected)
        assert here(logits(model, SHORT.to(cuda))).dtype == torch.bfloat16


# ---- what trains and measures ----


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "t5_bias"])
def test_training_on_packed_documents_with_the_loss_in_chunks(key: str) -> None:
    positions = torch.cat([torch.arange(70), torch.arange(30)])[None]
    losses = []
    for device in (None, CUDA):
        with simulated_cuda():
            model = model_on(device or "cpu", key).train()
            batch = {"input_ids": SHORT, "labels": SHORT, "position_ids": positions}
            with chunked_lm_loss(model, 32):
                loss = model(**{name: value.to(model.device) for name, value in batch.items()}).loss
            loss.backward()
            losses.append(loss.item())
            assert all(weight.grad.device == model.device for weight in model.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_shifted_sparse_attention(cuda: torch.device) -> None:
    model = model_on(cuda, "yarn").train()
    with shifted_sparse_attention(model, 32):
        loss = model(SHORT.to(cuda), labels=SHORT.to(cuda)).loss
    loss.backward()
    assert all(bool(here(weight.grad).any()) for weight in model.parameters())


@pytest.mark.parametrize("key", ["yarn", "dca"])
def test_perplexity(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = perplexity(model_on("cpu", key), [IDS[0]], [64, 128], progress=False)
    # The driver's numbers, of a driver that is not there.
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1)
    with simulated_cuda() as cuda:
        found = perplexity(model_on(cuda, key), [IDS[0]], [64, 128], progress=False)
    assert [record.perplexity for record in found] == pytest.approx([r.perplexity for r in expected], rel=1e-5)
