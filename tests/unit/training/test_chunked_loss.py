"""The loss in chunks against the model's own loss, and the probe that packed documents do not see each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.models.cohere import CohereConfig
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.modernbert_decoder import ModernBertDecoderConfig

from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training import chunked_loss
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.start_checks import probe_isolation
from tiny_models import recompute_activations

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 32}
HEADS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2-soft-cap": lambda: Gemma2Config(**SMALL, final_logit_softcapping=0.5),
    "cohere-logit-scale": lambda: CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logit_scale=0.3),
    "granite-logits-scaling": lambda: GraniteConfig(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, logits_scaling=4.0
    ),
    "falcon-h1-multiplier": lambda: FalconH1Config(**SMALL, lm_head_multiplier=3.0, **MAMBA),
    # A dense layer and a norm before the output embeddings, which are trained too.
    "modernbert-layer-before": lambda: ModernBertDecoderConfig(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, attn_implementation="sdpa"
    ),
}


def build(config: Any, **kwargs: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **kwargs)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 97, (2, 21), generator=generator)
    position_ids = torch.cat([torch.arange(9), torch.arange(12)]).expand(2, -1).contiguous()
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": input_ids.masked_fill(position_ids == 0, -100),
    }


def plain_loss(model: nn.Module, num_items: int | None = None, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    """The textbook way: all logits, shift, cross entropy."""
    inputs = inputs or batch()
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    total = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return total / (num_items or int((inputs["labels"][:, 1:] != -100).sum()))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_equal_the_plain_way(head: str, checkpointing: bool):
    model = build(HEADS[head]()).train()
    if checkpointing:
        recompute_activations(model)
    expected = plain_loss(model)
    expected.backward()
    expected_grads = gradients(model)
    model.zero_grad()
    with chunked_lm_loss(model, rows_per_chunk=7):
        loss = model(**batch()).loss
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert gradients(model).keys() == expected_grads.keys()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_weight_that_no_logits_depend_on_has_no_gradient():
    model = build(HEADS["llama"]())
    model.unread = nn.Linear(3, 3)
    with chunked_lm_loss(model, rows_per_chunk=7):
        model(**batch()).loss.backward()
    assert model.unread.weight.grad is None  # zeros would let weight decay move it
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("count", [0, 5])
def test_rows_that_do_not_count_get_no_logits(count: int, monkeypatch: pytest.MonkeyPatch):
    model, inputs, rows = build(HEADS["llama"]()), batch(), []
    inputs["labels"][:] = -100
    inputs["labels"][0, 3 : 3 + count] = 7
    head_logits = chunked_loss.head_logits

    def watched(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head_logits(model, hidden)

    monkeypatch.setattr(chunked_loss, "head_logits", watched)
    with chunked_lm_loss(model, rows_per_chunk=3):
        loss = model(**inputs).loss
        loss.backward()
    assert sum(rows) == max(count, 1)
    assert max(rows) <= 3
    assert model.lm_head.weight.grad is not None
    assert loss.item() == pytest.approx(plain_loss(model, max(count, 1), inputs).item(), rel=1e-5)


def test_num_items_in_batch_divides():
    model = build(HEADS["llama"]())
    with chunked_lm_loss(model, rows_per_chunk=7):
        loss = model(**batch(), num_items_in_batch=torch.tensor(1000)).loss
    torch.testing.assert_close(loss, plain_loss(model, 1000), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's call
def test_through_peft():
    model = build(HEADS["llama-tied"]())
    adapted = get_peft_model(
        model,
        LoraConfig(
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["embed_tokens", "norm"],
            ensure_weight_tying=True,
            init_lora_weights=False,
        ),
    )
    expected = plain_loss(adapted)
    expected.backward()
    expected_grads = gradients(adapted)
    adapted.zero_grad()
    with chunked_lm_loss(adapted, rows_per_chunk=7):
        loss = adapted(**batch()).loss
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert any("embed_tokens" in name for name in expected_grads)
    for name, grad in gradients(adapted).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-5, atol=1e-6, msg=name)


def test_logits_are_never_whole():
    model = build(HEADS["llama"]())
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel() // 97))
    with chunked_lm_loss(model, rows_per_chunk=7):
        model(**batch()).loss.backward()
    assert max(rows) == 7
    # Those that predict a document's first token do not count; once: a chunk's gradient is taken while it is there.
    assert sum(rows) == 2 * 19


def test_the_model_is_itself_again():
    model = build(HEADS["llama"]())
    twin = copy.deepcopy(model)
    before = model(**batch(), use_cache=False).logits
    with chunked_lm_loss(model):
        assert model(**batch()).logits is None
        assert twin(**batch()).logits is not None
    assert "forward" not in vars(model)
    assert not hasattr(model, "accepts_loss_kwargs")
    torch.testing.assert_close(model(**batch(), use_cache=False).logits, before, rtol=0, atol=0)


def test_a_mask_and_a_router_loss_are_refused():
    model = build(HEADS["llama"]())
    with chunked_lm_loss(model), pytest.raises(ValueError, match="packed documents"):
        model(**batch(), attention_mask=torch.ones(2, 21, dtype=torch.int64))
    mixtral = build(MixtralConfig(**SMALL, num_local_experts=2, output_router_logits=True))
    with pytest.raises(ValueError, match="output_router_logits"), chunked_lm_loss(mixtral):
        pass


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_finds_documents_isolated(attention: str, batch_size: int, dtype: torch.dtype):
    model = build(LlamaConfig(**SMALL), attn_implementation=attention).to(dtype).train()
    assert probe_isolation(RotaryModel(model), batch_size) <= 1e-6
    assert model.training


def _add_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


def _use_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "use_cache": True}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("spoil", [_add_mask, _use_cache])
def test_probe_fails_when_a_mask_or_a_cache_is_added(spoil: Callable[..., Any], attention: str):
    model = build(LlamaConfig(**SMALL), attn_implementation=attention)
    model.model.register_forward_pre_hook(spoil, with_kwargs=True)
    with pytest.raises(RuntimeError, match=f"attn_implementation '{attention}'"):
        probe_isolation(RotaryModel(model))


def test_probe_names_an_attention_that_ignores_position_ids():
    def deaf(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    AttentionInterface.register("deaf", deaf)
    model = build(LlamaConfig(**SMALL), attn_implementation="deaf")
    with pytest.raises(RuntimeError, match="attn_implementation 'deaf'"):
        probe_isolation(RotaryModel(model))
