"""Blocks with skipped positions: documents isolated, chunks of one not; against float64 by hand and explicit masks."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, silu
from transformers import PreTrainedModel

import model_types
from attention_models import sharp_model
from hf_posenc import patch_model
from hf_posenc.attention.staged import Stages
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import extension_of
from hf_posenc.training import masks
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.masks import documents_start_at_zero
from hf_posenc.training.positions import PositionSchedule
from hf_posenc.training.start_checks import probe_isolation
from older_transformers import skip_if_left_out, skip_on_5_0
from tiny_models import FAMILIES, native, token_ids

ORIGINAL, FACTOR = 64, 4
LENGTHS = (30, 1, 33)
SPANS = list(itertools.pairwise([0, *itertools.accumulate(LENGTHS)]))
IDS = token_ids(sum(LENGTHS))
METHODS: dict[str, dict[str, Any]] = {"yarn": {}, "dynamic_yarn": {"stage": 32}}
TAKE_A_MASK_PER_KIND = {"Qwen2", "Qwen2Moe", "Qwen3", "Gemma2", "SmolLM3"}
CASES = [
    *((family, "yarn", "eager" if family == "Gemma2" else "sdpa") for family in FAMILIES),
    *((family, "dynamic_yarn", "sdpa") for family in ("Llama", "Phi3", "Qwen3")),
    *((family, "dynamic_yarn", "eager") for family in ("Gemma2", "GPTNeoX")),
    *((family, "yarn", "eager") for family in ("Llama", "GPTNeoX")),
    *(("Mistral-window", "yarn", attention) for attention in ("sdpa", "eager")),
]


def blocks(kind: str = "pose") -> torch.Tensor:
    """Positions of two blocks that reach past the original length."""
    schedule = PositionSchedule(kind, ORIGINAL, FACTOR * ORIGINAL, seed=4)
    rows = torch.stack([schedule.of(0, LENGTHS), schedule.of(1, LENGTHS)])
    assert bool((rows.max(dim=1).values >= ORIGINAL).all())
    return rows


@torch.no_grad()
def packed_logits(model: PreTrainedModel, position_ids: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    with documents_start_at_zero(model.config):
        return model(ids.repeat(len(position_ids), 1), position_ids=position_ids, use_cache=False).logits


@torch.no_grad()
def logits_alone(model: PreTrainedModel, family: str, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One document, with masks written out here, so that Transformers makes none; windows are of positions."""
    distance = positions[:, None] - positions
    causal = distance >= 0  # positions of one document rise
    width = getattr(model.config, "sliding_window", None)
    window = causal & (distance < width) if width else causal
    if model.config._attn_implementation.endswith("eager"):
        lowest = torch.finfo(torch.float32).min
        causal, window = (torch.zeros(mask.shape).masked_fill(~mask, lowest) for mask in (causal, window))
    masks: Any = {"full_attention": causal[None, None], "sliding_attention": window[None, None]}
    if family not in TAKE_A_MASK_PER_KIND:
        masks = masks["sliding_attention" if family == "Mistral-window" else "full_attention"]
    return model(ids, position_ids=positions[None], attention_mask=masks, use_cache=False).logits


@pytest.mark.parametrize(("family", "method", "attention"), CASES)
def test_each_document_alone_gives_the_logits_of_the_packed_block(family: str, method: str, attention: str):
    changes = {"sliding_window": 80} if family == "Mistral-window" else {}
    if family == "StableLm":
        skip_if_left_out("stablelm")
    if family in ("Mistral-window", "Gemma2"):
        skip_on_5_0("measures windows in tokens, not in positions")
    model = sharp_model(family.partition("-")[0], attn_implementation=attention, **changes)
    with pytest.warns(UserWarning, match="each layer looks back 80 tokens") if changes else nullcontext():
        patch_model(model, method, 2 if changes else FACTOR, **METHODS[method])
    rows = blocks()
    together = packed_logits(model, rows)
    for row, positions in enumerate(rows):
        for start, stop in SPANS:
            alone = logits_alone(model, family, IDS[:, start:stop], positions[start:stop])
            torch.testing.assert_close(together[row, start:stop], alone[0], rtol=1e-4, atol=2e-5)


