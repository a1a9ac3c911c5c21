"""What decides whether a number is measured again: the hash of the weights, keys of records, the file they go to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_posenc.evaluation import Record, perplexity, read_records
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.evaluation.records import append_line

Edit = Callable[[torch.Tensor], object]


def set_every_64th(weight: torch.Tensor) -> None:
    weight.view(-1)[5::64] = 0.5


def negate_every_64th(weight: torch.Tensor) -> None:
    weight.view(-1)[63::64] *= -1


def change_last_bit(weight: torch.Tensor) -> None:
    whole = torch.int16 if weight.element_size() == 2 else torch.int32
    weight.view(whole).view(-1)[1234] ^= 1


def swap_two(weight: torch.Tensor) -> None:
    weight.view(-1)[[7, 9]] = weight.view(-1)[[9, 7]]


def swap_rows(weight: torch.Tensor) -> None:
    weight[[0, 100]] = weight[[100, 0]]


def negate_all(weight: torch.Tensor) -> None:
    weight.neg_()


EDITS: tuple[Edit, ...] = (set_every_64th, negate_every_64th, change_last_bit, swap_two, swap_rows, negate_all)


@pytest.fixture
def model(tiny_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """In bytes, up_proj (128 x 64) fills whole rows of 8192, q_proj (240 x 64) leaves a rest."""
    return tiny_llama(num_attention_heads=8, num_key_value_heads=2, head_dim=30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "self_attn.q_proj.weight"])
@pytest.mark.parametrize("edit", EDITS)
def test_any_change_of_a_weight_changes_the_hash(
    model: LlamaForCausalLM, edit: Edit, name: str, dtype: torch.dtype
) -> None:
    weight = model.to(dtype).model.layers[1].get_parameter(name)
    before = hash_weights(model)
    assert hash_weights(model) == before
    original = weight.detach().clone()
    with torch.no_grad():
        edit(weight)
        assert not torch.equal(weight, original)
        assert hash_weights(model) != before
        weight.copy_(original)
    assert hash_weights(model) == before


def test_the_hash_is_of_values_not_of_how_they_lie_in_memory(model: LlamaForCausalLM) -> None:
    before, layer = hash_weights(model), model.model.layers[0].self_attn.q_proj
    weight = layer.weight.detach()
    transposed = weight.t().contiguous().t()
    shifted = torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight)
    for other in (transposed, shifted):
        assert torch.equal(other, weight)
        layer.weight = torch.nn.Parameter(other)
        assert hash_weights(model) == before


def test_the_hash_sees_names_shapes_buffers_and_takes_any_tensor(model: LlamaForCausalLM) -> None:
    hashes = {hash_weights(model)}
    for buffer in (torch.empty(0), torch.tensor(1.5), torch.tensor([True, False]), torch.zeros(3, device="meta")):
        model.register_buffer("extra", buffer)
        hashes.add(hash_weights(model))
    model.register_buffer("other", model.extra.clone())
    hashes.add(hash_weights(model))
    model.model.rotary_emb.inv_freq.mul_(2)
    hashes.add(hash_weights(model))
    assert len(hashes) == 7


def test_an_edited_model_is_measured_again(tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    model, path = tiny_llama(), tmp_path / "r.jsonl"
    documents = [torch.randint(1, 128, (40,))]
    (before,) = perplexity(model, documents, [40], output=path, progress=False)
    with torch.no_grad():
        set_every_64th(model.model.layers[0].self_attn.q_proj.weight)
    (after,) = perplexity(model, documents, [40], output=path, progress=False)
    assert after.run_key != before.run_key
    assert after.nll_sum == perplexity(model, documents, [40], progress=False)[0].nll_sum != before.nll_sum
    assert read_records(path) == [before, after]


def test_a_command_with_a_path_that_is_no_utf_8_is_kept(tmp_path: Path) -> None:
    line = json.dumps({"command": "eval --documents caf\udce9.txt"}, ensure_ascii=False)
    append_line(tmp_path / "r.jsonl", line)
    assert json.loads((tmp_path / "r.jsonl").read_text("utf-8")) == json.loads(line)


def test_a_record_without_its_key_is_refused(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    (record,) = perplexity(tiny_llama(), [torch.arange(1, 20)], [10], progress=False)
    values = json.loads(record.to_json())
    assert Record.from_values({**values, "unknown": 1}) == record
    del values["run_key"]
    with pytest.raises(ValueError, match="run_key"):
        Record.from_values(values)


def test_output_that_cannot_be_written_is_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"results\.jsonl"):
        perplexity(None, [[1, 2, 3]], [2], output=tmp_path)  # type: ignore[arg-type]  # not even looked at
    with pytest.raises(ValueError, match="file' is"):
        perplexity(None, [[1, 2, 3]], [2], output=tmp_path / "file" / "new" / "r.jsonl")  # type: ignore[arg-type]  # not even looked at
