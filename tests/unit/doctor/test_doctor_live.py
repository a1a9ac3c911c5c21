"""The doctor on what is loaded: checkpoints with ``--live``, .gguf files, windows and chunks that hide an extension."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from doctor_configs import AXES, LAYERS, OF_64, SIZES, YARN, codes, config_of, edit_config, vl_config, yarn
from hf_posenc import patch_model, save_extended, verify_model
from hf_posenc.cli.main import main
from hf_posenc.doctor import diagnose, write_mended
from hf_posenc.doctor.config_meaning import Known
from hf_posenc.doctor.mending import mended
from older_transformers import IS_5_0, skip_if_left_out
from tiny_models import make_model

# Checkpoints, loaded.


def test_live_shows_what_the_modules_of_a_sound_checkpoint_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "yarn", 4), tmp_path / "model")
    assert main(["doctor", str(folder), "--live"]) == 0
    shown = capsys.readouterr().out
    last = f"{yarn(1e4)[-1]:.4g}"
    assert f"8 pairs in model.rotary_emb, 1 to {last} radians per token, float32; cos and sin times 1.13863" in shown
    assert "holds      what the config says, compared with the closed form" in shown
    assert main(["doctor", str(folder)]) == 0
    assert "radians per token" not in capsys.readouterr().out


def test_live_finds_a_rule_that_was_not_loaded(tmp_path: Path) -> None:  # row 13, in the modules
    skip_if_left_out("gemma3_text")
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16, layer_types=LAYERS))
    model.save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0})
    diagnosis = diagnose(tmp_path / "model", live=True)
    assert dict(diagnosis.lines)["holds"] == "what the config says, compared with the closed form"  # as it was read
    assert {f.code for f in diagnosis.findings} >= {"flat-on-layers", "read-otherwise-5.23", "loaded-otherwise"}
    write_mended(diagnosis, tmp_path / "model")
    assert "loaded-otherwise" not in {f.code for f in diagnose(tmp_path / "model", live=True).findings}


def test_live_holds_modules_against_what_the_user_knows(tmp_path: Path) -> None:  # row 7, in the modules
    folder = tmp_path / "model"
    make_model("Llama", max_position_embeddings=256).save_pretrained(folder)
    edit_config(
        folder, rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "yarn", "rope_type": "yarn", "factor": 4.0}
    )
    found = diagnose(folder, Known(original=64), live=True).findings
    (finding,) = [f for f in found if f.code == "loaded-otherwise"]
    assert "The config means yarn x4 of 64" in finding.why


def test_live_of_a_vision_language_model(tmp_path: Path) -> None:
    skip_if_left_out("qwen2_5_vl")
    config = vl_config("qwen2_5_vl", rope_theta=5e5, rope_scaling={**YARN, "type": "yarn", **AXES})
    config |= {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    loaded = type(AutoConfig.for_model("qwen2_5_vl")).from_dict(config)
    AutoModelForImageTextToText.from_config(loaded).save_pretrained(tmp_path / "model")
    diagnosis = diagnose(tmp_path / "model", live=True)
    assert "in model.language_model.rotary_emb" in dict(diagnosis.lines)["loaded"]
    assert dict(diagnosis.lines)["holds"] == "what the config says, compared with the closed form"
    assert {f.code for f in diagnosis.findings if f.severity != "note"} == {"refused-4.57"}


def test_live_says_what_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(rope_theta=5e5)))
    assert main(["doctor", str(tmp_path), "--live"]) == 2
    assert "be loaded" in capsys.readouterr().err
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ValueError, match="adapter, which"):
        diagnose(adapter, live=True)


# GGUF.


def gguf_of(path: Path, theta: float = 5e5, divisors: list[float] | None = None, **scaling: Any) -> Path:
    pytest.importorskip("gguf", reason="pip install 'hf_posenc[smollm2]'")
    import gguf
    import numpy as np

    from gguf_files import write_gguf

    settings = {**SIZES, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    if divisors is None:
        return write_gguf(path, LlamaForCausalLM(LlamaConfig(**settings)), **scaling)
    with pytest.MonkeyPatch.context() as patch:
        write = gguf.GGUFWriter.write_header_to_file

        def with_divisors(writer: gguf.GGUFWriter, *args: Any) -> None:
            writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
            write(writer, *args)

        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        return write_gguf(path, LlamaForCausalLM(LlamaConfig(**settings)), **scaling)


def test_row_27_a_gguf_says_one_thing_and_transformers_loads_another(tmp_path: Path) -> None:
    file = gguf_of(tmp_path / "scaled.gguf", type="yarn", factor=4.0, original_context_length=64.0)
    diagnosis = diagnose(file, live=True)
    lines = dict(diagnosis.lines)
    assert lines["declared"].startswith("yarn x4 of 64, ")
    assert lines["in file"].startswith("context_length 256, rope.freq_base 500000.0, rope.scaling.type yarn")
    (loads,) = [fact for topic, fact in diagnosis.lines if topic.endswith(" loads")]
    assert loads == "no scaling, rope_theta 500000, 256 tokens"
    assert "cos and sin times 1" in lines["loaded"]
    assert [f.code for f in diagnosis.findings if f.severity != "note"] == ["gguf-dropped"]


def test_row_27_a_base_and_a_length_that_transformers_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import ggml

    file = gguf_of(tmp_path / "plain.gguf")
    assert diagnose(file).sound
    # As Transformers has it for Gemma 4.
    monkeypatch.setitem(ggml.GGUF_CONFIG_MAPPING["llama"], "rope.freq_base", None)
    monkeypatch.setitem(ggml.GGUF_CONFIG_MAPPING["llama"], "context_length", None)
    diagnosis = diagnose(file)
    assert [f.code for f in diagnosis.findings] == ["gguf-otherwise", "gguf-otherwise"]
    assert "rope.freq_base is 500000 in the file, and Transformers loads 10000.0" in diagnosis.findings[1].what
    fixed = mended(diagnosis.config or {})
    assert (fixed["rope_theta"], fixed["max_position_embeddings"]) == (5e5, 256)


def test_row_27_divisors_in_a_tensor_are_mended_too(tmp_path: Path) -> None:
    from doctor_configs import rotary_of

    divisors = [1.0, 1.0, 1.5, 2.0, 4.0, 4.0, 4.0, 4.0]
    diagnosis = diagnose(gguf_of(tmp_path / "llama3.gguf", divisors=divisors))
    assert [f.code for f in diagnosis.findings if f.severity != "note"] == ["gguf-dropped"]
    assert "rope_freqs.weight" in dict(diagnosis.lines)["in file"]
    write_mended(diagnosis, tmp_path / "fixed")
    held, scale = rotary_of(json.loads((tmp_path / "fixed" / "config.json").read_text()))
    assert held == pytest.approx([5e5 ** (-i / 8) / divisor for i, divisor in enumerate(divisors)], rel=2e-6)
    assert scale == 1.0


# Windows and chunks.


def test_row_14_how_far_a_window_on_every_layer_lets_information_reach() -> None:
    facts = {"max_position_embeddings": 32768, "sliding_window": 4096, "num_hidden_layers": 32}
    mistral = config_of("mistral", rope_theta=1e4, rope_parameters=None) | facts
    diagnosis = diagnose(mistral)
    assert dict(diagnosis.lines)["reach"].startswith("4096 tokens a layer, 4096 x 32 layers = 131072 at most")
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity) == ("window-on-every-layer", "note")
    assert "8192 is the original length" in finding.why
    short = diagnose(mistral | {"num_hidden_layers": 2})
    assert [(f.code, f.severity) for f in short.findings] == [("window-ends-short", "warning")]
    # MistralConfig takes 4096 where nothing is written; null is none.
    assert "reach" in dict(diagnose({k: v for k, v in mistral.items() if k != "sliding_window"}).lines)
    assert "reach" not in dict(diagnose(mistral | {"sliding_window": None}).lines)
    assert "reach" not in dict(diagnose(config_of("gemma3_text", head_dim=16, layer_types=LAYERS)).lines)


def test_a_window_does_not_keep_a_config_from_being_mended() -> None:
    config = config_of("mistral", head_dim=16, sliding_window=32, rope_parameters={**YARN, "rope_theta": 5e5})
    fixed = mended(config)
    assert (fixed["sliding_window"], fixed["rope_scaling"]["rope_type"]) == (32, "yarn")


LLAMA_4 = config_of(
    "llama4_text", head_dim=16, rope_theta=5e5, attention_chunk_size=8, num_hidden_layers=4, intermediate_size_mlp=64
) | {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": []}


def test_llama_4s_rotary_layers_see_a_chunk() -> None:
    diagnosis = diagnose(LLAMA_4)
    assert dict(diagnosis.lines)["reach"].startswith("chunks of 8 tokens in the 3 rotary layers; the other 1 read")
    assert [(f.code, f.severity) for f in diagnosis.findings] == [("rotary-in-chunks", "note")]
    assert diagnose(LLAMA_4 | {"attention_chunk_size": 256}).findings == ()


def test_what_is_said_of_llama_4_is_true_of_transformers() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig.from_dict(LLAMA_4)).eval()
    seen: list[tuple[bool, torch.Tensor]] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((bool(module.use_rope), kwargs["attention_mask"])),
            with_kwargs=True,
        )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(torch.randint(3, 128, (1, 24)))
    reaches = {turns: set() for turns in (True, False)}
    for turns, mask in seen:
        allowed = mask[0, 0] == 0
        queries, keys = allowed.nonzero(as_tuple=True)
        reaches[turns].add(int((queries - keys).max()))
    assert reaches == {True: {7}, False: {23}}  # a chunk of 8 tokens, and all 24


# One default in one place is no second rule.


@pytest.mark.parametrize(
    "defaults", [{"beta_fast": 32.0, "beta_slow": 1.0}, {"beta_fast": 32, "beta_slow": None}, {"truncate": True}]
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_default_left_out_of_one_serialization(place: str, defaults: dict[str, Any]) -> None:
    both = {"rope_scaling": {**YARN, "type": "yarn"}, "rope_parameters": {**YARN, "rope_theta": 5e5}}
    config = config_of(rope_theta=5e5, **both)
    config[place] = {**config[place], **defaults}
    assert codes(config) == set()
    config[place] |= {"beta_fast": 16.0}
    assert "two-rules" in codes(config)


def test_a_base_in_rope_scaling_is_not_lost() -> None:
    inside = {**YARN, "type": "yarn", "rope_theta": 5e5}
    assert "base-lost" not in codes(config_of(rope_scaling=inside, rope_parameters=YARN))


def test_gemma_3_as_it_was_published_leaves_its_length_to_transformers() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 32}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    diagnosis = diagnose({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    lines = dict(diagnosis.lines)
    assert lines["declared"].startswith("linear x8, rope_theta 1e+06")
    assert lines["target"] == "131072 tokens"


def test_what_5_0_makes_of_settings_by_layer_type() -> None:
    skip_if_left_out("gemma3_text")

    def by_version(model_type: str, rule: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
        flat = config_of(model_type, head_dim=16, layer_types=LAYERS, rope_parameters={**rule, "rope_theta": 5e5})
        diagnosis = diagnose(mended(flat))
        assert diagnosis.sound
        return dict(diagnosis.lines), {finding.code for finding in diagnosis.findings}

    lines, found = by_version("gemma3_text", YARN)
    assert (lines["5.0 loads"].split(":")[0], found) == ("nothing", {"refused-5.0"})
    lines, found = by_version("olmo3", YARN)
    assert lines["5.0 loads"] == lines["5.23 loads"] + ", on every layer"
    assert found == {"one-rule-5.0"}
    _, found = by_version("gemma3_text", {"rope_type": "linear", "factor": 4.0})
    assert found == {"original-not-recorded"}


# The rest of the table's rows.


def test_row_18_the_tutorial_idiom_on_a_loaded_model() -> None:
    model = make_model("Llama")
    with nullcontext() if IS_5_0 else pytest.warns(FutureWarning):
        model.config.rope_scaling = {"type": "linear", "factor": 4.0}
    (finding,) = diagnose(model).findings
    assert "has no rope_theta" in finding.what


@pytest.mark.parametrize("rule", [{"type": "dynamic", "factor": 4.0}, {"type": "yarn", **OF_64}])
def test_row_23_crashes_of_mistral_in_4_are_foretold_and_mended(rule: dict[str, Any]) -> None:
    config = config_of("mistral", rope_theta=5e5, sliding_window=None, rope_scaling=rule)
    assert "refused-4.57" in codes(config)
    fixed = mended(config)
    assert (fixed["head_dim"], codes(fixed)) == (16, set())


@pytest.mark.parametrize(
    ("rule", "length", "said"),
    [
        ({"type": "linear", "factor": 8.0}, 512, "linear x8"),
        ({"type": "yarn", **OF_64}, 256, "yarn x4 of 64"),
        (
            {"rope_type": "llama3", **OF_64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            256,
            "llama3 x4 of 64",
        ),
    ],
)
def test_row_9_what_is_there_is_said_and_not_multiplied(rule: dict[str, Any], length: int, said: str) -> None:
    config = config_of(rope_theta=5e5, rope_scaling=rule) | {"max_position_embeddings": length}
    assert dict(diagnose(config).lines)["declared"].startswith(said)
    loaded = LlamaConfig.from_dict({**config, "head_dim": 16})
    model = LlamaForCausalLM(loaded)
    with pytest.raises(ValueError, match="on_scaled"):
        patch_model(model, "yarn", 2)
    patch_model(model, "yarn", 8, original_max_position_embeddings=64, on_scaled="replace")
    assert verify_model(model).extension["context_length"] == 512  # counted from the original length
