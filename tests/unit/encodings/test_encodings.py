"""The encodings on models: against float64 by hand and Transformers' own, with caches, padding, training, saving."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo.testing
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    MptConfig,
    PreTrainedModel,
    StaticCache,
    T5Config,
)
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from attention_models import in_chunks, left_padded, sharp_model
from encoded_models import ENCODINGS, encoded, encoding_of
from encodings_by_hand import plain_score, rotated_score, sinusoid, slope, without_positions
from hf_posenc import RotaryMismatchError, load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.cli.main import main
from hf_posenc.encodings.encoding_attention import EncodingAttention
from hf_posenc.methods.encodings.alibi import AlibiBias
from hf_posenc.methods.encodings.rope import Rope, RopeRotation
from hf_posenc.methods.explained import ModelShape
from hf_posenc.methods.registry import make_method
from hf_posenc.spec import RopeSpec
from tiny_models import assert_same_state, logits, make_model, recompute_activations, state, token_ids

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "GPTNeoX", "SmolLM3", "Olmo2")
TRAINED = ("learned", "relative_bias", "t5_bias")
IDS = token_ids(40, rows=2)
_STEP = 1e-2


# ---- against references ----


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("key", ENCODINGS)
def test_encoding_equals_float64_by_hand(key: str, implementation: str) -> None:
    ids = IDS[:, :14]
    model = encoded(key, attn_implementation=implementation)
    expected = _by_hand(key, model, ids)
    assert (logits(model, ids) - expected).abs().max() < 2e-5 * expected.abs().max()


def _by_hand(key: str, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    reference = sharp_model("Llama")
    name, options = ENCODINGS[key]
    table = next(iter(encoding_of(model).parameters()), torch.zeros(0)).double().tolist()
    if name in ("sinusoidal", "learned"):
        embedded = reference.get_input_embeddings()(ids)
        for position in range(ids.shape[1]):
            for feature in range(embedded.shape[-1]):
                scaled = 0.05 * sinusoid(position, feature, embedded.shape[-1], options.get("base", 10000.0))
                embedded.data[:, position, feature] += table[position][feature] if table else scaled
        with torch.no_grad():
            return without_positions(reference)(inputs_embeds=embedded, use_cache=False).logits
    if name in ("rope", "xpos"):
        interleaved = options.get("interleaved", False)
        share = options.get("partial_rotary_factor", 1.0)

        def score(head: int, query: torch.Tensor, key: torch.Tensor, at: int, of: int) -> float:
            width, xpos = int(share * len(query)), {"scale_base": 8.0} if name == "xpos" else {}
            base = options.get("rope_theta", 10000.0)
            rotated = rotated_score(query[:width], key[:width], at - of, base, interleaved, **xpos)
            return rotated + float(query[width:] @ key[width:])

        return logits(without_positions(reference, score), ids)
    heads = reference.config.num_attention_heads
    biases = {
        "alibi": lambda head, distance: -slope(head, heads) * distance,
        "relative_bias": lambda head, distance: table[min(distance, 6)][head],
        # 8 buckets: distances 0 to 3, then 4 to 5, 6 to 8, 9 to 13 and more (4 * 5 ** (n / 4) is 5.98, 8.94, 13.4)
        "t5_bias": lambda head, distance: table[sum(distance >= edge for edge in (1, 2, 3, 4, 6, 9, 14))][head],
    }
    return logits(without_positions(reference, plain_score, biases[name]), ids)


def test_alibi_equals_mpt_attention() -> None:
    """MPT's own attention, with the weights of a Llama layer: six heads, not a power of two."""
    model = sharp_model("Llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=96, num_hidden_layers=1)
    layer = patch_model(model, "alibi").model.layers[0].self_attn
    mpt = MptAttention(MptConfig(d_model=96, n_heads=6, n_layers=1, attn_config={"attn_type": "multihead_attention"}))
    parts = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    mpt.Wqkv.weight.data, mpt.out_proj.weight.data = torch.cat(parts).data, layer.o_proj.weight.data
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    with torch.no_grad():
        model(IDS, use_cache=False)
        causal = torch.ones(40, 40, dtype=torch.bool).triu(1)[None, None]
        expected = mpt(seen[0], position_bias=build_mpt_alibi_tensor(6, 40), attention_mask=causal)[0]
    assert torch.allclose(seen[1], expected, atol=1e-6)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_bias_equals_t5(bidirectional: bool) -> None:
    config = T5Config(d_model=64, num_heads=4, d_kv=16, is_decoder=not bidirectional)
    attention = T5Attention(config, has_relative_attention_bias=True)
    model = patch_model(make_model("Llama"), "t5_bias", bidirectional=bidirectional)
    encoding_of(model).table.weight.data = attention.relative_attention_bias.weight.data
    positions = torch.arange(300)[None]
    ours = encoding_of(model)(positions, positions)
    expected = attention.compute_bias(300, 300)
    assert torch.equal(ours, expected)


def test_rope_is_the_models_own() -> None:
    model = sharp_model("Llama")
    before = logits(model, IDS)
    for computation in ("real", "complex"):
        patch_model(model, "rope", computation=computation)
        assert (logits(model, IDS) - before).abs().max() < 1e-6 * before.abs().max()
        unpatch_model(model)


# ---- a token's output depends on the tokens before it, and on nothing else ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["sinusoidal", "learned", "t5_bias", "alibi", "rope-interleaved", "xpos"])
def test_cache_chunks_and_padding_change_nothing(key: str, family: str) -> None:
    model = encoded(key, family)
    whole = logits(model, IDS)
    tolerance = 2e-5 * whole.abs().max()
    assert (in_chunks(model, IDS, [1]) - whole).abs().max() < tolerance
    assert (in_chunks(model, IDS, [7, 1, 12]) - whole).abs().max() < tolerance
    rows = [IDS[:1, :40], IDS[1:, :23]]
    ids, mask = left_padded(rows)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, use_cache=False).logits
    for number, row in enumerate(rows):
        assert (padded[number, -row.shape[1] :] - logits(model, row)[0]).abs().max() < tolerance


