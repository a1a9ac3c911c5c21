"""Rules that change the distance to far keys, against a matrix of positions for every pair, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from attention_models import IDS, families_and_rules, in_chunks, left_padded, sharp_model
from distance_rules import RULES, by_hand, patched_model
from hf_posenc import describe, load_extended, patch_model, save_extended, unpatch_model
from older_transformers import skip_if_left_out
from tiny_models import FAMILIES, logits

PLAIN_UNTIL = {"self_extend": 24, "dca": 40, "rerope": 24, "leaky_rerope": 24}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_attention_is_the_definition_pair_by_pair(rule: str, gradients: bool) -> None:
    model, found = patched_model(rule), []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: found.append(output[0]))
    ids = IDS[:, :200]
    with torch.set_grad_enabled(gradients):
        model(ids, use_cache=False)
    torch.testing.assert_close(found[0][0].double(), by_hand(model, ids, rule), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("family", "rule"), families_and_rules(FAMILIES, RULES))
def test_full_forward_equals_chunked_prefill_and_steps(family: str, rule: str) -> None:
    if family == "StableLm":
        skip_if_left_out("stablelm")
    model = sharp_model(family)
    plain = logits(model, IDS)
    method, options = RULES[rule]
    patch_model(model, method, 8, **options)
    full = logits(model, IDS)
    torch.testing.assert_close(in_chunks(model, IDS, [37, 100, 5]), full, atol=1e-5, rtol=0)
    torch.testing.assert_close(in_chunks(model, IDS, [490, *[1] * 22]), full, atol=1e-5, rtol=0)
    until = PLAIN_UNTIL[method]
    torch.testing.assert_close(full[:, :until], plain[:, :until], atol=1e-5, rtol=0)
    assert torch.equal(logits(model, IDS[:, :until]), logits(unpatch_model(model), IDS[:, :until]))
    assert (full - plain)[:, until:].abs().max() > 1e-3
    assert torch.equal(logits(model, IDS), plain)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_alone_is_the_row_in_any_batch(rule: str) -> None:
    model = patched_model(rule)
    rows = [IDS[:, :length] for length in (230, 90, 20)]
    alone = [logits(model, row)[0] for row in rows]
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        parts = [
            model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
            ).logits
            for begin, end in ((0, 100), (100, 228), (228, 229), (229, 230))
        ]
    for output in (whole, torch.cat(parts, dim=1)):
        for row, expected in zip(output, alone, strict=True):
            torch.testing.assert_close(row[-len(expected) :], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_generation_is_what_a_full_forward_says(rule: str) -> None:
    model = patched_model(rule)
    prompt = expected = IDS[:, :50]
    for _ in range(40):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    assert torch.equal(model.generate(prompt, **kwargs), expected)
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=128)
        torch.testing.assert_close(
            in_chunks(model, expected, [50, 1], cache), logits(model, expected), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("rule", RULES)
def test_training_sees_no_later_token_and_the_same_gradients_in_pieces(rule: str, monkeypatch: Any) -> None:
    model = patched_model(rule)
    embeddings = model.get_input_embeddings()(IDS[:, :200]).detach().requires_grad_()

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad(
            model(inputs_embeds=embeddings, use_cache=False).logits[0, 150].sum(), embeddings
        )
        return found

    whole = gradient()
    assert whole[0, 151:].abs().max() == 0
    assert whole[0, :151].abs().amax(-1).min() > 0
    monkeypatch.setattr("hf_posenc.attention.spans._SCORES", 200 * 7)
    monkeypatch.setattr("hf_posenc.attention.pieces.Pieces.can_tile", lambda self: False)
    torch.testing.assert_close(gradient(), whole, atol=1e-5 * float(whole.abs().max()), rtol=1e-5)


def test_packed_documents_are_each_alone() -> None:
    model = patched_model("self_extend")
    positions = torch.cat([torch.arange(150), torch.arange(90)])[None]
    ids = torch.cat([IDS[:, :150], IDS[:, 200:290]], dim=1)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :150], logits(model, IDS[:, :150]), atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[:, 150:], logits(model, IDS[:, 200:290]), atol=1e-5, rtol=0)


def test_saved_and_loaded(tmp_path: Any) -> None:
    model = patched_model("leaky_rerope")
    loaded = load_extended(save_extended(model, tmp_path / "model")).eval()
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert describe(loaded) == describe(model)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dca", {"chunk_size": 8, "local_window": 8}, "local_window must be less than chunk_size, got 8 and 8"),
        ("self_extend", {"window": 0}, "window must be >= 1"),
        ("leaky_rerope", {"leak": 0.5}, "leak must be >= 1"),
    ],
)
def test_bad_options(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch_model(sharp_model("Llama"), method, 4, **options)
