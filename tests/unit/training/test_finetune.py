"""Fine-tuning end to end on tiny models: learns, resumes to the same numbers, saves what loads again."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_posenc import load_extended, save_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.evaluation import read_records
from hf_posenc.patching.api import patch_model, verify_model
from hf_posenc.training import finetune
from hf_posenc.training.data import hold_out
from hf_posenc.training.lora import attention_linears, norm_names
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.weights import float32_weights
from tiny_runs import SEQ, Build, config, load, load_as_the_card_says, logits_of, losses
from training_blocks import blocks_of_a_run


def test_thirty_steps_lower_the_loss_and_everything_is_written(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    folder = tmp_path / "run"
    result = finetune(tiny_llama(), tokenizer, documents, config(folder, token_budget=30 * 2 * SEQ + 100))
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 31))
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert result.steps == 30
    assert result.tokens_trained == log[-1]["tokens_trained"] == 30 * 2 * SEQ  # the budget, down to whole steps
    assert result.train_loss == pytest.approx(sum(line["loss"] for line in log) / 30)
    assert log[1]["learning_rate"] == pytest.approx(1.5e-3)  # half way through the warm-up
    assert log[-1]["learning_rate"] == pytest.approx(3e-3)

    records = read_records(folder / "results.jsonl")
    assert records == result.records
    assert [(r.method, r.tokens_trained, r.context_length) for r in records] == [
        *(("none", 0, n) for n in (32, 64, 128)),
        *(("yarn", 0, n) for n in (32, 64, 128)),
        *(("yarn", result.tokens_trained, n) for n in (32, 64, 128)),
    ]
    for unextended, before, after in zip(records[:3], records[3:6], records[6:], strict=True):
        assert after.text_hash == before.text_hash == unextended.text_hash
        assert after.perplexity < 0.9 * before.perplexity

    card = (folder / "README.md").read_text()
    assert "Context length 64 tokens as trained, extended 2 times with `yarn`" in card
    assert f"{result.tokens_trained:,} tokens" in card
    assert "base_model:" not in card  # a random model has no name on the Hub
    for record in records:
        assert f"{record.perplexity:.2f}" in card
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (manifest["method"], manifest["factor"], manifest["tokens_trained"]) == ("yarn", 2.0, 30 * 2 * SEQ)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits_of(plain), logits_of(result.model), rtol=0, atol=0)
    assert PreTrainedTokenizerFast.from_pretrained(folder).model_max_length == SEQ


@pytest.mark.parametrize(("micro", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_the_loss_of_a_step_is_the_mean_over_its_tokens(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], micro: int, accumulation: int
):
    uneven = [document[: 5 + 11 * i] for i, document in enumerate(documents)]  # blocks with unequal label counts
    settings = config(
        tmp_path,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        token_budget=2 * 4 * SEQ,
        learning_rate=1e-30,  # the weights stay as they are, so that both steps can be checked
        eval_documents=0,
    )
    finetune(tiny_llama(), tokenizer, uneven, settings)
    model = patch_model(tiny_llama(), "yarn", 2.0)
    blocks = list(blocks_of_a_run(uneven, SEQ, 8, eos_token_id=0))
    expected = [mean_loss_of_documents(model, blocks[i : i + 4]) for i in (0, 4)]
    assert [line["loss"] for line in read_log(tmp_path / "train_log.jsonl")] == pytest.approx(expected, rel=1e-5)


def mean_loss_of_documents(model: nn.Module, blocks: list[dict[str, torch.Tensor]]) -> float:
    """Each document of each block alone, with all its logits."""
    total, count = 0.0, 0
    for block in blocks:
        bounds = [*(block["position_ids"] == 0).nonzero().flatten().tolist(), SEQ]
        for start, end in itertools.pairwise(bounds):
            piece = block["input_ids"][start:end]
            if len(piece) > 1:
                logits = model(piece[None]).logits[0, :-1]
                total += nn.functional.cross_entropy(logits, piece[1:], reduction="sum").item()
                count += len(piece) - 1
    return total / count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_trains_embedding_and_norms_and_reloads_and_merges_to_the_same(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], tied: bool, dtype: torch.dtype
):
    tiny_llama(tie_word_embeddings=tied).to(dtype).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    initial = {name: p.clone() for name, p in base.named_parameters()}
    result = finetune(base, tokenizer, documents, config(tmp_path / "run", lora=True))
    assert result.records[-1].perplexity < 0.95 * result.records[5].perplexity  # the untied head stays random

    trained = {name for name, p in result.model.named_parameters() if p.requires_grad}
    kinds = {"lora_A", "lora_B", "embed_tokens", "input_layernorm", "post_attention_layernorm", "model.norm"}
    assert {kind for kind in kinds if any(kind in name for name in trained)} == kinds
    assert not any("mlp" in name for name in trained)
    for name, parameter in result.model.named_parameters():
        if "modules_to_save" in name and "lm_head" not in name:
            plain = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
            assert not torch.equal(parameter, initial[plain]), name
            assert parameter.dtype == dtype

    expected = logits_of(result.model)
    assert (tmp_path / "run/adapter_model.safetensors").is_file()
    loaded = load_extended(tmp_path / "run")
    torch.testing.assert_close(logits_of(loaded), expected, rtol=0, atol=1e-6)
    by_peft = load_as_the_card_says(tmp_path / "run", tmp_path / "base")["model"]  # merged by its last lines
    torch.testing.assert_close(logits_of(by_peft), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    merged = loaded.merge_and_unload()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is tied
    tolerance = 1e-5 if dtype == torch.float32 else 0.05  # merging rounds the sum to bfloat16 once
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=tolerance)
    save_extended(merged, tmp_path / "merged", tokenizer)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(reloaded), logits_of(merged), rtol=0, atol=0)
    assert reloaded.dtype == dtype


def test_a_half_precision_checkpoint_is_trained_in_float32_and_comes_back(
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    documents: list[torch.Tensor],
    cpu_with_bfloat16: Callable[[bool], None],
):
    cpu_with_bfloat16(True)  # elsewhere it is computed in float32 too: test_dtypes.py
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    seen: list[set[torch.dtype]] = []
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: (
            seen.append({module.up_proj.weight.dtype, output.dtype}) if module.training else None
        )
    )
    result = finetune(model, tokenizer, documents, config(tmp_path / "run", eval_documents=0))
    hook.remove()
    assert all(dtypes == {torch.float32, torch.bfloat16} for dtypes in seen)  # weights, and what autocast computes
    assert len(seen) == result.steps
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    verify_model(model)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert reloaded.dtype == torch.bfloat16
    torch.testing.assert_close(logits_of(reloaded), logits_of(model), rtol=0, atol=0)
    assert logits_of(model).dtype == torch.float32  # by the helper's cast alone:
    assert model(torch.ones(1, 4, dtype=torch.int64)).logits.dtype == torch.bfloat16  # no autocast is left behind


def test_lora_without_autocast_on_a_half_precision_checkpoint(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    model = tiny_llama().to(torch.bfloat16)
    model.model.rotary_emb.register_buffer("inv_freq", tiny_llama().model.rotary_emb.inv_freq, persistent=False)
    frozen = model.model.layers[0].mlp.up_proj.weight
    before = frozen.clone()
    seen: set[torch.dtype] = set()
    frozen_in = model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: seen.add(output.dtype) if module.training else None
    )
    result = finetune(model, tokenizer, documents, config(tmp_path, lora=True, bf16=False, eval_documents=0))
    frozen_in.remove()
    assert seen == {torch.float32}
    assert frozen.dtype == torch.bfloat16
    assert torch.equal(frozen, before)
    log = read_log(tmp_path / "train_log.jsonl")
    assert log[-1]["loss"] < log[0]["loss"]
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    verify_model(result.model)


def test_float32_weights_keeps_ties_and_frozen_weights(tiny_llama: Build):
    model = tiny_llama(tie_word_embeddings=True).to(torch.bfloat16)
    model.model.norm.weight.requires_grad_(False)
    with float32_weights(model, frozen=False):
        assert model.lm_head.weight.dtype == torch.float32
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.model.norm.weight.dtype == torch.bfloat16
        with torch.no_grad():
            model.lm_head.weight += 1e-5  # lost at once in bfloat16
        assert not torch.equal(model.lm_head.weight, model.lm_head.weight.bfloat16().float())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_texts_eval_documents_and_lengths(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], caplog: pytest.LogCaptureFixture
):
    texts = [tokenizer.decode(document) for document in documents[:4]]
    result = finetune(
        tiny_llama(),
        tokenizer,
        texts,
        config(tmp_path, token_budget=2 * SEQ, eval_lengths=[16, 100, 4096]),
        eval_documents=texts[:1],
    )
    assert [r.context_length for r in result.records] == [16, 100] * 3
    assert "perplexity at 4096 is not measured" in caplog.text


def test_trackers_get_what_trainer_logs(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tracker"))
    settings = config(tmp_path / "run", token_budget=2 * SEQ, eval_documents=0, report_to="tensorboard")
    finetune(tiny_llama(), tokenizer, documents, settings)
    assert list((tmp_path / "tracker").rglob("events.out.tfevents.*"))


def test_hold_out():
    many = [torch.full((5,), i) for i in range(40)]
    train, held = hold_out(many, 100)
    assert [d[0].item() for d in held] == [38, 39]
    assert len(train) == 38
    one = [torch.arange(1000)]
    assert [len(d[0]) for d in hold_out(one, 100)] == [900, 100]
    assert [len(d[0]) for d in hold_out(one, 250)] == [750, 250]
    assert [len(d[0]) for d in hold_out(one, 600)] == [950, 50]  # 600 cannot be measured: no more than need be is lost
    assert hold_out(one, 10)[1][0].tolist() == list(range(950, 1000))


def test_block_schedule_sees_every_block_before_any_again():
    order = blocks_of_a_run([torch.arange(1, 41)], 8, 12, seed=1).order
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    assert len(order) == 12
    assert order[:5] != order[5:10]


def test_names_of_what_lora_trains(tiny_llama: Build):
    model = tiny_llama()
    assert attention_linears(model) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert norm_names(model) == ["input_layernorm", "norm", "post_attention_layernorm"]
    with pytest.raises(ValueError, match=r"nn\.Linear"):
        attention_linears(nn.Sequential(nn.Linear(2, 2)))


def test_the_probe_and_the_packing_are_logged(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="hf_posenc"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path, token_budget=2 * SEQ, eval_documents=0))
    assert "(attn_implementation 'sdpa', 2" in caplog.text
    assert "are in none of these blocks" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # it looks at it
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_has_the_losses_of_one_that_is_not(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    short = {"token_budget": 3 * 2 * SEQ, "eval_documents": 0}
    finetune(tiny_llama(), tokenizer, documents, config(plain, **short))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = finetune(tiny_llama(), tokenizer, documents, config(compiled, torch_compile=True, **short)).model
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    assert len(losses(plain)) == 3
    verify_model(model)
    torch.testing.assert_close(logits_of(load(compiled)), logits_of(load(plain)), rtol=1e-3, atol=1e-3)
