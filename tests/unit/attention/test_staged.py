"""Staged dynamic scaling: the same numbers however a text is fed, and the unpatched model up to its original length."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attention_models import IDS, ORIGINAL, RULES, families_and_rules, in_chunks, left_padded, sharp_model, staged
from hf_posenc import RotaryMismatchError, describe, patch_model, patched, unpatch_model, verify_model
from hf_posenc.attention.staged import Stages
from hf_posenc.methods.registry import make_method
from hf_posenc.spec import RopeSpec
from older_transformers import skip_if_left_out
from tiny_models import FAMILIES, assert_same_state, logits, make_model, state


@pytest.mark.parametrize(("family", "rule"), families_and_rules(FAMILIES, RULES))
def test_full_forward_equals_chunked_prefill_equals_token_by_token(family: str, rule: str) -> None:
    if family == "StableLm":
        skip_if_left_out("stablelm")
    model = sharp_model(family)
    before, plain = state(model), logits(model, IDS)
    patch_model(model, rule.partition("-")[0], 8, **RULES[rule])
    full = logits(model, IDS)
    torch.testing.assert_close(in_chunks(model, IDS, [37, 100, 5]), full, atol=1e-5, rtol=0)
    torch.testing.assert_close(in_chunks(model, IDS, [460, *[1] * 52]), full, atol=1e-5, rtol=0)
    assert torch.equal(full[:, :ORIGINAL], plain[:, :ORIGINAL])
    assert torch.equal(logits(model, IDS[:, :ORIGINAL]), logits(unpatch_model(model), IDS[:, :ORIGINAL]))
    assert (full - plain)[:, ORIGINAL:].abs().max() > 1e-3
    assert_same_state(state(model), before)
    assert torch.equal(logits(model, IDS), plain)


def test_token_by_token_from_the_first() -> None:
    model = staged()
    torch.testing.assert_close(in_chunks(model, IDS, [1]), logits(model, IDS), atol=1e-5, rtol=0)


def by_hand(model: PreTrainedModel, ids: torch.Tensor, stages: Stages, log_n: bool) -> torch.Tensor:
    """One Llama attention layer in float64, a row of scores at a time, from the definition alone."""
    layer, config = model.model.layers[0].self_attn, model.config
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))[0].double()
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    q, k, v = (
        (hidden @ projection.weight.double().T).view(len(hidden), -1, layer.head_dim)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    rows = []
    for i in range(len(hidden)):
        end = ORIGINAL
        while end <= i:
            end += 32
        factor = end / ORIGINAL
        inv_freq, temperature = stages.frequencies((end - ORIGINAL) // 32)
        assert stages.factor((end - ORIGINAL) // 32) == factor
        heads_out = []
        for head in range(heads):
            keys, values = k[: i + 1, head // groups], v[: i + 1, head // groups]
            angle = (i - torch.arange(i + 1, dtype=torch.float64))[:, None] * inv_freq
            pairs_q = torch.view_as_complex(torch.stack(q[i, head].chunk(2), -1))
            pairs_k = torch.view_as_complex(torch.stack([x.contiguous() for x in keys.chunk(2, -1)], -1))
            rotated = torch.polar(torch.ones_like(angle), angle)
            scores = (pairs_q * rotated * pairs_k.conj()).real.sum(-1) * temperature**2 * layer.scaling
            scores *= max(1.0, math.log(i + 1) / math.log(ORIGINAL)) if log_n else 1.0
            heads_out.append(scores.softmax(0) @ values)
        rows.append(torch.cat(heads_out))
    return torch.stack(rows) @ layer.o_proj.weight.double().T


@torch.no_grad()
@pytest.mark.parametrize("log_n", [False, True])
@pytest.mark.parametrize("method", ["dynamic", "dynamic_yarn"])
def test_attention_is_the_definition_in_float64(method: str, log_n: bool) -> None:
    model = patch_model(sharp_model("Llama"), method, 4, stage=32, log_n=log_n)
    found: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: found.append(output[0]))
    ids = IDS[:, : 4 * ORIGINAL]
    logits(model, ids)
    stages = Stages(RopeSpec(16, 1e4, ORIGINAL), make_method(method, 4, {"stage": 32}))
    torch.testing.assert_close(found[0][0].double(), by_hand(model, ids, stages, log_n), atol=2e-6, rtol=1e-5)


def test_the_frequencies_of_a_stage_are_transformers_own() -> None:
    spec = RopeSpec(64, 1e5, 8192)
    stages = Stages(spec, make_method("dynamic_yarn", 4, {"stage": 4096, "beta_fast": 16}))
    config = LlamaConfig(head_dim=64, max_position_embeddings=8192)
    for stage, factor in ((1, 1.5), (2, 2.0), (6, 4.0)):
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": 1e5,
            "factor": factor,
            "beta_fast": 16,
            "original_max_position_embeddings": 8192,
        }
        inv_freq, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        ours, our_temperature = stages.frequencies(stage)
        torch.testing.assert_close(ours.float(), inv_freq, rtol=1e-6, atol=0)
        assert our_temperature == pytest.approx(temperature)
    ntk = Stages(spec, make_method("dynamic", 4, {"stage": 4096}))
    theta = 1e5 * 2 ** (64 / 62)
    assert ntk.frequencies(2)[0][-1].item() == pytest.approx(theta ** (-62 / 64))
    assert ntk.frequencies(0)[0][-1].item() == pytest.approx(1e5 ** (-62 / 64))


def test_where_stages_end() -> None:
    spec = RopeSpec(64, 1e5, 100)
    linear = Stages(spec, make_method("dynamic", 4, {"stage": 50}))
    assert linear.ends(250) == [100, 150, 200, 250]
    assert linear.of(torch.tensor([0, 99, 100, 149, 150, 249])).tolist() == [0, 0, 1, 1, 2, 3]
    geometric = Stages(spec, make_method("dynamic", 4, {"stage": 50, "growth": "geometric"}))
    assert geometric.ends(400) == [100, 150, 225, 338, 507]
    assert [geometric.factor(stage) for stage in range(3)] == [1.0, 1.5, 2.25]
    assert Stages(spec, make_method("dynamic", 4)).stage_length == 25


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "GPTNeoX"])
def test_a_row_alone_is_the_row_in_any_batch(family: str) -> None:
    model = staged(family)
    rows = [IDS[:, :length] for length in (300, 90, 40, 300)]
    alone = [logits(model, row)[0] for row in rows]
    ids, mask = left_padded(rows)
    generated = (mask.cumsum(-1) - 1).clamp(min=0)  # what generate() gives
    with torch.no_grad():
        for positions in (None, generated):
            output = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            for row, expected in zip(output, alone, strict=True):
                torch.testing.assert_close(row[-len(expected) :], expected, atol=1e-5, rtol=0)
        output = model(ids.flip(1), attention_mask=mask.flip(1), use_cache=False).logits
        for row, expected in zip(output, [logits(model, row.flip(1))[0] for row in rows], strict=True):
            torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)


def test_padded_rows_with_a_cache_equal_each_alone() -> None:
    model = staged()
    rows = [IDS[:, :200], IDS[:, :130]]
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for begin, end in ((0, 60), (60, 100), (100, 198), (198, 199), (199, 200)):
            output = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
            )
            parts.append(output.logits)
    found = torch.cat(parts, dim=1)
    for row, expected in zip(found, rows, strict=True):
        torch.testing.assert_close(row[-expected.shape[1] :], logits(model, expected)[0], atol=1e-5, rtol=0)


def test_short_padded_rows_are_the_unpatched_model_to_the_bit() -> None:
    ids, mask = left_padded([IDS[:, :60], IDS[:, :20]])
    with torch.no_grad():
        plain = sharp_model("Llama")(ids, attention_mask=mask, use_cache=False).logits
        assert torch.equal(staged()(ids, attention_mask=mask, use_cache=False).logits, plain)


def test_what_ran_before_does_not_matter() -> None:
    model = staged()
    short, long = logits(model, IDS[:, :100]), logits(model, IDS)
    assert torch.equal(logits(model, IDS[:, :100]), short)
    assert torch.equal(logits(model, IDS), long)
    assert torch.equal(logits(model, torch.cat([IDS, IDS.flip(1)]))[0], long[0])


# Emulated bfloat16 takes three seconds a family; the rule is the same in all.
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in ("Mistral", "Qwen2", "Gemma")]


@pytest.mark.parametrize("family", ["Llama", *OTHERS])
def test_bfloat16_stays_within_its_rounding(family: str) -> None:
    model = staged(family, dtype=torch.bfloat16)
    full, exact = logits(model, IDS).float(), logits(staged(family), IDS)
    rounding = (full - exact).abs().mean()
    assert (in_chunks(model, IDS, [37, 100, 5]).float() - full).abs().mean() < rounding
    assert (in_chunks(model, IDS, [1]).float() - full).abs().mean() < rounding


def test_no_gradient_from_later_tokens() -> None:
    model = staged()
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeddings, use_cache=False).logits[0, 200].sum().backward()
    assert embeddings.grad[0, 201:].abs().max() == 0
    assert embeddings.grad[0, :201].abs().amin(-1).min() > 0


def test_eager_gives_its_weights() -> None:
    model = sharp_model("Llama")
    model.set_attn_implementation("eager")
    patch_model(model, "dynamic", 8, stage=32)
    weights = model(IDS[:, :150], output_attentions=True, use_cache=False).attentions[0]
    assert weights.shape == (1, 4, 150, 150)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 150))
    assert weights.triu(1).abs().max() == 0


def test_training_with_checkpointing_gives_the_same_gradients() -> None:
    model, gradients = staged().train(), []
    for reentrant in (None, False, True):
        for layer in model.model.layers:
            layer.gradient_checkpointing = reentrant is not None
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=reentrant)
        model.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            assert torch.equal(one, two)


def test_packed_documents_are_each_alone() -> None:
    model = staged()
    positions = torch.cat([torch.arange(150), torch.arange(90)])[None]
    ids = torch.cat([IDS[:, :150], IDS[:, 200:290]], dim=1)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :150], logits(model, IDS[:, :150]), atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[:, 150:], logits(model, IDS[:, 200:290]), atol=1e-5, rtol=0)


def test_copies_and_pickles_stay_patched() -> None:
    model = staged()
    expected = logits(model, IDS)
    other = copy.deepcopy(model)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), IDS), expected)
    assert torch.equal(logits(other, IDS), expected)
    unpatch_model(other)
    assert torch.equal(logits(model, IDS), expected)
    assert not torch.equal(logits(other, IDS), expected)


class TestRefusals:
    def test_a_change_of_attention_after_patching(self) -> None:
        model = staged()
        model.set_attn_implementation("eager")
        with pytest.raises(RotaryMismatchError, match="'eager'"):
            verify_model(model)
        with pytest.raises(ValueError, match=r"'eager'.*patch_model"):
            logits(model, IDS)

    def test_a_rotary_module_that_turns_again(self) -> None:
        model = staged()
        model.model.rotary_emb.inv_freq.fill_(1.0)
        with pytest.raises(RotaryMismatchError, match="other frequencies"):
            verify_model(model)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"stage": 0}, ValueError, "stage must be >= 1"),
            ({"growth": "cubic"}, ValueError, "unknown growth 'cubic'. Known: linear, geometric"),
            ({"scope": "batch"}, ValueError, "unknown scope 'batch'. Known: query, sequence"),
            ({"beta_fast": 16}, TypeError, "method 'dynamic' takes no option 'beta_fast'"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        model = make_model("Llama")
        with pytest.raises(error, match=message):
            patch_model(model, "dynamic", 4, **options)
        assert describe(model)["method"] == "none"

    def test_a_window_on_every_layer(self) -> None:
        model = make_model("Mistral", sliding_window=256)
        with pytest.raises(ValueError, match="sliding window"):
            patch_model(model, "dynamic_yarn", 4)
        with patched(model, "dynamic_yarn", 4, sliding_window="off"):
            assert model.config.sliding_window is None

    def test_a_gap_in_a_cached_row(self) -> None:
        model = staged()
        cache = DynamicCache(config=model.config)
        in_chunks(model, IDS[:, :70], [70], cache)
        with pytest.raises(ValueError, match="another without"):
            model(IDS[:, 70:73], past_key_values=cache, position_ids=torch.tensor([[70, 72, 73]]))

    def test_config_alone_cannot_say_it(self) -> None:
        from hf_posenc import extend_config

        with pytest.raises(ValueError, match="'dynamic_yarn'"):
            extend_config(LlamaConfig(), "dynamic_yarn", 4)


def test_a_text_past_the_target_is_read_and_said_once() -> None:
    model = patch_model(sharp_model("Llama"), "dynamic", 2, stage=32)
    logits(model, IDS[:, :128])
    with pytest.warns(UserWarning, match=r"130.*128:"):
        longer = logits(model, IDS[:, :130])
    assert torch.equal(logits(model, IDS[:, :130]), longer)
    torch.testing.assert_close(longer, logits(staged(rule="dynamic"), IDS[:, :130]), atol=0, rtol=0)


def test_the_target_is_what_generation_may_reach() -> None:
    model = staged()
    assert model.config.max_position_embeddings == 8 * ORIGINAL
    assert describe(model) == {
        "method": "dynamic_yarn",
        "factor": 8.0,
        "options": {"stage": 32},
        "original_max_position_embeddings": ORIGINAL,
        "context_length": 8 * ORIGINAL,
    }
    assert math.isclose(Stages(RopeSpec(16, 1e4, 64), make_method("dynamic", 8, {"stage": 32})).factor(14), 8.0)
