"""Models without data yet, or with their data elsewhere: the right frequencies after, or a refusal before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_posenc import RotaryMismatchError, patch_model, unpatch_model, verify_model
from tiny_models import logits, make_model, token_ids

IDS = token_ids(100)


def patched_llama() -> PreTrainedModel:
    return patch_model(make_model("Llama"), "yarn", 4)


def offloaded(model: PreTrainedModel, folder: Path, buffers: bool, to_disk: bool) -> PreTrainedModel:
    if to_disk:
        return disk_offload(model, str(folder / "disk"), execution_device="cpu", offload_buffers=buffers)
    return cpu_offload(model, execution_device="cpu", offload_buffers=buffers)


def patched_then_offloaded(folder: Path, buffers: bool, to_disk: bool) -> PreTrainedModel:
    return offloaded(patched_llama(), folder, buffers, to_disk)


def offloaded_then_patched(folder: Path, buffers: bool, to_disk: bool) -> PreTrainedModel:
    return patch_model(offloaded(make_model("Llama"), folder, buffers, to_disk), "yarn", 4)


@pytest.mark.parametrize("make", [patched_then_offloaded, offloaded_then_patched])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("to_disk", [False, True])
def test_offloaded_by_accelerate(
    make: Callable[[Path, bool, bool], PreTrainedModel], buffers: bool, to_disk: bool, tmp_path: Path
) -> None:
    model = make(tmp_path, buffers, to_disk)
    verify_model(model)
    assert torch.equal(logits(model, IDS), logits(patched_llama(), IDS))
    unpatch_model(model)
    assert torch.equal(logits(model, IDS), logits(make_model("Llama"), IDS))


def test_loaded_with_a_device_map_over_cpu_and_disk(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={**places, "model.layers.1": "disk", "lm_head": "cpu"},
        offload_folder=str(tmp_path / "disk"),
    )
    assert torch.equal(logits(patch_model(model, "yarn", 4), IDS), logits(patched_llama(), IDS))


def test_patched_without_weights_then_loaded(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "model")
    with init_empty_weights():
        model = LlamaForCausalLM(make_model("Llama").config)
    patch_model(model, "yarn", 4)
    loaded = load_checkpoint_and_dispatch(model.eval(), str(tmp_path / "model"), device_map={"": "cpu"})
    assert torch.equal(logits(loaded, IDS), logits(patched_llama(), IDS))


def test_patched_on_the_meta_device_then_given_memory() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(make_model("Llama").config)
    assert verify_model(patch_model(model, "yarn", 4)).modules == ()  # there is nothing to compare yet
    model.to_empty(device="cpu")
    model.load_state_dict(make_model("Llama").state_dict())
    assert torch.equal(logits(model.eval(), IDS), logits(patched_llama(), IDS))
    assert len(verify_model(model).modules) == 1
    unpatch_model(model)
    assert torch.equal(logits(model, IDS), logits(make_model("Llama"), IDS))


def test_frequencies_that_were_never_filled_in_are_found() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(make_model("Llama").config)
    model.to_empty(device="cpu")
    model.model.rotary_emb.inv_freq.fill_(7.0)  # what was in memory before
    with pytest.raises(RotaryMismatchError, match="live frequencies"):
        patch_model(model, "yarn", 4)
