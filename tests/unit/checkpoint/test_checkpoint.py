"""Saved and loaded: by us, by plain Transformers, by older Transformers in their own processes; adapters; damage."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from adapted_models import fit_adapted
from hf_posenc import load_extended, patch_model, save_extended, unpatch_model
from hf_posenc.assets import tiny_model_path
from hf_posenc.checkpoint.extended import UNFINISHED, both_serializations
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import MANIFEST, read_manifest
from hf_posenc.patching.api import describe
from hf_posenc.patching.verification import RotaryMismatchError
from model_types import tiny_model
from other_transformers import python_with
from tiny_llama import make_tiny_tokenizer
from tiny_models import STATIC_METHODS, logits, make_model, method_options, token_ids

IDS = token_ids(100)


def extended(tmp_path: Path, family: str = "Llama", method: str = "yarn", **kwargs: Any) -> tuple[Any, Path]:
    model = make_model(family)
    name, options = method_options(method, model)
    patch_model(model, name, 4, **options)
    return model, save_extended(model, tmp_path / "model", **kwargs)


@pytest.mark.parametrize("family", ["Llama", "Phi3", "GPTNeoX"])
@pytest.mark.parametrize("method", STATIC_METHODS)
def test_plain_transformers_loads_the_same_model(tmp_path: Path, method: str, family: str) -> None:
    model, path = extended(tmp_path, family, method)
    expected = logits(model, IDS)
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    assert torch.equal(logits(plain, IDS), expected)
    assert describe(plain) == describe(model)
    again = load_extended(path).eval()
    assert torch.equal(logits(again, IDS), expected)
    # A saved and loaded model can be saved again.
    resaved = save_extended(again, tmp_path / "again")
    assert json.loads((resaved / "config.json").read_text()) == json.loads((path / "config.json").read_text())


def test_the_manifest_says_what_was_done(tmp_path: Path) -> None:
    _, path = extended(tmp_path, method="yarn-options", tokens_trained=300, base_model="some/base")
    manifest = read_manifest(path)
    assert manifest is not None
    expected = {
        "format": 2,
        "method": "yarn",
        "factor": 4.0,
        "context_length": 256,
        "original_max_position_embeddings": 64,
        "options": {"beta_fast": 8.0, "attention_factor": 1.25, "truncate": False},
        "rope_theta": 10000.0,
        "tokens_trained": 300,
        "base_model": "some/base",
    }
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["rope_parameters"]["rope_type"] == "yarn"
    assert set(manifest["versions"]) == {"hf_posenc", "transformers", "torch"}


def test_both_serializations() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
    written = both_serializations({"model_type": "llama", "rope_parameters": yarn})
    assert written["rope_theta"] == 1e6
    assert written["rope_scaling"] == {k: v for k, v in yarn.items() if k != "rope_theta"} | {"type": "yarn"}
    assert written["rope_parameters"] == yarn
    plain = both_serializations({"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (plain["rope_scaling"], plain["rope_theta"]) == (None, 1e6)
    # Transformers 4.57's Qwen2-VL reads the axes of a head from rope_scaling, whatever the rule, and fails without.
    axes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    written = both_serializations({"model_type": "qwen2_vl_text", "rope_parameters": axes})
    assert written["rope_scaling"] == {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]}
    neox = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    written = both_serializations({"model_type": "gpt_neox", "rope_parameters": neox})
    assert (written["rotary_emb_base"], written["rotary_pct"]) == (1e6, 0.25)


def test_the_tokenizer_is_told_the_length_and_its_own_is_left(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), model_max_length=64
    )
    _, path = extended(tmp_path, tokenizer=tokenizer)
    assert json.loads((path / "tokenizer_config.json").read_text())["model_max_length"] == 256
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize("tokenizer_first", [True, False])
@pytest.mark.parametrize(
    ("limit", "saved"),
    [(64, 256), (256, 256), (1000, 1000), (int(1e30), int(1e30))],
    ids=["lower", "equal", "higher", "none"],
)
def test_a_tokenizer_saved_by_transformers_gets_the_target_where_its_limit_is_lower(
    limit: int, saved: int, tokenizer_first: bool, tmp_path: Path
) -> None:
    model, tokenizer = patch_model(make_model("Llama"), "yarn", 4), make_tiny_tokenizer()
    tokenizer.model_max_length = limit
    for part in (tokenizer, model) if tokenizer_first else (model, tokenizer):
        part.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == saved


def test_saving_over_an_earlier_checkpoint_replaces_it(tmp_path: Path) -> None:
    model, path = extended(tmp_path)
    (path / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    (path / "notes.txt").write_text("mine")
    (path / "my_lora.safetensors").write_bytes(b"mine")
    unpatch_model(model)
    patch_model(model, "linear", 2)
    save_extended(model, path)
    assert describe(load_extended(path))["method"] == "linear"
    assert not list(path.glob("model-0*"))
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "my_lora.safetensors").read_bytes() == b"mine"
    assert not (path / UNFINISHED).exists()


def test_files_move_within_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a device of its own, as a container's volume is, and what is beside it not writable."""
    model, path = extended(tmp_path)
    replace = os.replace

    def within(source: str | Path, target: str | Path) -> None:
        if path in Path(target).parents and path not in Path(source).parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(os, "replace", within)
    before = set(tmp_path.iterdir())
    unpatch_model(model)
    save_extended(patch_model(model, "linear", 2), path)
    assert describe(load_extended(path))["method"] == "linear"
    assert not (path / UNFINISHED).exists()
    assert set(tmp_path.iterdir()) == before