@pytest.mark.parametrize("key", ENCODINGS)
def test_positions_matter_and_later_tokens_do_not(key: str) -> None:
    model = encoded(key)
    swapped = IDS.clone()
    swapped[:, [3, 9]] = swapped[:, [9, 3]]  # what the last token sees is the same set
    plain, other = logits(model, IDS), logits(model, swapped)
    assert (plain[:, :3] - other[:, :3]).abs().max() < 1e-6
    assert (plain[:, -1] - other[:, -1]).abs().max() > 1e-4 * plain.abs().max()


def test_nope_does_not_see_what_the_others_do() -> None:
    """The control of the test above, in the first layer alone: without positions the order of what is seen is lost."""
    model = patch_model(sharp_model("Llama", num_hidden_layers=1), "nope", 1)
    swapped = IDS.clone()
    swapped[:, [3, 9]] = swapped[:, [9, 3]]
    assert (logits(model, IDS)[:, -1] - logits(model, swapped)[:, -1]).abs().max() < 1e-6


@pytest.mark.parametrize("key", ["learned", "alibi", "t5_bias", "xpos"])
def test_generate_is_the_same_with_and_without_a_cache(key: str) -> None:
    model = encoded(key)
    ids, mask = left_padded([IDS[:1, :12], IDS[1:, :7]])
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, use_cache=True, **arguments)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments))
    assert torch.equal(cached, model.generate(ids, use_cache=True, cache_implementation="static", **arguments))


def test_learned_table_ends() -> None:
    model = encoded("learned")
    logits(model, token_ids(64))
    with pytest.raises(ValueError, match=r"64.*64"):
        logits(model, token_ids(65))
    longer = patch_model(make_model("Llama"), "learned", context_length=80)
    assert logits(longer, token_ids(80)).isfinite().all()


