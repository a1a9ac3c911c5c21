"""A training that begins as a model with an adapter: `fit --adapt --save-adapter`, or an earlier `finetune --lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posenc import load_extended, patch_model, save_extended
from hf_posenc.checkpoint.manifest import has_base_weights
from hf_posenc.evaluation import read_records
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.patching.api import unpatch_model
from hf_posenc.training import finetune
from hf_posenc.training.blending import SHORT_TEXTS
from hf_posenc.training.lora import begin_from_adapter, check_trainable, without_adapters
from hf_posenc.training.step_plan import LoraSettings
from tiny_runs import SEQ, Build, config, killed_at, losses, make_documents, make_tokenizer

ONE_STEP = {"token_budget": 2 * SEQ, "eval_documents": 0, "learning_rate": 1e-6, "warmup_steps": 0}


@pytest.fixture
def adapter(tmp_path: Path, tiny_llama: Build) -> Path:
    """An adapter of rank 3 on queries and keys, under yarn, as a fit saves it."""
    return save(tiny_llama(), tmp_path, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj"]))


def save(model: Any, folder: Path, lora: LoraConfig) -> Path:
    model.save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    wrapped = get_peft_model(patch_model(base, "yarn", factor=2), lora)
    generator = torch.Generator().manual_seed(3)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 5
    facts = {"adapted": {"rank": 3}, "context_length": SEQ}
    return save_extended(wrapped, folder / "adapter", make_tokenizer(), fitted_on=facts)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(1, 60, (1, SEQ), generator=torch.Generator().manual_seed(9))
    out: torch.Tensor = model.eval()(ids).logits
    return out


def merged(adapter: Path) -> torch.Tensor:
    """As PEFT merges it."""
    return logits(load_extended(adapter).merge_and_unload())


@pytest.mark.parametrize(("rank", "alpha", "targets"), [(3, 6, "attention"), (8, 4, "attention"), (5, 5, "all-linear")])
def test_a_new_adapter_begins_as_the_old_one(rank: int, alpha: int, targets: Any, adapter: Path) -> None:
    model, settings = load_extended(adapter), LoraSettings(rank, alpha, targets, embeddings=False)
    assert check_trainable(model, settings)
    grown = begin_from_adapter(model, settings)
    torch.testing.assert_close(logits(grown), merged(adapter), rtol=0, atol=1e-5)
    trained = [name for name, parameter in grown.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * (7 if targets == "all-linear" else 4)
    assert grown.peft_config["default"].r == rank
    grown(torch.arange(1, 50)[None], labels=torch.arange(1, 50)[None]).loss.backward()
    changes = {name for name, one in grown.named_parameters() if one.grad is not None and one.grad.any()}
    assert {name for name in trained if "lora_B" in name} <= changes


def test_what_an_adapter_trained_whole_is_taken_over(tmp_path: Path, tiny_llama: Build) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    adapter = save(tiny_llama(), tmp_path, lora)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    named = PeftModel.from_pretrained(patch_model(base, "yarn", factor=2), str(adapter), adapter_name="other")
    for model in (load_extended(adapter), named):
        grown = begin_from_adapter(model, LoraSettings(4, 8))
        torch.testing.assert_close(logits(grown), merged(adapter), rtol=0, atol=1e-5)


def test_an_adapter_of_finetune_with_a_tied_head_is_gone_on_with(tmp_path: Path, tiny_llama: Build) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = config(tmp_path / "first", **{**ONE_STEP, "learning_rate": 1e-2, "lora": True})
    finetune(base, make_tokenizer(), make_documents(), settings)
    model, new = load_extended(tmp_path / "first"), LoraSettings(16, 16)
    assert check_trainable(model, new)
    torch.testing.assert_close(logits(begin_from_adapter(model, new)), merged(tmp_path / "first"), rtol=0, atol=1e-5)


def test_all_weights_are_trained_of_the_merged_model(adapter: Path, tmp_path: Path) -> None:
    result = finetune(load_extended(adapter), make_tokenizer(), make_documents(), config(tmp_path / "run", **ONE_STEP))
    assert not isinstance(result.model, PeftModel)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    torch.testing.assert_close(logits(saved), merged(adapter), rtol=0, atol=1e-3)  # after one small step
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(saved) - logits(base)).abs().max() > 0.02
    changed = [name for name, weight in saved.named_parameters() if not torch.equal(weight, base.get_parameter(name))]
    assert len(changed) == len(list(base.parameters()))


def test_an_adapter_is_trained_on_and_the_run_goes_on(adapter: Path, tmp_path: Path) -> None:
    def run(folder: Path, **changes: Any) -> None:
        lora = {"lora": True, "lora_rank": 4, "lora_embeddings": False, "token_budget": 4 * 2 * SEQ, "save_steps": 2}
        settings = config(folder, **{**lora, "learning_rate": 1e-2, **changes})
        finetune(load_extended(adapter), make_tokenizer(), make_documents(), settings)

    run(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    assert isinstance(load_extended(tmp_path / "whole"), PeftModel)
    with killed_at(3):
        run(tmp_path / "killed")
    run(tmp_path / "killed", resume_from_checkpoint="true")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    one, other = (logits(load_extended(tmp_path / name)) for name in ("whole", "killed"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("before", [0, 7])
def test_the_base_model_is_what_is_retained(before: int, adapter: Path, tmp_path: Path) -> None:
    """Not the model without its extension and with the adapter, which nobody uses."""
    held_out = make_documents()[:2]
    pieces = [piece for text in held_out for piece in text.split(64) if len(piece) == 64]

    @torch.no_grad()
    def perplexity(model: Any) -> float:
        return float(torch.stack([model.eval()(piece[None], labels=piece[None]).loss for piece in pieces]).mean().exp())

    settings = config(tmp_path / "run", **{**ONE_STEP, "keep": 0.5, "eval_documents": 6, "eval_lengths": [64]})
    given = load_extended(adapter), make_tokenizer(), make_documents(), settings
    result = finetune(*given, eval_documents=held_out, tokens_trained=before)
    by_hand = perplexity(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    found = [one for one in read_records(tmp_path / "run" / SHORT_TEXTS) if one.label == "held-out documents"]
    perplexities = {one.method: one.perplexity for one in found}
    tokens = {(one.method, one.tokens_trained) for one in [*found, *result.records]}
    assert tokens == {("none", 0), ("yarn", before), ("yarn", before + 2 * SEQ)}
    assert perplexities["none"] == pytest.approx(by_hand, rel=1e-5)
    assert perplexities["yarn"] == pytest.approx(perplexity(load_extended(adapter)), rel=1e-5)
    unextended = next(one for one in result.records if one.method == "none")
    assert unextended.perplexity == pytest.approx(by_hand, rel=1e-5)
    other = unpatch_model(load_extended(adapter))
    assert abs(perplexity(other) / by_hand - 1) > 1e-3


def test_a_disabled_adapter_does_not_count(adapter: Path, tmp_path: Path) -> None:
    model, base = load_extended(adapter), AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    inside = model.base_model.model
    unpatch_model(model)
    with without_adapters(model):
        assert hash_weights(inside) == hash_weights(base)
        assert torch.equal(logits(model), logits(base))
    assert hash_weights(inside) != hash_weights(base)
    assert not any(parameter.requires_grad for parameter in model.parameters())  # as it was loaded


def test_whose_weights_are_those_of_the_base(adapter: Path, tmp_path: Path) -> None:
    facts = {"adapted": {"rank": 3}, "context_length": SEQ}
    trained_adapter = save_extended(load_extended(adapter), tmp_path / "trained-adapter", tokens_trained=7)
    whole = save_extended(load_extended(adapter).merge_and_unload(), tmp_path / "merged", fitted_on=facts)
    trained = save_extended(load_extended(whole), tmp_path / "trained", tokens_trained=7)
    on_trained = get_peft_model(load_extended(trained), LoraConfig(r=2, target_modules=["q_proj"]))
    of_trained = save_extended(on_trained, tmp_path / "adapter-of-trained", tokens_trained=9)
    assert all(has_base_weights(folder) for folder in (tmp_path / "base", adapter, trained_adapter))
    assert not any(has_base_weights(folder) for folder in (whole, trained, of_trained))


def test_a_smaller_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    settings = config(tmp_path / "run", **{**ONE_STEP, "lora": True, "lora_embeddings": False, "lora_rank": 2})
    said = "the adapter has rank 3, so a new one that begins as it is needs lora_rank=3 or more, got 2"
    with pytest.raises(ValueError, match=said):
        finetune(load_extended(adapter), make_tokenizer(), make_documents(), settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # PEFT, of the last two
@pytest.mark.parametrize(
    ("lora", "settings", "said"),
    [
        ({"target_modules": ["up_proj"]}, (), "changes .*up_proj, which a new one for the attention does not"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, ("attention", False), "trained .*norm too"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, (), "trained .*lm_head too, which a new one"),
        ({"target_modules": ["q_proj"], "use_dora": True}, (), "of LoRA on linear layers without the head"),
        ({"target_modules": ["q_proj", "lm_head"]}, ("all-linear", False), "of LoRA on linear layers without the head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, (), "of LoRA on linear layers without the head"),
    ],
)
def test_an_adapter_that_is_more_than_the_new_one(
    lora: dict[str, Any], settings: tuple[Any, ...], said: str, tmp_path: Path, tiny_llama: Build
) -> None:
    model = load_extended(save(tiny_llama(), tmp_path, LoraConfig(r=2, **lora)))
    with pytest.raises(ValueError, match=said):
        check_trainable(model, LoraSettings(4, 8, *settings))