def test_a_path_may_begin_with_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    extended(tmp_path)
    assert describe(load_extended("~/model"))["method"] == "yarn"


def test_a_rule_that_is_lost_is_not_read_as_the_base_model(tmp_path: Path) -> None:
    save_extended(patch_model(make_model("Llama"), "dynamic_yarn", 4), tmp_path, make_tiny_tokenizer())
    load_model(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"extended by dynamic_yarn to 256 tokens, and context_extension\.json"):
        load_model(tmp_path)


def test_a_tokenizer_with_several_chat_templates_is_saved_over_an_earlier_one(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    for text in ("first", "second"):  # Transformers writes the templates besides the default one to a folder
        tokenizer.chat_template = {"default": "{{ messages }}", "tools": text}
        _, path = extended(tmp_path, tokenizer=tokenizer)
        assert (path / "additional_chat_templates/tools.jinja").read_text() == text
    assert describe(load_extended(path))["method"] == "yarn"
    assert not (path / UNFINISHED).exists()


class Died(BaseException):
    """The process was killed."""


def dying_after(steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kill the process after so many files of a folder were removed or replaced; return the names of these."""
    done: list[str] = []

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def call(*paths: Path, **kwargs: Any) -> None:
            changes_folder = folder in Path(paths[-1]).parents and UNFINISHED not in Path(paths[-1]).parts
            if changes_folder and len(done) == steps:
                raise Died
            change(*paths, **kwargs)
            if changes_folder:
                done.append(f"{change.__name__} {Path(paths[-1]).relative_to(folder)}")

        return call

    for name in ("replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return done


def test_a_checkpoint_that_is_replaced_is_old_or_new_or_refused_wherever_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest goes first and comes back last, and the config beside the weights is theirs."""
    path, tokenizer = tmp_path / "model", make_tiny_tokenizer()
    models = [patch_model(make_model("Llama"), "yarn", 4), patch_model(make_model("Llama"), "linear", 2)]
    models[1].model.embed_tokens.weight.data *= 1.5
    old, new = (logits(model, IDS) for model in models)
    seen: set[str] = set()
    for steps in itertools.count():
        finished = False
        shutil.rmtree(path, ignore_errors=True)
        save_extended(models[0], path, tokenizer)
        with monkeypatch.context() as patch, suppress(Died):
            changed = dying_after(steps, path, patch)
            save_extended(models[1], path, tokenizer)
            finished = True
        if finished or not changed:
            assert torch.equal(logits(load_extended(path).eval(), IDS), new if finished else old)
        else:
            with pytest.raises(FileNotFoundError, match=r"has no context_extension\.json"):
                load_extended(path)
        try:
            plain = logits(AutoModelForCausalLM.from_pretrained(path).eval(), IDS)
        except (OSError, ValueError):
            seen.add("refused")
        else:
            assert torch.equal(plain, old) or torch.equal(plain, new)
            seen.add("old" if torch.equal(plain, old) else "new")
        if finished:
            break
    assert changed[0] == f"unlink {MANIFEST}"
    assert changed[-2:] == ["replace config.json", f"replace {MANIFEST}"]
    assert "replace model.safetensors" in changed[:-2]
    assert seen == {"old", "refused", "new"}
    assert not (path / UNFINISHED).exists()


def test_a_merged_model_replaces_its_adapter(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "base")
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "yarn", 4)
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    path = save_extended(adapted, tmp_path / "model")
    merged = adapted.merge_and_unload()
    save_extended(merged, path)
    assert torch.equal(logits(load_extended(path), IDS), logits(merged, IDS))


def test_a_file_in_the_way_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = extended(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot be"):
        save_extended(model, tmp_path / "file")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_extended(model, ".")
    assert describe(load_extended("."))["factor"] == 4


def test_only_extended_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patch_model"):
        save_extended(make_model("Llama"), tmp_path / "model")
    model = patch_model(make_model("Llama"), "yarn", 4)
    model.model.rotary_emb.inv_freq[0] = 2.0
    with pytest.raises(RotaryMismatchError):
        save_extended(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_scaled_model_of_unknown_original_length_is_not_saved(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = make_model("Llama", rope_parameters=rope)
    with pytest.raises(ValueError, match="what length"):
        save_extended(model, tmp_path / "model")
    patch_model(model, "linear", 4, original_max_position_embeddings=16, on_scaled="replace")
    loaded = load_extended(save_extended(model, tmp_path / "model"))
    assert describe(loaded)["original_max_position_embeddings"] == 16


def test_a_checkpoint_without_or_with_a_damaged_manifest(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match=r"has no context_extension\.json"):
        load_extended(tmp_path / "plain")
    _, path = extended(tmp_path)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="newer hf_posenc"):
        load_extended(path)
    (path / MANIFEST).write_text('{"format": 1, "meth')
    with pytest.raises(ValueError, match="is damaged"):
        load_extended(path)
    (path / MANIFEST).write_text('{"format": 1}')
    with pytest.raises(ValueError, match="method, factor"):
        load_extended(path)
    changed = {**manifest, "method": "linear", "options": {}}
    (path / MANIFEST).write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="another model"):
        load_extended(path)
    (path / MANIFEST).write_text(json.dumps({**changed, "format": 1}))  # whose config says nothing to hold it against
    with pytest.raises(ValueError, match=r"'yarn',.*'linear'"):
        load_extended(path)


def test_an_edited_config_is_found(tmp_path: Path) -> None:
    _, path = extended(tmp_path)
    config = json.loads((path / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        config[key]["factor"] = 8.0
    config["max_position_embeddings"] = 512
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RotaryMismatchError, match="not those"):
        load_extended(path)


@pytest.mark.parametrize("wrap_first", [True, False])
def test_an_adapter_carries_its_extension(tmp_path: Path, wrap_first: bool) -> None:
    make_model("Llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model if wrap_first else patch_model(model, "yarn", 4), lora)
    if wrap_first:
        patch_model(adapted, "yarn", 4)
    expected = logits(adapted.eval(), IDS)
    path = save_extended(adapted, tmp_path / "adapter")
    assert not (path / "model.safetensors").exists()
    loaded = load_extended(path).eval()
    assert torch.equal(logits(loaded, IDS), expected)
    assert describe(loaded)["method"] == "yarn"
    for base in (AutoModelForCausalLM.from_pretrained(tmp_path / "base") for _ in range(2)):
        if wrap_first:  # a base that is extended already is taken as it is
            patch_model(base, "yarn", 4)
        assert torch.equal(logits(load_extended(path, base=base).eval(), IDS), expected)
    # On a base that is extended in another way it refuses.
    shutil.rmtree(tmp_path / "base")
    save_extended(patch_model(make_model("Llama"), "linear", 2), tmp_path / "base")
    with pytest.raises(ValueError, match="manifest's extension"):
        load_extended(path)
    with pytest.raises(ValueError, match="whole model,"):
        load_extended(tmp_path / "base", base=model)


# Other versions of Transformers, each installed beside ours in a cache folder.

READ_BACK = """
import json, sys, warnings
warnings.simplefilter("error")
import torch, transformers, logging
from transformers import AutoModelForCausalLM
complaints = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: complaints.append(record.getMessage())
transformers.logging.get_logger("transformers").addHandler(handler)
for path in sys.argv[1:]:
    rotary = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb
    short = rotary.inv_freq.view(torch.int32).tolist()
    rotary(torch.zeros(1), torch.arange(200).unsqueeze(0))  # past the original length, where longrope switches lists
    long = rotary.inv_freq.view(torch.int32).tolist()
    print(json.dumps([transformers.__version__, path, short, long, rotary.attention_scaling, complaints]))
    assert not any(name.startswith("hf_posenc") for name in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.23.0"])
def test_other_transformers_read_the_same_frequencies(tmp_path: Path, version: str) -> None:
    expected = {}
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        for key in STATIC_METHODS:
            model = make_model(family)
            name, options = method_options(key, model)
            path = save_extended(patch_model(model, name, 4, **options), tmp_path / f"{family}-{key}")
            rotary = model.model.rotary_emb
            short = rotary.inv_freq.view(torch.int32).tolist()
            rotary(torch.zeros(1), torch.arange(200).unsqueeze(0))
            expected[str(path)] = [short, rotary.inv_freq.view(torch.int32).tolist(), rotary.attention_scaling]
    output = subprocess.run(
        [python_with(version), "-c", READ_BACK, *expected], check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row[0] for row in rows] == [version] * len(expected)
    assert {row[1]: row[2:5] for row in rows} == expected
    assert rows[-1][5] == []  # nothing was logged as a warning


REFUSED = """
import sys
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
    except KeyError as error:
        print(error.args[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.23.0"])
def test_other_transformers_say_what_loads_an_encoding(tmp_path: Path, version: str) -> None:
    families = ("Llama", "Qwen3", "Gemma2", "GPTNeoX")
    paths = [save_extended(patch_model(make_model(name), "alibi"), tmp_path / name) for name in families]
    run = [python_with(version), "-c", REFUSED, *paths]
    said = subprocess.run(run, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert said == ["alibi takes the place of RoPE: load this checkpoint with hf_posenc.load_extended"] * len(families)


LOGITS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        print(json.dumps(model(torch.arange(3, 103).unsqueeze(0)).logits[0, -1].tolist()))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:config.sliding_window is 128")  # Phi-3's, in this small form
@pytest.mark.parametrize(
    ("version", "model_types"),
    [
        # Phi-3 there refuses an attention factor, DeepSeek-V2 forgets the softmax scale.
        ("4.57.6", ("gemma3_text", "olmo3", "deepseek_v3", "gpt_neox", "gpt_oss", "glm", "cohere")),
        # Gemma 3 there refuses yarn for one layer type, OLMo 3 has one rule for all.
        ("5.0.0", ("phi3", "deepseek_v3", "gpt_neox", "gpt_oss", "glm", "cohere")),
    ],
)
def test_other_transformers_give_the_same_logits_of_families_with_their_own_serialization(
    tmp_path: Path, version: str, model_types: tuple[str, ...]
) -> None:
    ids, request = torch.arange(3, 103).unsqueeze(0), {"original_max_position_embeddings": 64, "on_scaled": "replace"}
    expected, moved, paths = [], [], []
    for model_type in model_types:
        model = tiny_model(model_type)
        plain = logits(model, ids)[0, -1]
        patch_model(model, "yarn", 4, **request)
        expected.append(logits(model, ids)[0, -1])
        moved.append(float((expected[-1] - plain).abs().max()))
        paths.append(save_extended(model, tmp_path / model_type))
    run = [python_with(version), "-c", LOGITS, *paths]
    output = subprocess.run(run, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    for path, line, wanted, by in zip(paths, output.splitlines(), expected, moved, strict=True):
        torch.testing.assert_close(torch.tensor(json.loads(line)), wanted, rtol=0, atol=by / 20, msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.23.0"])
def test_other_transformers_run_a_model_whose_projections_were_changed(tmp_path: Path, version: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    result, wrapped = fit_adapted(tokenizer, 512)
    ids = torch.arange(3, 103).unsqueeze(0)
    with wrapped.disable_adapter():
        rule_alone = logits(wrapped, ids)[0, -1]
    model = wrapped.merge_and_unload()
    expected = logits(model, ids)[0, -1]
    path = save_extended(model, tmp_path / "model", tokenizer, fitted_on=result.facts)
    run = [python_with(version), "-c", LOGITS, str(path)]
    found = torch.tensor(json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - rule_alone).abs().max() > 1e-2
