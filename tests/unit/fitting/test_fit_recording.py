"""Recordings of a teacher: against what Transformers hands its own attention functions, and float64 by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attention_models import sharp_model
from hf_posenc import patch_model
from hf_posenc.fitting.recording import Recording, record
from rule_fits import TARGET, TEXT, recorded

QUERIES = torch.arange(0, TARGET, 3)
Seen = dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """What Transformers hands the attention function ``noting``, by layer."""
    found: Seen = {}

    def noting(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        found[module.layer_idx] = (query[0], key[0], value[0])
        return sdpa_attention_forward(module, query, key, value, *args, **more)

    AttentionInterface.register("noting", noting)
    AttentionMaskInterface.register("noting", sdpa_mask)
    yield found
    AttentionInterface._global_mapping.pop("noting")
    AttentionMaskInterface._global_mapping.pop("noting")


@torch.no_grad()
def hidden_of(model: PreTrainedModel) -> torch.Tensor:
    hidden: torch.Tensor = model.get_decoder()(TEXT, use_cache=False).last_hidden_state[0]
    return hidden


def outputs_by_hand(recording: Recording, index: int, scaling: float, window: int | None = None) -> torch.Tensor:
    """Softmax attention of the recorded queries in float64, ``(num_queries, heads, head_dim)``."""
    keys, values, queries = (one.double() for one in recording.layer(index, "keys", "values", "queries"))
    groups = len(queries) // len(keys)
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    distances = recording.query_positions[:, None] - torch.arange(keys.shape[1])
    allowed = (distances >= 0) & (distances < (window or TARGET))
    logits = (queries @ keys.mT * scaling).masked_fill(~allowed, -torch.inf)
    return (logits.softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", [None, "yarn"])
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "SmolLM3"])
def test_what_is_recorded(tmp_path: Path, seen: Seen, family: str, method: str | None, implementation: str) -> None:
    model = sharp_model(family)
    model.set_attn_implementation(implementation)
    recording = recorded(model, tmp_path / "teacher", method)
    assert model.config._attn_implementation == implementation
    if method:
        patch_model(model, method, 4)
    assert torch.equal(recording.hidden, hidden_of(model))
    model.set_attn_implementation("noting")
    hidden_of(model)
    assert sorted(seen) == [0, 1]
    assert torch.equal(recording.input_ids, TEXT[0])
    assert torch.equal(recording.query_positions, QUERIES)
    for index, (query, key, value) in seen.items():
        keys, values, queries = recording.layer(index, "keys", "values", "queries")
        for found, wanted in ((keys, key), (values, value), (queries, query[:, QUERIES])):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        (outputs,) = recording.layer(index, "outputs")
        wanted = outputs_by_hand(recording, index, query.shape[-1] ** -0.5)
        torch.testing.assert_close(outputs.double(), wanted, rtol=1e-4, atol=1e-5)
    module = model.get_decoder().rotary_emb
    assert torch.equal(recording.inv_freq, module.inv_freq)
    assert recording.attention_factor == pytest.approx(module.attention_scaling)
    assert (recording.attention_factor > 1) == (method == "yarn")


def test_a_layer_with_a_window(tmp_path: Path) -> None:
    model = sharp_model("Mistral", sliding_window=40)
    recording = recorded(model, tmp_path / "teacher", None)
    assert torch.equal(recording.hidden, hidden_of(model))
    for index in (0, 1):
        (outputs,) = recording.layer(index, "outputs")
        wanted = outputs_by_hand(recording, index, 0.25, window=40)
        torch.testing.assert_close(outputs.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["dca", "dynamic_yarn"])
def test_a_teacher_that_runs_in_attention(tmp_path: Path, method: str, implementation: str) -> None:
    model = sharp_model("Llama")
    model.set_attn_implementation(implementation)
    plain = model.get_decoder().rotary_emb.inv_freq.clone()
    patch_model(model, method, 4)
    before = hidden_of(model)
    named = model.config._attn_implementation
    recording = record(model, TEXT[0], tmp_path / "teacher", QUERIES, "one")
    assert torch.equal(recording.hidden, before)
    assert len(list((tmp_path / "teacher").glob("layer-*"))) == 2
    assert torch.equal(recording.inv_freq, plain)  # they come as the model rotates them
    assert recording.attention_factor == 1
    assert model.config._attn_implementation == named
    assert torch.equal(hidden_of(model), before)
    # What goes out of a layer is the rule's, not plain attention's.
    (outputs,) = recording.layer(1, "outputs")
    off = (outputs.double() - outputs_by_hand(recording, 1, 0.25)).abs()
    short = QUERIES < 40
    assert float(off[short].max()) < 1e-5
    assert float(off[~short].max()) > 1e-2


def test_only_keys_before_a_position_are_read(tmp_path: Path) -> None:
    recording = recorded(sharp_model("Llama"), tmp_path / "teacher", None)
    whole = recording.layer(1, "keys", "values", "queries")
    keys, values, queries = recording.layer(1, "keys", "values", "queries", stop=50)
    assert torch.equal(keys, whole[0][:, :50])
    assert torch.equal(values, whole[1][:, :50])
    assert torch.equal(queries, whole[2])


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_recording_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = sharp_model("Llama"), tmp_path / "teacher"
    record(model, TEXT[0], folder, QUERIES, "one")
    before = times(folder)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.get_decoder()), "forward", lambda *args, **kwargs: pytest.fail("computed again"))
        known = record(model, TEXT[0], folder, QUERIES, "one")
    assert times(folder) == before
    assert torch.equal(known.input_ids, TEXT[0])
    other = record(model, TEXT[0, :100], folder, QUERIES[QUERIES < 100], "another")
    assert torch.equal(other.input_ids, TEXT[0, :100])
    assert all(time > before[name] for name, time in times(folder).items())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which safetensors has an error of its own; the command line shows an OSError without a traceback."""

    def full(*args: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"layer-000.safetensors'"):
        record(sharp_model("Llama"), TEXT[0], tmp_path / "teacher", QUERIES, "one")


def test_a_half_written_recording_is_made_anew(tmp_path: Path) -> None:
    model, folder = sharp_model("Llama"), tmp_path / "teacher"
    wanted = record(model, TEXT[0], folder, QUERIES, "one").layer(1, "outputs")[0].clone()  # not a map of the file
    (folder / "recording.json").unlink()
    (folder / "layer-001.safetensors").write_bytes(b"half")
    again = record(model, TEXT[0], folder, QUERIES, "one")
    assert torch.equal(again.layer(1, "outputs")[0], wanted)


def test_a_stopped_recording_says_so_and_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = sharp_model("Llama"), tmp_path / "teacher"
    record(model, TEXT[0], folder, QUERIES, "one")
    before = hidden_of(model)
    monkeypatch.setattr("safetensors.torch.save_file", lambda *args: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        record(model, TEXT[0], folder, QUERIES, "another")
    assert not (folder / "recording.json").exists()  # the files of the old one may be overwritten in part
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(hidden_of(model), before)
