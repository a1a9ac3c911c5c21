"""The head taken apart: its losses, its memory, and the check that nothing is missing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    LlamaForCausalLM,
    LlamaModel,
    ModernBertDecoderConfig,
)

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.lm_head import check_head, decoder_body, head_logits, row_chunks, token_losses

SHARED = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS = {
    "gemma2, capped": Gemma2Config(**SHARED, final_logit_softcapping=0.05),
    "cohere, multiplied": CohereConfig(**SHARED, logit_scale=0.25),
    "granite, divided": GraniteConfig(**SHARED, logits_scaling=8.0),
    "falcon_h1, multiplied in the body": FalconH1Config(
        **SHARED, lm_head_multiplier=0.25, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_state=16, mamba_chunk_size=32
    ),
    "modernbert, one more layer": ModernBertDecoderConfig(**{k: v for k, v in SHARED.items() if k != "head_dim"}),
}


@pytest.fixture(params=CONFIGS)
def changing_model(request):
    """A model that does something before or after the matrix product, strongly enough to be seen."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()


@torch.no_grad()
def test_families_that_change_their_logits(changing_model):
    model, ids = changing_model, torch.arange(1, 20)[None]
    check_head(model)
    expected = model(input_ids=ids, use_cache=False).logits
    hidden = decoder_body(model)(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(head_logits(model, hidden), expected)
    torch.testing.assert_close(head_logits(model, hidden[0, 3:5]), expected[0, 3:5], rtol=0, atol=1e-6)  # any rows
    product = model.get_output_embeddings()(hidden)
    assert (product - expected).abs().max() > 1e-2  # or the test would pass without head_logits doing anything


@torch.no_grad()
def test_losses_equal_the_model_s_own_in_any_chunks(changing_model):
    model, ids = changing_model, torch.arange(1, 24)
    expected = float(model(input_ids=ids[None], labels=ids[None], use_cache=False).loss)
    hidden = decoder_body(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    for rows in (1, 5, 22, 1000):
        losses = token_losses(model, hidden, ids[1:], rows)
        assert losses.mean().item() == pytest.approx(expected, rel=1e-6)
        assert (losses.shape, losses.dtype, losses.device.type) == ((22,), torch.float32, "cpu")


def test_logits_never_have_more_rows_than_asked(tiny_llama):
    model, rows = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel() // 128))
    token_losses(model, torch.randn(50, 64), torch.randint(0, 128, (50,)), rows_per_chunk=8)
    assert rows == [8, 8, 8, 8, 8, 8, 2]


def test_a_chunk_of_logits_is_gone_before_the_next_is_made(tiny_llama):
    model, made, alive = tiny_llama(), [], []
    model.lm_head.register_forward_pre_hook(lambda *_: alive.append(sum(logits() is not None for logits in made)))
    model.lm_head.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    token_losses(model, torch.randn(20, 64), torch.randint(0, 128, (20,)), rows_per_chunk=8)
    assert alive == [0, 0, 0]


def test_half_precision_heads_give_float32_losses_that_pass_the_check(changing_model):
    model = changing_model.to(torch.bfloat16)
    check_head(model)
    losses = token_losses(model, torch.randn(4, 32, dtype=torch.bfloat16), torch.tensor([1, 2, 3, 4]))
    assert losses.dtype == torch.float32


@pytest.mark.parametrize("change", [lambda x: x * 1.01, lambda x: torch.tanh(x / 0.1) * 0.1, lambda x: x + 0.01])
def test_a_change_to_the_logits_outside_the_forward_is_refused(changing_model, change):
    model = changing_model
    model.register_forward_hook(lambda module, args, output: setattr(output, "logits", change(output.logits)))
    with pytest.raises(InvalidRequestError, match=rf"report this model_type: {model.config.model_type}"):
        check_head(model)


def test_the_body_is_in_its_place_again_and_its_hooks_do_not_run(tiny_llama):
    model, calls = tiny_llama(), []
    body = model.model
    body.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(RuntimeError):
        head_logits(model, torch.randn(2, 63))  # a width that the head does not have
    head_logits(model, torch.randn(2, 64))
    assert model.model is body
    assert not calls


def test_a_body_without_a_head_is_refused(tiny_llama):
    body = LlamaModel(tiny_llama().config)
    with pytest.raises(ValueError, match="language-model"):
        decoder_body(body)


def test_row_chunks_cover_everything_once():
    assert [(rows.start, rows.stop) for rows in row_chunks(7, 3)] == [(0, 3), (3, 6), (6, 7)]
    assert list(row_chunks(0, 3)) == []


@torch.no_grad()
def test_a_head_that_is_offloaded_gets_what_its_hook_moves(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    model, hidden = tiny_llama(), torch.randn(1, 5, 64)
    expected = head_logits(model, hidden)
    away = dispatch_model(model, {"model": "cpu", "lm_head": "disk"}, offload_dir=tmp_path, force_hooks=True)
    assert away.lm_head.weight.device.type == "meta"
    check_head(away)
    torch.testing.assert_close(head_logits(away, hidden), expected)