def rules(model: PreTrainedModel, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 frequencies ``(length, pairs)`` and attention factors ``(length,)`` of each query, from Transformers."""
    extension = extension_of(model)
    assert extension is not None
    plain = sharp_model("Llama")
    factors = [float(FACTOR)] * len(positions)
    if extension.method.name == "dynamic_yarn":
        assert Stages(extension.spec, extension.method).ends(200) == [64, 96, 128, 160, 192, 224]
        factors = [1.0 if p < 64 else (p // 32 * 32 + 32) / 64 for p in positions.tolist()]
    made = {f: native(plain, "yarn", f).get_decoder().rotary_emb for f in set(factors)}
    inv_freq = torch.stack([made[f].inv_freq.double() for f in factors])
    return inv_freq, torch.tensor([made[f].attention_scaling for f in factors]).double()


@torch.no_grad()
def llama_by_hand(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits of a Llama in float64, each pair of tokens rotated by its distance; documents are ``SPANS``."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    inv_freq, factor = rules(model, positions)
    angle = inv_freq[:, None] * (positions[:, None] - positions).double()[..., None]  # query, key, pair
    rotation = torch.polar(torch.ones_like(angle), angle)
    seen = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for start, stop in SPANS:
        seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    def pairs(x: torch.Tensor, count: int) -> torch.Tensor:  # (length, heads, width / 2), complex
        first, second = x.view(len(x), count, 2, width // 2).unbind(2)
        return torch.complex(first, second).repeat_interleave(heads // count, dim=1)

    x = weights["model.embed_tokens.weight"][ids]
    for index in range(config.num_hidden_layers):
        layer = {k.partition(f"layers.{index}.")[2]: w for k, w in weights.items() if f"layers.{index}." in k}
        y = norm(x, layer["input_layernorm.weight"])
        q, k = (
            pairs(y @ layer["self_attn.q_proj.weight"].T, heads),
            pairs(y @ layer["self_attn.k_proj.weight"].T, kv_heads),
        )
        v = (y @ layer["self_attn.v_proj.weight"].T).view(len(y), kv_heads, width)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("qhp,khp,qkp->hqk", q, k.conj(), rotation).real * (factor**2)[:, None] / width**0.5
        share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khw->qhw", share, v).reshape(len(y), -1) @ layer["self_attn.o_proj.weight"].T
        y = norm(x, layer["post_attention_layernorm.weight"])
        gate, up = (y @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("kind", ["pose", "random"])
@pytest.mark.parametrize("method", METHODS)
def test_a_packed_block_is_attention_in_float64_with_its_positions_and_an_explicit_mask(method: str, kind: str):
    model = patch_model(sharp_model("Llama", head_dim=16), method, FACTOR, **METHODS[method])
    rows = blocks(kind)
    logits = packed_logits(model, rows)
    for row, positions in enumerate(rows):
        expected = llama_by_hand(model, IDS[0], positions)
        torch.testing.assert_close(logits[row].double(), expected, rtol=1e-4, atol=2e-5)
    with torch.no_grad():  # Transformers' own masks part the chunks: all this would not be needed otherwise
        parted = model(IDS.repeat(2, 1), position_ids=rows, use_cache=False).logits
    assert (parted - logits).abs().max() > 0.01


def test_one_document_needs_no_mask_and_gets_the_same_logits(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(sharp_model("Llama"), "yarn", FACTOR)
    row = PositionSchedule("pose", ORIGINAL, FACTOR * ORIGINAL, seed=4).of(3, [64])[None]
    plainly_causal = packed_logits(model, row)
    monkeypatch.setattr(masks, "has_windows", lambda config: True)
    torch.testing.assert_close(plainly_causal, packed_logits(model, row), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("model_type", "attention"), [("falcon", "sdpa"), ("falcon", "eager"), ("gpt_oss", "eager")])
@torch.no_grad()
def test_families_whose_masks_know_no_positions_train_each_document_alone(model_type: str, attention: str):
    model: Any = model_types.sharp_model(model_type)
    model.set_attn_implementation(attention)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with chunked_lm_loss(model):
        labels = IDS.masked_fill(positions[None] == 0, -100)
        together = model(input_ids=IDS, position_ids=positions[None], labels=labels).loss
    total = 0.0
    for start, stop in SPANS:
        seen = torch.ones(stop - start, stop - start).tril().bool()
        near = seen & ~torch.ones_like(seen).tril(-(getattr(model.config, "sliding_window", None) or 64))
        masks: Any = [torch.zeros(mask.shape).masked_fill(~mask, -1e9)[None, None] for mask in (seen, near)]
        given = masks[0] if model_type == "falcon" else {"full_attention": masks[0], "sliding_attention": masks[1]}
        ids = IDS[:, start:stop]
        logits = model(ids, attention_mask=given, use_cache=False).logits[0]
        total += float(cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))
    assert float(together) == pytest.approx(total / (len(positions) - len(LENGTHS)), rel=1e-5)
    assert probe_isolation(RotaryModel(model)) < 1e-4