def test_biases_go_with_their_forward() -> None:
    """Compiled forwards clear nothing by themselves."""
    attention = EncodingAttention(AlibiBias(4), "sdpa")
    for step in range(1, 10):
        positions = step * torch.arange(5)[None]
        forward = attention.read(positions, 5, None)
        for _ in range(2):  # made, then kept
            assert torch.equal(attention._bias(forward, 0, 5, 5, torch.zeros(1)), AlibiBias(4)(positions, positions))
        assert len(attention.forwards) <= 4


def test_compiled_static_cache_beside_windows_is_refused() -> None:
    model = encoded("t5_bias", "Gemma2")
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="static cache"):
        in_chunks(torch.compile(model, backend="eager"), IDS[:1], [20, 1], cache)


# ---- training ----


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("key", ENCODINGS)
def test_gradients_reach_the_encoding(key: str, checkpointing: bool) -> None:
    model = encoded(key).train()
    if checkpointing:
        recompute_activations(model)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    parameters = list(encoding_of(model).parameters())
    assert bool(parameters) == (key in TRAINED)
    for parameter in parameters:
        used = parameter.grad[:1] if key != "learned" else parameter.grad[:39]
        assert (used.abs().sum(-1) > 0).all()
        _check_gradient(model, parameter, float(parameter.grad[0, 0]))


def _loss(logits: torch.Tensor) -> torch.Tensor:
    """Transformers' loss, which would round logits to float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def _check_gradient(model: PreTrainedModel, parameter: torch.Tensor, gradient: float) -> None:
    """Hold a gradient against the difference of two losses; their norms are float32, which bounds the step."""
    model.double()
    losses = []
    for step in (_STEP, -_STEP):
        parameter.data[0, 0] += step
        with torch.no_grad():
            losses.append(_loss(model(IDS, use_cache=False).logits).item())
        parameter.data[0, 0] -= step
    assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * _STEP), rel=0.02)


# ---- undoing, saving, refusing ----


@pytest.mark.parametrize("key", ENCODINGS)
def test_undone_to_the_bit(key: str) -> None:
    model = make_model("Llama")
    before, out = state(model), logits(model, IDS)
    name, options = ENCODINGS[key]
    patch_model(model, name, **options)
    verify_model(model)
    assert not torch.equal(logits(model, IDS), out)
    unpatch_model(model)
    assert_same_state(before, state(model))
    assert torch.equal(logits(model, IDS), out)


@pytest.mark.parametrize("key", ENCODINGS)
def test_saved_loaded_and_refused_by_plain_transformers(key: str, tmp_path: Path, caplog: Any) -> None:
    model = encoded(key)
    expected = logits(model, IDS)
    save_extended(model, tmp_path / "saved")
    caplog.clear()
    again = load_extended(tmp_path / "saved")
    assert torch.equal(logits(again, IDS), expected)
    assert "positional_encoding" not in caplog.text
    with pytest.raises(KeyError, match=f"{ENCODINGS[key][0]}.*RoPE.*hf_posenc.load_extended"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft 0.20, of a base without a name
def test_adapter_that_would_lose_the_table_is_refused(tmp_path: Path) -> None:
    for key in ("t5_bias", "alibi"):
        model = get_peft_model(encoded(key), LoraConfig(target_modules=["q_proj"]))
        if key == "alibi":  # it has no parameters to lose
            save_extended(model, tmp_path / key)
            continue
        with pytest.raises(ValueError, match=r"positional_encoding\.table\.weight"):
            save_extended(model, tmp_path / key)
        assert not list(tmp_path.iterdir())


def test_save_pretrained_alone_is_refused_too(tmp_path: Path) -> None:
    """As a user's own Trainer saves: without the manifest, nothing could say what the weights were trained with."""
    patch_model(make_model("Llama"), "alibi").save_pretrained(tmp_path / "saved")
    with pytest.raises(KeyError, match=r"alibi .*hf_posenc\.load_extended"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("command", ["plan", "list"])
def test_commands_that_read_configs_say_that_there_is_no_rope(command: str, tmp_path: Path, capsys: Any) -> None:
    save_extended(encoded("alibi"), tmp_path / "saved")
    words = ["methods", "yarn", "--model"] if command == "list" else []
    assert main([command, *words, str(tmp_path / "saved"), "--context-length", "256"]) == 2
    assert "RoPE," in capsys.readouterr().err


def test_copies_and_pickles_keep_the_encoding() -> None:
    for key in ("t5_bias", "sinusoidal", "rope"):
        model = encoded(key)
        expected = logits(model, IDS)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # our own bytes
            assert torch.equal(logits(again, IDS), expected)
            verify_model(again)


def test_verify_finds_what_was_taken_out() -> None:
    model = encoded("alibi")
    model.set_attn_implementation("eager")
    with pytest.raises(RotaryMismatchError, match="attention implementation"):
        verify_model(model)
    model = encoded("learned")
    del model.model.positional_encoding
    with pytest.raises(RotaryMismatchError, match="lost its positional_encoding"):
        verify_model(model)


def test_alibi_in_bfloat16_keeps_its_slopes() -> None:
    """Slopes of 12 heads are no powers of two: rounded, far tokens would weigh otherwise."""
    slopes = AlibiBias(12).to(torch.bfloat16).slopes
    assert torch.equal(slopes, AlibiBias(12).slopes)
    assert not torch.equal(slopes, slopes.bfloat16().float())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("alibi", {"max_distance": 3}, r"takes no option 'max_distance' \(relative_bias, t5_bias do\)"),
        ("t5_bias", {"num_buckets": 8, "max_distance": 4}, "max_distance must be greater than the 4 distances"),
        ("rope", {"partial_rotary_factor": 0.1}, "1 of 16 features of a head would be rotated"),
        ("rope", {"partial_rotary_factor": 1.5}, "a share between 0 and 1"),
        ("rope", {"computation": "quaternion"}, "unknown computation 'quaternion'. Known: real, complex"),
        ("xpos", {"scale_base": 0}, "scale_base must be greater than 0"),
    ],
)
def test_mistakes_change_nothing(method: str, options: dict[str, Any], message: str) -> None:
    model = make_model("Llama")
    before = state(model)
    with pytest.raises((TypeError, ValueError), match=message):
        patch_model(model, method, **options)
    assert_same_state(before, state(model))


