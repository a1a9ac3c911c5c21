"""Commands for other stacks, read back as those stacks read them and held against the live model's frequencies."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, Keys
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from documents import PAGES
from hf_posenc import load_extended, patch_model, save_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.cli.export import STACKS as KNOWN_TO_THE_PARSER
from hf_posenc.cli.main import main
from hf_posenc.evaluation import perplexity
from hf_posenc.exports import STACKS, export_command, gguf_metadata, gguf_tensors
from hf_posenc.serving import check_server
from report_records import make_record, make_retrieval_record
from served_frequencies import (
    Frequencies,
    by_transformers,
    extended,
    flag,
    keys_of_flags,
    llama_cpp_reads,
    mlx_reads,
    sglang_reads,
    usual,
    vllm_reads,
)
from tiny_models import STATIC_METHODS, make_model, method_options, token_ids

TWO_LISTS = "short_factor other than long_factor"
REFUSED: dict[tuple[str, str], str] = {
    ("vllm", "longrope"): TWO_LISTS,
    ("sglang", "longrope"): TWO_LISTS,
    ("tgi", "longrope"): TWO_LISTS,
    ("tgi", "linear"): "divides nothing by the factor",
    ("tgi", "yarn-paper"): "TGI cannot express attention_factor 1.13",
    ("tgi", "yarn-harmonic"): "TGI cannot express attention_factor 1.13",
    ("tgi", "nope"): "TGI cannot express attention_factor 1.0",
    ("tgi", "ntk_rcd-constant"): "TGI cannot express attention_factor 1.0",
    ("tgi", "yarn_rcd"): "TGI cannot express beta_slow 1.81",
    ("tgi", "yarn-options"): "TGI cannot express beta_fast 8.0, truncate False",
}
# mlx-lm computes the attention factor itself too, but reads the betas.
REFUSED |= {
    ("mlx", "longrope"): TWO_LISTS,
    ("mlx", "yarn-paper"): "mlx-lm cannot express attention_factor 1.13",
    ("mlx", "yarn-harmonic"): "mlx-lm cannot express attention_factor 1.13",
    ("mlx", "nope"): "mlx-lm cannot express attention_factor 1.0",
    ("mlx", "ntk_rcd-constant"): "mlx-lm cannot express attention_factor 1.0",
    ("mlx", "yarn-options"): "mlx-lm cannot express truncate False",
}
# llama.cpp runs these from a file that export_gguf writes; it has no flags for them.
NO_FLAGS = ("longrope", "yarn-paper", "yarn-harmonic", "nope", "ntk_rcd-constant", "yarn-options")


def expressed_by(stack: str) -> pytest.MarkDecorator:
    """Run a test with the methods that a stack can express; the others are in the test of refusals."""
    keys = [key for key in STATIC_METHODS if (stack, key) not in REFUSED]
    return pytest.mark.parametrize("saved", keys, indirect=True)


@pytest.fixture(params=STATIC_METHODS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Frequencies]:
    method, options = method_options(request.param, make_model("Llama"))
    return request.param, *extended(tmp_path / "my model's folder", method, **options)


def commands(path: Path, stack: str) -> list[list[str]]:
    lines = [line for line in export_command(path, stack).splitlines() if not line.startswith("#")]
    words = [shlex.split(line) for line in lines]
    assert [shlex.join(line) for line in words] == lines
    return words


@expressed_by("vllm")  # SGLang refuses the same
@pytest.mark.parametrize(
    ("stack", "start", "length", "override", "reads"),
    [
        ("vllm", ["vllm", "serve"], "--max-model-len", "--hf-overrides", vllm_reads),
        (
            "sglang",
            ["python", "-m", "sglang.launch_server", "--model-path"],
            "--context-length",
            "--json-model-override-args",
            sglang_reads,
        ),
    ],
)
def test_vllm_and_sglang_run_the_rule_from_the_folder_and_on_the_base_model(
    saved: tuple[str, Path, Frequencies],
    stack: str,
    start: list[str],
    length: str,
    override: str,
    reads: Callable[[PreTrainedConfig, dict[str, Any]], Frequencies],
) -> None:
    _, path, (inv_freq, factor) = saved
    own, onto_base = commands(path, stack)
    assert own[: len(start) + 1] == [*start, str(path)]
    assert onto_base[: len(start) + 1] == [*start, "org/base model"]
    in_config = json.loads((path / "config.json").read_text())["rope_parameters"]
    onto = json.loads(flag(onto_base, override))
    assert onto["max_position_embeddings"] == 256
    for words, rope in (
        (own, json.loads(flag(own, override, "{}")).get("rope_parameters", in_config)),
        (onto_base, onto["rope_parameters"]),
    ):
        assert flag(words, length) == "256"
        assert {name: rope[name] for name in in_config} == in_config
        read = reads(AutoConfig.from_pretrained(path), rope)
        torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
        assert read[1] == pytest.approx(factor, rel=1e-6)


@expressed_by("tgi")
def test_tgi_reads_the_spelling_of_transformers_4(saved: tuple[str, Path, Frequencies]) -> None:
    _, path, (inv_freq, factor) = saved
    (words,) = commands(path, "tgi")
    assert words[:3] == ["text-generation-launcher", "--model-id", str(path)]
    assert (flag(words, "--max-input-tokens"), flag(words, "--max-total-tokens")) == ("255", "256")
    config = json.loads((path / "config.json").read_text())
    scaling = config["rope_scaling"]
    rope = {"rope_type": "default"} if scaling is None else dict(scaling)
    assert rope["rope_type"] in ("default", "llama3", "yarn")
    read = by_transformers(AutoConfig.from_pretrained(path), {"rope_theta": config["rope_theta"], **rope})
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(usual(rope) if rope["rope_type"] == "yarn" else 1.0, rel=1e-6)


def test_tgi_runs_longrope_with_equal_lists_and_its_own_attention_factor(tmp_path: Path) -> None:
    divisors = [1.0 + i for i in range(8)]
    path, _ = extended(tmp_path / "own", "longrope", short_factor=divisors, long_factor=divisors)
    assert flag(commands(path, "tgi")[0], "--max-total-tokens") == "256"
    options = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.25}
    path, _ = extended(tmp_path / "given", "longrope", **options)
    with pytest.raises(ValueError, match=r"TGI cannot express attention_factor 1\.25"):
        export_command(path, "tgi")


@expressed_by("mlx")
def test_mlx_reads_the_spelling_of_transformers_4(saved: tuple[str, Path, Frequencies]) -> None:
    _, path, (inv_freq, factor) = saved
    assert commands(path, "mlx") == [["mlx_lm.server", "--model", str(path)]]
    config = json.loads((path / "config.json").read_text())
    rope = dict(config["rope_scaling"] or {"rope_type": "default"})
    read = mlx_reads(AutoConfig.from_pretrained(path), {"rope_theta": config["rope_theta"], **rope})
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert read[1] == pytest.approx(factor, rel=1e-6)


def test_mlx_runs_longrope_with_its_own_attention_factor_only(tmp_path: Path) -> None:
    divisors = [1.0 + i for i in range(8)]
    path, (_, factor) = extended(tmp_path / "own", "longrope", short_factor=divisors, long_factor=divisors)
    scaling = json.loads((path / "config.json").read_text())["rope_scaling"]
    assert commands(path, "mlx")
    assert mlx_reads(AutoConfig.from_pretrained(path), {"rope_theta": 1e4, **scaling})[1] == pytest.approx(factor)
    options = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.25}
    path, _ = extended(tmp_path / "given", "longrope", **options)
    with pytest.raises(ValueError, match=r"mlx-lm.*attention_factor 1\.25.*--to"):
        export_command(path, "mlx")


def test_ollama_gets_a_file_and_a_modelfile(
    saved: tuple[str, Path, Frequencies], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path, _ = saved
    lines = [line for line in export_command(path, "ollama").splitlines() if not line.startswith("#")]
    write, modelfile, create, run = lines
    name = f"my-model-s-folder-{STATIC_METHODS[key][0]}"
    written = ["--base", "BASE.gguf", "--output", f"{name}.gguf"]
    assert shlex.split(write) == ["hf-posenc", "export", str(path), "--to", "gguf", *written]
    monkeypatch.chdir(tmp_path)
    subprocess.run(modelfile, shell=True, check=True)
    assert Path("Modelfile").read_text() == f"FROM ./{name}.gguf\nPARAMETER num_ctx 256\n"
    assert (create, run) == (f"ollama create {name} -f Modelfile", f"ollama run {name}")


@pytest.mark.parametrize("saved", ["yarn"], indirect=True)
def test_a_name_of_no_ascii_letters_is_no_flag(saved: tuple[str, Path, Frequencies], tmp_path: Path) -> None:
    key, path, _ = saved
    folder = shutil.copytree(path, tmp_path / "模型")
    (create,) = (line for line in export_command(folder, "ollama").splitlines() if line.startswith("ollama create"))
    assert shlex.split(create)[2] == f"model-{STATIC_METHODS[key][0]}"


@pytest.mark.parametrize("saved", [key for key in STATIC_METHODS if key not in NO_FLAGS], indirect=True)
def test_llama_cpp_flags_say_the_whole_rule(saved: tuple[str, Path, Frequencies]) -> None:
    _, path, (inv_freq, factor) = saved
    convert, serve = commands(path, "llama.cpp")
    assert convert == ["python", "convert_hf_to_gguf.py", str(path), "--outfile", "my model's folder.gguf"]
    assert serve[:5] == ["llama-server", "-m", "my model's folder.gguf", "-c", "256"]
    keys, tensors = keys_of_flags(serve, freq_base=10000.0), {}
    if serve[5:]:
        assert keys["context_length"] == 256
    else:  # what the converter writes; flags have no room for it
        tensors = gguf_tensors(path)
        assert "flags cannot say it" in export_command(path, "llama.cpp")
        assert "take the original length for 8192 get it wrong" in export_command(path, "llama.cpp")
    read = llama_cpp_reads(keys, tensors, head_dim=16)
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert read[1] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("saved", NO_FLAGS, indirect=True)
def test_llama_cpp_without_flags_gets_a_file(saved: tuple[str, Path, Frequencies]) -> None:
    key, path, _ = saved
    convert, copy, serve = commands(path, "llama.cpp")
    made, into = convert[-1], serve[2]
    assert made == "my model's folder.gguf"
    assert copy == ["hf-posenc", "export", str(path), "--to", "gguf", "--base", made, "--output", into]
    assert serve == ["llama-server", "-m", into, "-c", "256"]
    assert into == f"my model's folder-{STATIC_METHODS[key][0]}.gguf"
    assert ("# two lists: llama.cpp takes long_factor" in export_command(path, "llama.cpp")) == (key == "longrope")


def test_llama_cpp_betas_and_attention_factor_are_in_the_flags(tmp_path: Path) -> None:
    options = {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25}
    path, (inv_freq, factor) = extended(tmp_path / "model", "yarn", **options)
    _, serve = commands(path, "llama.cpp")
    assert (flag(serve, "--yarn-beta-fast"), flag(serve, "--yarn-beta-slow")) == ("8.0", "2.0")
    read = llama_cpp_reads(keys_of_flags(serve, freq_base=10000.0), {}, head_dim=16)
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert read[1] == pytest.approx(factor, rel=1e-6)
    assert factor == 1.25


def test_what_a_stack_cannot_express_is_refused_with_the_reason(saved: tuple[str, Path, Frequencies]) -> None:
    key, path, _ = saved
    for stack in STACKS:
        if (stack, key) in REFUSED:
            with pytest.raises(ValueError, match=re.escape(REFUSED[stack, key])):
                export_command(path, stack)
        else:
            assert " x4, 64 -> 256 tokens; " in export_command(path, stack)


def written_and_read(path: Path, file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a tiny GGUF file with the metadata and tensors of a rule; return what its reader finds."""
    writer = GGUFWriter(file, "llama")
    kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in gguf_metadata(path).items():
        kinds[type(value)](key, value)
    for name, divisors in gguf_tensors(path).items():
        writer.add_tensor(name, np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def test_gguf_metadata_and_tensors_survive_a_file(saved: tuple[str, Path, Frequencies], tmp_path: Path) -> None:
    key, path, _ = saved
    fields, tensors = written_and_read(path, tmp_path / "rule.gguf")
    manifest = read_manifest(path) or {}
    rope = manifest["rope_parameters"]
    known = {value.format(arch="llama") for name, value in vars(Keys.Rope).items() if name.isupper()}
    assert fields.keys() - {Keys.LLM.CONTEXT_LENGTH.format(arch="llama")} <= known
    assert fields.pop("llama.context_length") == manifest["context_length"]
    assert fields.pop("llama.rope.freq_base") == pytest.approx(rope["rope_theta"], rel=1e-7)
    scaling = {name.removeprefix("llama.rope.scaling."): value for name, value in fields.items()}
    if rope["rope_type"] == "linear":
        assert scaling == {"type": "linear", "factor": 4.0}
    elif rope["rope_type"] == "yarn" and key == "yarn":
        assert scaling == {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    elif key == "longrope":
        attention = pytest.approx(rope["attention_factor"], rel=1e-7)
        assert scaling == {"type": "longrope", "original_context_length": 64, "attn_factor": attention}
        for length in ("short", "long"):
            np.testing.assert_allclose(tensors.pop(f"rope_factors_{length}.weight"), rope[f"{length}_factor"], 1e-7)
    elif rope["rope_type"] in ("llama3", "longrope", "yarn"):
        assert tensors.pop("rope_freqs.weight").shape == (8,)
        assert scaling.keys() <= {"attn_factor"}
    else:
        assert scaling == {}
    assert tensors == {}


@pytest.mark.parametrize("saved", [key for key in STATIC_METHODS if key != "longrope"], indirect=True)
def test_a_gguf_file_alone_gives_the_frequencies(saved: tuple[str, Path, Frequencies], tmp_path: Path) -> None:
    _, path, (inv_freq, factor) = saved
    fields, tensors = written_and_read(path, tmp_path / "rule.gguf")
    keys = {name.removeprefix("llama.").removeprefix("rope."): value for name, value in fields.items()}
    read = llama_cpp_reads(keys, {name: data.tolist() for name, data in tensors.items()}, head_dim=16)
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert read[1] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("method", ["llama3", "yarn"])
def test_divisors_are_for_the_llama_architecture_only(method: str, tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", method, family="Qwen2")
    assert "vllm serve" in export_command(path, "vllm")
    if method == "yarn":
        assert gguf_metadata(path)["qwen2.rope.scaling.type"] == "yarn"
    else:
        for stack in ("llama.cpp", "ollama"):
            with pytest.raises(ValueError, match=r"llama3.*model_type 'qwen2'"):
                export_command(path, stack)


def test_yarn_with_its_own_betas_is_flags_for_qwen_and_no_file(tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", "yarn", family="Qwen2", beta_fast=8.0)
    assert flag(commands(path, "llama.cpp")[1], "--yarn-beta-fast") == "8.0"
    with pytest.raises(ValueError, match=r"beta_fast=8\.0.*model_type 'qwen2'"):
        gguf_metadata(path)


def test_yarn_with_deepseeks_pair(tmp_path: Path) -> None:
    path, (_, factor) = extended(tmp_path / "model", "yarn", mscale=0.7, mscale_all_dim=0.3)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    quotient = (0.07 * math.log(4) + 1) / (0.03 * math.log(4) + 1)
    assert factor == pytest.approx(quotient)
    assert "--json-model-override-args" not in commands(path, "sglang")[0]
    assert (rope["mscale"], rope["mscale_all_dim"]) == (0.7, 0.3)
    assert commands(path, "tgi")
    assert "# earlier versions skip some of" in export_command(path, "vllm")
    keys = keys_of_flags(commands(path, "llama.cpp")[1], freq_base=10000.0)
    assert llama_cpp_reads(keys, {}, head_dim=16)[1] == pytest.approx(factor, rel=1e-6)
    given, _ = extended(tmp_path / "given", "yarn", mscale=0.7, mscale_all_dim=0.3, attention_factor=1.25)
    override = json.loads(flag(commands(given, "sglang")[0], "--json-model-override-args"))
    assert override["rope_parameters"]["attn_factor"] * quotient == pytest.approx(1.25)


def test_families_and_rules_that_were_not_checked_or_move_are_refused(tmp_path: Path) -> None:
    unchecked, _ = extended(tmp_path / "unchecked", "yarn", family="Olmo2")
    with pytest.warns(UserWarning, match="per forward"):
        moving, _ = extended(tmp_path / "moving", "dynamic", scope="sequence")
    for stack in STACKS:
        with pytest.raises(ValueError, match="model_type 'olmo2'"):
            export_command(unchecked, stack)
        with pytest.raises(ValueError, match="dynamic rule"):
            export_command(moving, stack)
    with pytest.raises(ValueError, match="model_type 'olmo2'"):
        gguf_metadata(unchecked)
    mixtral, _ = extended(tmp_path / "mixtral", "yarn", family="Mixtral")
    assert commands(mixtral, "vllm")
    for stack in ("sglang", "mlx"):
        with pytest.raises(ValueError, match="drops part"):
            export_command(mixtral, stack)


def test_the_page_says_of_each_stack_what_was_read_and_what_was_run() -> None:
    page = (PAGES / "how-to" / "serve.md").read_text(encoding="utf-8")
    for stack in STACKS.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"    | {stack.title} |")]
        version, date = re.fullmatch(r"(.+) \((.+)\)", stack.read).groups()
        assert f"| {version}, {date} |" in row
        if stack.ran is None:
            assert "| no; " in row or "| no |" in row
        else:
            ran, date = re.fullmatch(r"(.+) \((.+)\)", stack.ran).groups()
            assert date in row
            assert all(number in row for number in re.findall(r"\d+\.\d+\.\d+", ran))


def test_comments_say_what_serving_takes(tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", "yarn")
    memory, drafts, short = export_command(path, "vllm").splitlines()[-3:]
    # 2 (keys and values) x 2 layers x 2 heads x 16 features x 256 tokens x 2 bytes
    assert memory == "# the KV cache of one text of 256 tokens takes 0.07 MB in 16 bits"
    assert "prefix caching and chunked prefill are safe" in drafts
    assert "needs the same rule, or fewer of its guesses are accepted past 64 tokens" in drafts
    assert short.endswith(
        "up to 64 tokens are read with the rule too: hf-posenc eval --method auto measures what that costs"
    )


def test_vllm_is_said_to_read_short_requests_without_the_rule_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = extended(tmp_path / "model", "yarn")
    said = "requests of at most 64 tokens, prompt and max_tokens, are read without the rule"
    found: dict[str, str | None] = {"vllm": None}

    def version(name: str) -> str:
        if found[name] is None:
            raise PackageNotFoundError(name)
        return str(found[name])

    monkeypatch.setattr("hf_posenc.exports.servers.version", version)
    for installed, words in ((None, "0.32.*"), ("0.32.1", "which it is: 0.32.1"), ("0.33.0", "which has 0.33.0 here")):
        found["vllm"] = installed
        (line,) = [line for line in export_command(path, "vllm").splitlines() if said in line]
        assert words in line
    assert said not in export_command(path, "sglang")
    manifest = json.loads((path / "context_extension.json").read_text())
    (path / "context_extension.json").write_text(json.dumps({**manifest, "tokens_trained": 1000}))
    assert said not in export_command(path, "vllm")


def test_the_cost_of_short_texts_is_that_of_the_folders_records(tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", "yarn")
    rows = [
        ("none", 32, 10.0, {}),
        ("yarn", 32, 11.0, {}),
        ("none", 64, 8.0, {}),
        ("yarn", 64, 8.2, {}),
        ("yarn", 64, 7.0, {"tokens_trained": 1000}),  # of another model
        ("yarn", 64, 4.0, {"options": {"attention_factor": 1.0}}),
        ("yarn", 64, 8.1, {"factor": 2.0}),
        ("linear", 64, 9.0, {}),
        ("none", 128, 50.0, {}),  # past the original length
        ("yarn", 128, 6.0, {}),
        ("yarn", 64, 5.0, {"text_hash": "b"}),  # of another text
    ]
    lines = [make_record(*row, **more).to_json() for *row, more in rows]
    lines.append(make_retrieval_record("yarn", 64, 0.0, 0, True).to_json())
    lines += ['{"method": "none", "tokens_trained": 0, "perplexity": 5.1}', "[]"]  # other programs'
    (path / "results.jsonl").write_text("\n".join(lines) + "\n")
    short = export_command(path, "vllm").splitlines()[-1]
    assert short.endswith("are read with the rule too: perplexity +2.5 % at 64 tokens (results.jsonl)")
    manifest = json.loads((path / "context_extension.json").read_text())
    (path / "context_extension.json").write_text(json.dumps({**manifest, "tokens_trained": None}))
    assert export_command(path, "vllm").endswith("hf-posenc eval --method auto measures what that costs")
    (path / "results.jsonl").write_text("{")
    assert "is not known, as results.jsonl is damaged" in export_command(path, "vllm").splitlines()[-1]


def test_records_that_were_measured_give_the_cost_of_short_texts(tmp_path: Path) -> None:
    model = make_model("Llama")
    documents, records = [token_ids(200)[0].tolist()], tmp_path / "model" / "results.jsonl"
    (unextended,) = perplexity(model, documents, [64])
    options = {"attention_factor": 1.5, "beta_fast": 8.0}
    save_extended(patch_model(model, "yarn", 4, **options), records.parent)
    (own,) = perplexity(model, documents, [64])
    records.write_text(f"{unextended.to_json()}\n{own.to_json()}\n")
    cost = 100 * (own.perplexity / unextended.perplexity - 1)
    assert cost != 0
    short = export_command(records.parent, "vllm").splitlines()[-1]
    assert short.endswith(f"perplexity {cost:+.1f} % at 64 tokens (results.jsonl)")


def test_an_edited_config_is_refused(tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", "yarn")
    config = json.loads((path / "config.json").read_text())
    for edit in ({"rope_parameters": {**config["rope_parameters"], "factor": 8.0}}, {"max_position_embeddings": 64}):
        (path / "config.json").write_text(json.dumps({**config, **edit}))
        for read in (lambda: export_command(path, "vllm"), lambda: gguf_metadata(path)):
            with pytest.raises(ValueError, match="not carry"):
                read()


@pytest.mark.parametrize("options", [{}, {"attention_factor": 1.1}])
def test_the_plugin_of_vllm_is_named_with_every_static_rule(options: dict[str, Any], tmp_path: Path) -> None:
    save_extended(patch_model(make_model("Llama"), "yarn", 4, **options), tmp_path)
    assert "are read without the rule" in export_command(tmp_path, "vllm")


def an_adapter(folder: Path, **settings: Any) -> Path:
    make_model("Llama").save_pretrained(folder / "base")
    base = patch_model(AutoModelForCausalLM.from_pretrained(folder / "base"), "yarn", 4)
    adapter = get_peft_model(base, LoraConfig(target_modules=["q_proj", "k_proj"], **settings))
    return save_extended(adapter, folder / "adapter", tokens_trained=300)


def test_other_servers_than_vllm_want_an_adapter_merged_first(tmp_path: Path) -> None:
    path = an_adapter(tmp_path)
    merging = r"is an adapter.*save_extended\(load_extended\(path\)\.merge_and_unload\(\), .*, tokens_trained=300\)"
    for refused in (
        lambda: export_command(path, "sglang"),
        lambda: export_command(path, "llama.cpp"),
        lambda: gguf_metadata(path),
        lambda: export_command(path, "vllm", as_method="linear"),
        lambda: check_server(path, "http://localhost:1", as_method="linear"),
    ):
        with pytest.raises(ValueError, match=merging):
            refused()
    save_extended(load_extended(path).merge_and_unload(), tmp_path / "merged")
    assert commands(tmp_path / "merged", "vllm")[0][2] == str(tmp_path / "merged")


def test_vllm_puts_an_adapter_on_its_base_model_with_the_rule(tmp_path: Path) -> None:
    path = an_adapter(tmp_path, r=12, rank_pattern={"q_proj": 20})
    named, with_plugin = (
        command for command in commands(path, "vllm") if command[:3] == ["vllm", "serve", str(tmp_path / "base")]
    )
    own, rest = named[: named.index("--lora-modules")], named[named.index("--lora-modules") :]
    assert own == with_plugin[: with_plugin.index("--additional-config")]
    manifest = json.loads((path / "context_extension.json").read_text())
    overrides = json.loads(own[own.index("--hf-overrides") + 1])
    assert overrides["rope_parameters"] == manifest["rope_parameters"]
    assert overrides["max_position_embeddings"] == manifest["context_length"]
    assert own[own.index("--max-model-len") + 1] == str(manifest["context_length"])
    assert own[own.index("--max-lora-rank") + 1] == "32"  # the next that vLLM takes
    assert own[own.index("--lora-target-modules") + 1 :] == ["k_proj", "q_proj"]
    assert rest == ["--lora-modules", f"extended={path}"]
    assert json.loads(with_plugin[-1]) == {"hf_posenc": str(path)}


def test_an_adapter_that_vllm_cannot_run_or_whose_base_model_is_gone_is_refused(tmp_path: Path) -> None:
    path = an_adapter(tmp_path)
    settings = json.loads((path / "adapter_config.json").read_text())
    for key, value, reason in (
        ("peft_type", "IA3", "LoRA adapters only, and this one is of PEFT's type IA3"),
        ("r", 513, "the rank 513"),
        ("modules_to_save", ["embed_tokens"], "trained as a whole"),
        ("use_dora", True, "DoRA"),
    ):
        (path / "adapter_config.json").write_text(json.dumps({**settings, key: value}))
        with pytest.raises(ValueError, match=reason):
            export_command(path, "vllm")
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="base_model_name_or_path"):
        export_command(path, "vllm")


def test_the_command_line_prints_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = extended(tmp_path / "model", "linear")
    assert main(["export", str(path), "--to", "vllm"]) == 0
    assert capsys.readouterr().out == export_command(path, "vllm") + "\n"
    make_model("Llama").save_pretrained(tmp_path / "plain")
    capsys.readouterr()
    for argv, message in (
        ([str(path), "--to", "tgi"], "TGI cannot express linear"),
        (
            [str(tmp_path / "plain"), "--to", "vllm"],
            "has no context_extension.json: give a folder that hf-posenc wrote",
        ),
        ([str(tmp_path / "nowhere"), "--to", "vllm"], "has no context_extension.json"),
        ([str(path), "--to", "triton"], "'triton'"),
        ([str(path)], "give one of --to (a program, or gguf) and --verify"),
        ([str(path), "--to", "vllm", "--verify", "http://localhost:1"], "give one of --to"),
        (
            [str(path), "--to", "vllm", "--api-key", "x", "--probe-length", "9k"],
            "--probe-length and --api-key are for --verify",
        ),
        ([str(path), "--to", "vllm", "--dtype", "float32"], "--dtype are for --verify"),
        ([str(path), "--to", "vllm", "--output", "a.gguf"], "--base and --output are for --to gguf"),
        ([str(path), "--to", "gguf"], "--to gguf needs --output"),
    ):
        assert main(["export", *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("hf-posenc: error: ")
        assert message in error
    with pytest.raises(ValueError, match=r"'triton'\..*llama\.cpp,"):
        export_command(path, "triton")
    assert (*STACKS, "gguf") == KNOWN_TO_THE_PARSER


def test_yarn_whose_ramp_is_not_truncated_is_a_tensor_in_files(tmp_path: Path) -> None:
    """llama.cpp's own yarn rounds the ends of the ramp, whatever a file or a flag says."""
    path, (inv_freq, factor) = extended(tmp_path / "model", "yarn", truncate=False)
    divisors = torch.tensor(gguf_tensors(path)["rope_freqs.weight"], dtype=torch.float64)
    plain = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(plain / divisors, inv_freq, rtol=1e-6, atol=0)
    assert gguf_metadata(path)["llama.rope.scaling.attn_factor"] == pytest.approx(factor)
    assert "--to gguf" in " ".join(commands(path, "llama.cpp")[1])
    rounded, _ = extended(tmp_path / "rounded", "yarn")
    assert gguf_tensors(rounded) == {}


def test_one_key_of_deepseeks_pair_is_not_read(tmp_path: Path) -> None:
    """Transformers and the servers read both or none, so the usual factor of yarn is what SGLang multiplies."""
    path, _ = extended(tmp_path / "model", "yarn", mscale=0.7, attention_factor=1.25)
    override = json.loads(flag(commands(path, "sglang")[0], "--json-model-override-args"))
    assert override["rope_parameters"]["attn_factor"] * (0.1 * math.log(4) + 1) == pytest.approx(1.25)
