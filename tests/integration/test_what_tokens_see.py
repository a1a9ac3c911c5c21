"""Which tokens a token sees, before it, after it and in its window, is the same before and after a model is patched."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from encoded_models import ENCODINGS
from hf_posenc import RotaryMismatchError, available_methods, patch_model, unpatch_model, verify_model
from hf_posenc.attention import pieces
from hf_posenc.errors import InvalidRequestError, UnsupportedModelError
from hf_posenc.methods.registry import get_method
from model_types import REQUEST, causal_types, config_class_of, patch_in_attention, sharp_model, sharpened, tiny_config
from older_transformers import skip_if_left_out
from tiny_models import assert_same_state, make_model, state, token_ids

# Types with attention to later tokens whose rotary module a static rule extends: encoders, and encoder-decoders.
LOOK_AHEAD = [
    "embedding_gemma2_text",
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "modernbert",
    "neomme",
    "nomic_bert",
    "openai_privacy_filter",
    "t5gemma",
    "ultrabert",
]
IN_ATTENTION = [row["name"] for row in available_methods() if get_method(row["name"])().runs_in_attention]
ENCODED = {name: options for name, options in ENCODINGS.values() if name not in ("sinusoidal", "learned")}
IDS = token_ids(200)
CHANGED = (0, 40, 100, 150, 199)  # positions whose token is exchanged, one at a time


def encoder(model_type: str) -> PreTrainedModel:
    skip_if_left_out(model_type)
    torch.manual_seed(0)
    model = sharpened(AutoModel.from_config(tiny_config(CONFIG_MAPPING[model_type])).eval())
    for parameter in model.parameters():
        if not parameter.any():  # a gate that is closed in a new model
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    inputs: dict[str, Any] = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **inputs)[0]


def seen(model: PreTrainedModel) -> torch.Tensor:
    """Return which outputs change with the token at each of ``CHANGED``, bool ``(changed, length)``."""
    before, rows = hidden_states(model, IDS), []
    for position in CHANGED:
        ids = IDS.clone()
        ids[0, position] = 5 if ids[0, position] != 5 else 6
        rows.append((hidden_states(model, ids) != before).any(-1)[0])
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore:config.sliding_window is 128")
@pytest.mark.parametrize("model_type", LOOK_AHEAD)
def test_a_model_that_looks_ahead_keeps_static_rules_and_is_refused_all_others(model_type: str) -> None:
    model = encoder(model_type)
    before, sees = state(model), seen(model)
    assert sees[-1, 150:199].any(), "the last token is seen by earlier ones"
    for method, options in [*((name, {}) for name in IN_ATTENTION), *ENCODED.items()]:
        with pytest.raises(UnsupportedModelError) as caught:
            patch_in_attention(model, method, 1 if method in ENCODED else 4, **options, **REQUEST)
        assert (caught.value.code, caught.value.method) == ("not_causal", method)
        assert_same_state(state(model), before)
    patch_model(model, "linear", 4, **REQUEST)
    verify_model(model)
    assert torch.equal(seen(model), sees)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of families that are not extended
def test_no_other_type_looks_ahead_and_can_be_extended() -> None:
    found = []
    for model_type in sorted(MODEL_MAPPING_NAMES.keys() - set(causal_types())):
        names = MODEL_MAPPING_NAMES[model_type]
        try:
            model_class = getattr(transformers, names if isinstance(names, str) else names[0])
            if "dynamic_rope_update" not in inspect.getsource(importlib.import_module(model_class.__module__)):
                continue
            model = encoder(model_type)
            hidden_states(model, IDS)
            patch_model(model, "linear", 4, **REQUEST)
        except Exception:  # it reads no text, cannot be built small here, or is refused
            continue
        unpatch_model(model)
        if seen(model)[-1, :199].any():
            found.append(model_type)
    assert sorted({*found} - {"embedding_gemma2"}) == LOOK_AHEAD  # that one is embedding_gemma2_text with images


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("Gemma", {"use_bidirectional_attention": True}), ("Gemma2", {"use_bidirectional_attention": True})],
)
def test_the_bidirectional_mode_of_a_decoder_is_refused(family: str, overrides: dict[str, Any]) -> None:
    model = make_model(family, **overrides)
    with pytest.raises(UnsupportedModelError) as caught:
        patch_model(model, "dynamic_yarn", 4)
    assert caught.value.code == "not_causal"


def test_a_decoder_whose_config_is_not_causal_is_refused() -> None:
    model = make_model("Llama")
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError) as caught:
        patch_model(model, "dca", 4)
    assert caught.value.code == "not_causal"


@pytest.mark.parametrize("method", IN_ATTENTION)
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(t, marks=() if t in ("llama", "gpt_oss", "gemma3_text") else pytest.mark.slow)
        for t in (
            "llama",
            "gpt_oss",
            "gemma3_text",
            "gemma2",
            "olmo3",
            "modernbert-decoder",
            "smollm3",
            "cohere",
            "glm",
        )
    ],
)
def test_what_a_token_sees_in_a_causal_model_stays(model_type: str, method: str) -> None:
    model = sharp_model(model_type)
    model.config.get_text_config(decoder=True).sliding_window = 30
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 30
    sees = seen(model)
    assert not sees[-1, :199].any()
    patch_in_attention(model, method, 4, **REQUEST)
    assert torch.equal(seen(model), sees)


@pytest.mark.parametrize("method", ["dynamic_yarn", "dca", "alibi"])
def test_attention_that_is_made_to_look_ahead_after_patching_is_found(method: str) -> None:
    model = patch_model(make_model("Llama"), method, 1 if method == "alibi" else 4)
    verify_model(model)
    with pytest.raises(InvalidRequestError, match="later tokens"):
        model(input_ids=IDS, is_causal=False)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(RotaryMismatchError, match="later tokens"):
        verify_model(model)
    with pytest.raises(InvalidRequestError, match="later tokens"):
        hidden_states(model, IDS)


@pytest.mark.parametrize("method", ["dynamic_yarn", "dca", "alibi"])
def test_a_config_that_is_made_bidirectional_after_patching_is_found(method: str) -> None:
    model = patch_model(make_model("Llama"), method, 1 if method == "alibi" else 4)
    model.config.is_causal = False  # which Transformers' masks read in every forward
    with pytest.raises(InvalidRequestError, match="later tokens"):
        hidden_states(model, IDS)
    with pytest.raises(RotaryMismatchError, match="later tokens"):
        verify_model(model)
    mask = create_bidirectional_mask(model.config, torch.zeros(1, 7, 64), attention_mask=None)
    assert mask.all()
    assert mask.shape == (1, 1, 7, 7)  # as None would be read as causal


@torch.no_grad()
@pytest.mark.parametrize("method", ["dynamic_yarn", "self_extend", "alibi"])
def test_tokens_of_an_image_see_one_another_or_are_refused(method: str) -> None:
    """Gemma 3's tokens of an image see those after them: as before up to the original length, refused past it."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(config_class_of("gemma3"))).eval()
    types = torch.zeros_like(IDS)
    types[:, 20:40] = 1

    def read(length: int) -> torch.Tensor:
        return model(input_ids=IDS[:, :length], token_type_ids=types[:, :length], use_cache=False).logits

    plain = read(60)
    assert not torch.equal(model(input_ids=IDS[:, :60], use_cache=False).logits, plain)
    patch_model(
        model, method, 1 if method == "alibi" else 4, **REQUEST, **({"window": 60} if method == "self_extend" else {})
    )
    if method != "alibi":
        assert torch.equal(read(60), plain)
    with pytest.raises(InvalidRequestError, match="lets tokens"):
        read(200)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_check_of_patch_model_reaches_past_the_border_in_every_layer(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(config_class_of("llama"))).eval()
    before = state(model)
    attend = pieces.Pieces._in_chunks

    def with_a_key_less(self: Any, query: Any, keys: Any, value: Any, real: Any, dense: Any) -> Any:
        cut = int(self.call.module.layer_idx == layer and keys.shape[2] > query.shape[2])
        return attend(self, query, keys[:, :, cut:], value[:, :, cut:], real, dense)

    patch_model(model, "dynamic_yarn", 4)
    unpatch_model(model)
    monkeypatch.setattr(pieces.Pieces, "_in_chunks", with_a_key_less)
    with pytest.raises(RotaryMismatchError, match="not attend"):
        patch_model(model, "dynamic_yarn", 4)
    assert_same_state(state(model), before)