def test_xpos_says_when_its_numbers_are_too_large() -> None:
    model = encoded("xpos")
    with pytest.raises(ValueError, match=r"torch\.float32"):
        logits(model, token_ids(1500))
    assert in_chunks(model, token_ids(1500), [300]).isfinite().all()


@pytest.mark.parametrize("key", ["sinusoidal", "learned"])
def test_compiled_forwards_are_not_made_anew(key: str) -> None:
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    model = encoded(key)
    expected = logits(model, IDS)
    compiled = torch.compile(model, backend=graphs)
    made = []
    for _ in range(3):
        torch.testing.assert_close(logits(compiled, IDS), expected, atol=1e-5, rtol=0)
        made.append(graphs.frame_count)
    assert made == [made[0]] * 3


def test_flex_attention_takes_no_bias() -> None:
    model = make_model("Llama", attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="'flex_attention'"):
        patch_model(model, "alibi")


def test_pairs_that_never_rotated_do_not_begin_to() -> None:
    shape = ModelShape(2, 32, 16, 64, 256, RopeSpec(16, 1e4, 64, 3))
    rotation = RopeRotation(shape, cast(Rope, make_method("rope", 4.0)))
    states = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    moved = (rotation.rotate(states, torch.arange(8)[None]) != states).any(dim=(0, 1, 2))
    assert moved.tolist() == [True] * 5 + [False] * 3 + [True] * 5 + [False] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which FlexAttention imports
def test_masks_of_flexattention_are_refused_by_name() -> None:
    model = make_model("Llama")
    model.set_attn_implementation("flex_attention")
    patch_model(model, "rope")
    two_documents = torch.arange(20).repeat(2)[None]
    with pytest.raises(ValueError, match="FlexAttention has causal masks only"):
        model(torch.arange(1, 41)[None], position_ids=two_documents, use_cache=False)
