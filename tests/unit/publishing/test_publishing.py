"""Models on the Hub: pushed to a stand-in over HTTP and read back to the bit, and what is said where that fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForSequenceClassification

import hf_posenc
from hf_posenc import describe, install, load_extended, patch_model, perplexity, save_extended, verify_model
from hf_posenc.checkpoint.plain_loading import plain_loading
from hf_posenc.cli.main import main
from hf_posenc.errors import (
    HubAccessError,
    HubUnreachableError,
    InvalidRequestError,
    InvalidTypeError,
    MissingFileError,
    RotaryMismatchError,
)
from hf_posenc.evaluation import Record, read_records
from hf_posenc.exports import export_command
from hf_posenc.publishing.card import is_own_card
from hub_server import UPLOADS, Hub, environment, use_hub
from tiny_llama import make_tiny_llama, make_tiny_tokenizer
from tiny_models import make_model
from tiny_runs import load_as_the_card_says

pytestmark = UPLOADS

NAME = "me/longer"


def extended(method: str = "yarn", **options: Any) -> Any:
    return patch_model(make_tiny_llama(), method, 4, **options)


def results(tmp_path: Path, method: str = "yarn", **options: Any) -> Path:
    """Perplexities of the tiny model, extended and not, as ``hf-posenc eval`` writes them."""
    ids = [torch.randint(1, 60, (400,), generator=torch.Generator().manual_seed(3))]
    for model in (make_tiny_llama(), extended(method, **options)):
        perplexity(model, ids, [32, 64, 256], tokenizer=make_tiny_tokenizer(), output=tmp_path / "results.jsonl")
    return tmp_path / "results.jsonl"


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("yarn", {"beta_fast": 16}),
    "lists": ("longrope", {"short_factor": [1.0] * 8, "long_factor": [1.0 + i / 3 for i in range(8)]}),
    "staged": ("dynamic_yarn", {}),
    "distance": ("dca", {}),
}


@pytest.mark.parametrize("kind", RULES)
def test_what_is_pushed_comes_back_to_the_bit(kind: str, server: Hub, tmp_path: Path) -> None:
    method, options = RULES[kind]
    model = extended(method, **options)
    folder = save_extended(model, tmp_path / "longer", make_tiny_tokenizer(), push_to_hub=NAME)
    here = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"config.json", "context_extension.json", "model.safetensors", "tokenizer.json", "README.md"} <= here.keys()
    assert {**here, ".gitattributes": server.files(NAME)[".gitattributes"]} == server.files(NAME)
    again = load_extended(NAME)
    assert describe(again) == describe(model)
    expected, found = tensors(model), tensors(again)
    assert "model.rotary_emb.inv_freq" in expected
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    ids = torch.arange(1, 200)[None] % 60
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)


def test_a_private_adapter_of_a_branch_comes_back_too(
    server: Hub, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_model_of(tiny_checkpoint)
    adapted = get_peft_model(patch_model(base, "yarn", 4), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    save_extended(adapted, tmp_path / "adapter", push_to_hub="me/adapter", private=True, revision="long")
    assert "library_name: peft" in server.files("me/adapter", "long")["README.md"].decode()
    nobody(server, monkeypatch, tmp_path)
    again = load_extended("me/adapter", revision="long", token="hf_me")
    assert describe(again) == describe(adapted)
    assert verify_model(again, "me/adapter", revision="long", token="hf_me").extension == describe(adapted)
    for name, tensor in tensors(adapted).items():
        assert torch.equal(tensor, tensors(again)[name]), name


def load_model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("way", ["whole", "adapter"])
def test_models_without_an_extension_cost_no_search_on_the_hub(way: str, server: Hub, tmp_path: Path) -> None:
    """Each from_pretrained of any model asked for three more files."""
    install()
    plain = make_model("Llama")
    if way == "whole":
        plain.push_to_hub(NAME)
    else:
        get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM")).push_to_hub(NAME)

    def requests_of_loading(cache: Path) -> list[tuple[str, str]]:
        server.requests.clear()
        if way == "whole":
            AutoModelForCausalLM.from_pretrained(NAME, cache_dir=cache)
        else:
            PeftModel.from_pretrained(make_model("Llama"), NAME, cache_dir=cache)
        return sorted(server.requests)

    with plain_loading():
        without = requests_of_loading(tmp_path / "first")
    assert without
    found = requests_of_loading(tmp_path / "second")
    assert set(found) == set(without)
    # adapter_config.json is asked for by PEFT twice, and by from_pretrained and load_adapter before that.
    assert len(found) == len(without) + 2 * (way == "adapter")


@pytest.mark.slow
def test_transformers_alone_loads_it_in_a_process_of_its_own(server: Hub, tmp_path: Path) -> None:
    model = extended("yarn")
    save_extended(model, tmp_path / "longer", make_tiny_tokenizer(), push_to_hub=NAME, private=True)
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained('{NAME}')\n"
        f"assert AutoTokenizer.from_pretrained('{NAME}').model_max_length == 256\n"
        "assert 'hf_posenc' not in sys.modules\n"
        "torch.save({**model.state_dict(), **dict(model.named_buffers())}, sys.argv[1])\n"
    )
    variables = {**os.environ, **environment(server, str(tmp_path / "reader"), "hf_me"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "read.pt")], env=variables, check=True, cwd=tmp_path)
    found = torch.load(tmp_path / "read.pt")
    assert found.keys() == tensors(model).keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in tensors(model).items())


def test_the_repository_holds_this_model_and_nothing_of_an_earlier_one(server: Hub, tmp_path: Path) -> None:
    folder = save_extended(extended(), tmp_path / "longer", make_tiny_tokenizer(), push_to_hub=NAME)
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json")
    server.repos[NAME].commit("main", {**server.files(NAME), **dict.fromkeys((*stale, "notes.txt"), b"{}")})
    (folder / "private notes.txt").write_text("not for others")
    save_extended(extended("linear"), folder, push_to_hub=NAME)
    pushed = server.files(NAME)
    assert not pushed.keys() & {*stale, "private notes.txt"}
    assert pushed["notes.txt"] == b"{}"
    assert json.loads(pushed["context_extension.json"])["method"] == "linear"
    assert describe(load_extended(NAME))["method"] == "linear"


def test_a_branch_is_made_and_visibility_is_what_was_asked_for(server: Hub, tmp_path: Path) -> None:
    save_extended(extended(), tmp_path / "longer", push_to_hub=NAME, private=True, revision="long")
    assert server.repos[NAME].private
    assert "config.json" not in server.files(NAME)
    assert describe(load_extended(NAME, revision="long"))["method"] == "yarn"
    with pytest.raises(InvalidRequestError, match="there already"):
        save_extended(extended(), tmp_path / "other", push_to_hub=NAME, private=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_the_card_of_a_branch_reads_that_branch(kind: str, server: Hub, tmp_path: Path, tiny_checkpoint: Path) -> None:
    model = patch_model(load_model_of(tiny_checkpoint), "yarn", 4)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    save_extended(model, tmp_path / "longer", make_tiny_tokenizer(), push_to_hub=NAME, revision="long")
    text = server.files(NAME, "long")["README.md"].decode()
    code = text.split("```python\n")[1].split("```")[0].replace("path/of/the/base/model", str(tiny_checkpoint))
    names: dict[str, Any] = {}
    exec(code, names)  # the main branch is empty
    assert describe(names["model"]) == describe(model)
    assert "`hf-posenc eval path/of/this/folder" in text
    assert ("Its weights are those of the base model" in text) == (kind == "whole")
    if kind == "whole":
        assert text.count(f"hf download {NAME} --revision long --local-dir longer\n") == 2
        assert "vllm serve longer --max-model-len 256" in text


def test_a_card_that_somebody_wrote_is_kept(server: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_extended(extended(), tmp_path / "longer", push_to_hub=NAME)
    assert is_own_card(folder / "README.md")
    first = (folder / "README.md").read_bytes()
    save_extended(extended("linear"), folder, push_to_hub=NAME)
    assert server.files(NAME)["README.md"] == (folder / "README.md").read_bytes() != first
    assert caplog.text.count("not written by hf_posenc") == 0

    server.repos[NAME].commit("main", {**server.files(NAME), "README.md": b"# Mine"})
    save_extended(extended(), folder, push_to_hub=NAME)
    assert server.files(NAME)["README.md"] == b"# Mine"
    assert f"{server.endpoint}/{NAME}:" in caplog.text

    (folder / "README.md").write_text("# Mine, here")
    save_extended(extended(), folder, push_to_hub="me/new")
    assert (folder / "README.md").read_text() == "# Mine, here"
    assert server.files("me/new")["README.md"] == b"# Mine, here"
    assert "hf_posenc" in caplog.text

    save_extended(extended(), folder, card="# Given", push_to_hub=NAME)
    assert (folder / "README.md").read_bytes() == server.files(NAME)["README.md"] == b"# Given"


def test_without_the_hub_there_is_a_card_only_if_it_is_wanted(tmp_path: Path) -> None:
    assert not (save_extended(extended(), tmp_path / "none") / "README.md").exists()
    text = (save_extended(extended(), tmp_path / "card", card=True) / "README.md").read_text()
    assert '.from_pretrained("path/of/this/folder"' in text
    assert str(tmp_path) not in text
    save_extended(extended("linear"), tmp_path / "card")  # of which the card would not be true
    assert "extended 4 times with `linear`" in (tmp_path / "card/README.md").read_text()
    (tmp_path / "card/README.md").write_text("# Mine")
    save_extended(extended(), tmp_path / "card")
    assert (tmp_path / "card/README.md").read_text() == "# Mine"
    with pytest.raises(InvalidRequestError, match="push_to_hub,"):
        save_extended(extended(), tmp_path / "other", private=True, token="hf_me")


def test_pushing_needs_a_name_and_not_a_switch(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="push_to_hub"):
        save_extended(extended(), tmp_path / "longer", push_to_hub=True)  # type: ignore[arg-type]
    assert not (tmp_path / "longer").exists()


def test_a_folder_that_cannot_be_written_makes_no_repository(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match="file' is"):
        save_extended(extended(), tmp_path / "file", push_to_hub=NAME)
    assert not server.repos


# ---- the commands ----


def test_patch_pushes_the_model_with_its_curve(
    server: Hub, tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_checkpoint / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: owner/tiny\n---\n# Tiny\n")
    file = results(tmp_path)
    argv = ["patch", str(tiny_checkpoint), str(tmp_path / "longer"), "--factor", "4", "--push-to-hub", NAME]
    assert main([*argv, "--results", str(file)]) == 0
    assert f"pushed: {server.endpoint}/{NAME}" in capsys.readouterr().out
    pushed = server.files(NAME)
    card = ModelCard(pushed["README.md"].decode())
    assert card.data.to_dict() == {
        "base_model": "owner/tiny",
        "library_name": "transformers",
        "license": "apache-2.0",
        "metrics": ["perplexity"],
        "pipeline_tag": "text-generation",
        "tags": ["hf_posenc", "context-extension", "long-context", "yarn"],
    }
    said = [
        "Context length 64 tokens as trained, extended 4 times with `yarn`",
        "Its weights are those of the base model.",
        "Verified when it was saved: 1 rotary module within",
        "| context length | 32 | 64 (original) | 256 |",
        f"vllm serve {NAME} --max-model-len 256",
        "vllm serve BASE_MODEL --max-model-len 256 --hf-overrides",  # the folder may have other weights than owner/tiny
        f"hf download {NAME} --local-dir longer",
        "llama-server -m longer.gguf -c 256 --rope-scaling yarn --rope-scale 4.0",
        "Beyond 256 tokens nothing is known of it.",
    ]
    assert [words for words in said if words not in card.text] == []
    for record in read_records(file):
        assert f"{record.perplexity:.2f} [{record.ci_low:.2f}, {record.ci_high:.2f}]" in card.text
    assert pushed["perplexity_truncated.png"].startswith(b"\x89PNG")
    assert "](perplexity_truncated.png)" in card.text
    assert pushed["results.jsonl"] == file.read_bytes()
    assert str(tmp_path) not in card.content
    code = card.text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # from the stand-in
    assert describe(names["model"]) == describe(load_extended(NAME))


def test_the_card_of_a_classifier_loads_it_with_its_head(tmp_path: Path) -> None:
    model = patch_model(LlamaForSequenceClassification(make_tiny_llama().config), "yarn", 4)
    folder = save_extended(model, tmp_path / "classifier", make_tiny_tokenizer(), card=True)
    loaded = load_as_the_card_says(folder)["model"]
    assert torch.equal(loaded.score.weight, model.score.weight)
    text = (folder / "README.md").read_text()
    assert "pipeline_tag" not in text
    assert "## Serving" not in text


@pytest.mark.parametrize(
    ("family", "method", "options", "otherwise"),
    [
        ("Llama", "dca", {}, "accelerate and servers alone build the model without its extension, and do not say so"),
        ("Llama", "alibi", {}, "Transformers alone fails"),
        ("StableLm", "yarn", {"temperature": "logits"}, "Transformers alone applies the temperature to a part"),
        ("Llama", "yarn", {}, None),
    ],
)
def test_the_first_line_of_a_card_says_how_a_model_must_be_loaded(
    family: str, method: str, options: dict[str, Any], otherwise: str | None, tmp_path: Path
) -> None:
    model = patch_model(make_model(family), method, 4, **options)
    folder = save_extended(model, tmp_path / "longer", make_tiny_tokenizer(), card=True)
    title, first = [line for line in ModelCard.load(folder / "README.md").text.splitlines() if line][1:3]
    assert title.startswith("# ")
    if otherwise is None:
        assert first.startswith("Context length 64 tokens as trained")
        return
    assert first.startswith("**Load it with `hf_posenc.load_extended`** (`pip install hf_posenc`).")
    assert otherwise in first
    assert verify_model(load_as_the_card_says(folder)["model"], folder).extension == describe(model)
    if method == "dca":  # the call that the line names
        [call] = re.findall(r"`(hf_posenc\.verify_model\(.*?\))`", first)
        names = {"hf_posenc": hf_posenc, "model": AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))}
        with pytest.raises(RotaryMismatchError):
            exec(call.replace("path/of/this/folder", str(folder)), names)


def test_servers_that_cannot_run_a_rule_are_named_with_the_reason(tmp_path: Path) -> None:
    text = (save_extended(extended("dca"), tmp_path / "staged", card=True) / "README.md").read_text()
    assert "vLLM: not possible. vLLM cannot run dca: the rule depends on the position of each query" in text
    assert "llama.cpp: not possible. llama.cpp cannot run dca" in text
    assert "hf-posenc export path/of/this/folder --to vllm --as yarn" in text


def test_fit_pushes_the_rule_with_its_measurements(server: Hub, tmp_path: Path, run_base: Path) -> None:
    argv = ["fit", str(run_base), "--documents", str(run_base / "text.jsonl"), "--context-length", "128"]
    argv += ["--output", str(tmp_path / "longer"), "--steps", "2", "--teacher", "rerope", "--held-out-numbers", "0"]
    argv += ["--compare", "none", "yarn", "--hide-progress", "--device", "cpu"]
    assert main([*argv, "--push-to-hub", NAME, "--dry-run"]) == 0
    assert server.repos == {}
    assert main([*argv, "--push-to-hub", NAME]) == 0
    pushed = server.files(NAME)
    records = read_records(tmp_path / "longer/results.jsonl")
    assert {record.method for record in records} == {"fitted", "none", "yarn"}
    text = pushed["README.md"].decode()
    said = ["- teacher: rerope", "- steps: 2", "- documents: the file `text.jsonl`"]
    assert [words for words in said if words not in text] == []
    longest = next(record for record in records if record.method == "fitted" and record.context_length == 128)
    assert f"{longest.perplexity:.2f} [{longest.ci_low:.2f}, {longest.ci_high:.2f}]" in text
    assert [name for name in pushed if name.endswith(".png")] == ["perplexity_truncated.png"]
    assert pushed["results.jsonl"] == (tmp_path / "longer/results.jsonl").read_bytes()
    assert describe(load_extended(NAME))["method"] == "fitted"


def test_results_of_another_rule_are_refused_before_anything_is_written(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = results(tmp_path), tmp_path / "longer"
    argv = ["patch", str(tiny_checkpoint), str(output), "--factor", "4", "--results"]
    for flags in (["--method", "linear"], ["--option", "beta_fast=16"]):
        assert main([*argv, str(file), *flags]) == 2
        assert "x4 zero-shot," in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "gone.jsonl")]) == 2
    assert "--results:" in capsys.readouterr().err
    file.write_text("")
    assert main([*argv, str(file)]) == 2
    assert "no perplexity" in capsys.readouterr().err
    assert not output.exists()
    assert not (tmp_path / "longer.partial").exists()


@pytest.mark.parametrize("command", ["patch", "fit"])
def test_no_repository_is_made_for_a_model_that_is_not_there(
    server: Hub, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 60)
    gone, there = str(tmp_path / "gone" / "model"), str(tmp_path / "longer")
    fit = ["fit", gone, "--documents", str(text), "--context-length", "256", "--output", there]
    argv = ["patch", gone, there] if command == "patch" else fit
    assert main([*argv, "--push-to-hub", NAME]) == 2
    assert "or folder" in capsys.readouterr().err
    assert NAME not in server.repos


def test_flags_about_pushing_need_the_name(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["patch", str(tiny_checkpoint), str(tmp_path / "longer"), "--hub-private-repo", "true"]
    assert main(argv) == 2
    assert "--hub-private-repo" in capsys.readouterr().err


# ---- what is said where it fails ----


def nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, hub, str(tmp_path / "nobody"), None)


def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def nobody_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody(hub, monkeypatch, tmp_path)  # who is not told to log in first
    offline(hub, monkeypatch, tmp_path)


def no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = Hub()
    closed.endpoint = "http://127.0.0.1:9"
    use_hub(monkeypatch, closed, str(tmp_path / "hf"), "hf_me")


def unknown_token(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, hub, str(tmp_path / "hf"), "hf_forged")


def down(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.down = True


def as_it_is(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pass


Case = Callable[[Hub, pytest.MonkeyPatch, Path], None]
REFUSED: list[tuple[Case, str, type[Exception], str]] = [
    (as_it_is, "me/lo nger", InvalidRequestError, "cannot be pushed to: .*Give OWNER/NAME"),
    (as_it_is, "a/b/c", InvalidRequestError, "cannot be pushed to: .*Give OWNER/NAME"),
    (as_it_is, "other/longer", HubAccessError, r"the token may not do that \(403: You don't have the rights"),
    (as_it_is, "other/there", HubAccessError, r"the token may not do that \(403: Your token doesn't have the right"),
    (nobody, NAME, HubAccessError, "there is no token for the Hugging Face Hub here. Log in with `hf auth login`"),
    (unknown_token, NAME, HubAccessError, r"the Hub does not accept the token \(401: Invalid credentials"),
    (offline, NAME, HubUnreachableError, r"offline mode is set \(HF_HUB_OFFLINE=1\)"),
    (nobody_offline, NAME, HubUnreachableError, r"offline mode is set \(HF_HUB_OFFLINE=1\)"),
    (no_network, NAME, HubUnreachableError, "http://127.0.0.1:9 cannot be reached"),
    (down, NAME, HubUnreachableError, r"the Hub cannot serve it now \(503: The Hub is being repaired\)"),
]


@pytest.mark.parametrize(("case", "name", "kind", "said"), REFUSED, ids=[f"{c.__name__} {n}" for c, n, *_ in REFUSED])
def test_a_push_that_must_fail_fails_before_anything_is_written(
    case: Case,
    name: str,
    kind: type[Exception],
    said: str,
    server: Hub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.create_repo(server.accounts["hf_other"], {"name": "there"})
    case(server, monkeypatch, tmp_path)
    with pytest.raises(kind, match=said) as caught:
        save_extended(extended(), tmp_path / "longer", push_to_hub=name)
    assert getattr(caught.value, "repo_id", name) == name
    # The command says it before a model is loaded: this one cannot be.
    (tiny_checkpoint / "model.safetensors").write_bytes(b"damaged")
    text = tiny_checkpoint / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 60)
    there, documents = str(tmp_path / "longer"), ["--documents", str(text)]
    for command in (
        ["patch", str(tiny_checkpoint), there],
        ["fit", str(tiny_checkpoint), *documents, "--context-length", "256", "--output", there],
        ["finetune", str(tiny_checkpoint), *documents, "--factor", "4", "--output-dir", there],
    ):
        assert main([*command, "--push-to-hub", name]) == 2
        assert str(caught.value) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["tiny-llama"], ["hf", "tiny-llama"])


def test_an_upload_that_breaks_off_leaves_the_model_here_and_says_how_to_go_on(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        server.down = True  # and with it the file that is uploaded next
        return 200, {}, {"transfer": "basic", "objects": [upload_of(args[0])]}

    def upload_of(asked: dict[str, Any]) -> dict[str, Any]:
        one = asked["objects"][0]
        return {**one, "actions": {"upload": {"href": f"{server.endpoint}/lfs/{one['oid']}", "header": {}}}}

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    folder = tmp_path / "the longer one"
    folder.mkdir()
    (folder / "private notes.txt").write_text("not for others")
    with monkeypatch.context() as patch:
        patch.setattr(server, "lfs_batch", refuse)
        with pytest.raises(HubUnreachableError, match=r"503.*'.*';") as caught:
            save_extended(extended(), folder, push_to_hub=NAME, revision="long")
    assert describe(load_extended(folder))["method"] == "yarn"

    server.down = False
    server.repos[NAME].commit("long", {"adapter_config.json": b"{}", **server.files(NAME)})
    words = shlex.split(str(caught.value).split("to upload it: ")[1])
    variables = {**os.environ, **environment(server, str(tmp_path / "uploader"), "hf_me")}
    hf = Path(sys.executable).with_name("hf")
    subprocess.run([hf, *words[1:]], env=variables, check=True, cwd=tmp_path, capture_output=True)
    written = {path.name for path in folder.iterdir()} - {"private notes.txt"}
    assert server.files(NAME, "long").keys() == {".gitattributes", *written}
    assert "config.json" not in server.files(NAME)


def plain_repo(hub: Hub) -> None:
    hub.create_repo(hub.accounts["hf_me"], {"name": "plain"})
    hub.create_repo(hub.accounts["hf_other"], {"name": "secret", "visibility": "private"})


UNREADABLE: list[tuple[Case, str, dict[str, Any], type[Exception], str]] = [
    (as_it_is, "me/plain", {}, MissingFileError, "has no context_extension.json: it was not written by save_extended"),
    (as_it_is, "me/nothing", {}, HubAccessError, "the Hub has no repository of this name, or it is private"),
    (as_it_is, "other/secret", {}, HubAccessError, "or it is private. Check the name. Log in with `hf auth login`"),
    (nobody, "other/secret", {}, HubAccessError, "or it is private"),
    (unknown_token, "me/plain", {}, HubAccessError, r"does not accept the token \(401"),
    (as_it_is, "me/plain", {"revision": "gone"}, InvalidRequestError, "it has no such revision"),
    (offline, "me/plain", {}, HubUnreachableError, "'me/plain' cannot be read: offline mode is set"),
    (no_network, "me/plain", {}, HubUnreachableError, "127.0.0.1:9 cannot be reached"),
    (as_it_is, "./longer", {}, MissingFileError, "there is no folder './longer'"),
]


@pytest.mark.parametrize(
    ("case", "name", "chosen", "kind", "said"), UNREADABLE, ids=[f"{c.__name__} {n}" for c, n, *_ in UNREADABLE]
)
def test_why_a_name_cannot_be_loaded(
    case: Case,
    name: str,
    chosen: dict[str, Any],
    kind: type[Exception],
    said: str,
    server: Hub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plain_repo(server)
    case(server, monkeypatch, tmp_path)
    with pytest.raises(kind, match=said):
        load_extended(name, **chosen)


def test_a_private_model_is_loaded_by_a_token_that_is_given(
    server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nobody(server, monkeypatch, tmp_path)
    save_extended(extended("dca"), tmp_path / "longer", push_to_hub="longer", private=True, token="hf_me")
    with pytest.raises(HubAccessError):
        load_extended(NAME)
    assert describe(load_extended(NAME, token="hf_me"))["method"] == "dca"


def test_what_is_in_the_cache_is_loaded_offline(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_extended(extended("dca"), tmp_path / "longer", push_to_hub=NAME)
    below = {f"below/{name}": content for name, content in server.files(NAME).items()}
    server.create_repo(server.accounts["hf_me"], {"name": "several"})
    server.repos["me/several"].commit("main", below)
    load_extended(NAME)
    load_extended("me/several", subfolder="below")
    offline(server, monkeypatch, tmp_path)
    assert describe(load_extended(NAME))["method"] == "dca"
    assert describe(load_extended("me/several", subfolder="below"))["method"] == "dca"
    verify_model(load_extended(NAME), "me/several", subfolder="below")


def test_a_card_that_cannot_be_written_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **chosen: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_posenc.publishing.saving.write_card", full)
    with pytest.raises(OSError, match="space left"):
        save_extended(extended(), tmp_path / "longer", card=True)
    assert list(tmp_path.iterdir()) == []


def test_records_of_a_rule_with_lists_are_known_when_read_from_a_file(tmp_path: Path) -> None:
    method, options = RULES["lists"]
    records = read_records(results(tmp_path, method, **options))
    folder = save_extended(extended(method, **options), tmp_path / "longer", records=records)
    assert "Beyond 256 tokens nothing is known of it." in (folder / "README.md").read_text()
    options = {**options, "long_factor": [1.0 + i / 4 for i in range(8)]}
    with pytest.raises(InvalidRequestError, match="this model"):
        save_extended(extended(method, **options), tmp_path / "other", records=records)


def test_a_card_has_the_cost_of_short_texts_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands name the folder by a placeholder, and results were looked for there, below the working directory."""
    monkeypatch.chdir(tmp_path)
    records = read_records(results(tmp_path))
    folder = save_extended(extended(), tmp_path / "measured", records=records)
    cost = re.search(r"with the rule too: (perplexity .* at 64 tokens) ", export_command(folder, "vllm"))
    assert cost is not None
    assert cost[1] in (folder / "README.md").read_text()
    shutil.copytree(folder, tmp_path / "path/of/this/folder")
    text = (save_extended(extended(), tmp_path / "unmeasured", card=True) / "README.md").read_text()
    assert "with the rule too: hf-posenc eval --method auto measures what that costs" in text


def test_records_of_other_models_are_refused_in_python(tmp_path: Path) -> None:
    records: list[Record] = read_records(results(tmp_path))
    with pytest.raises(InvalidRequestError, match="this model"):
        save_extended(extended("linear"), tmp_path / "longer", records=records)
    with pytest.raises(InvalidRequestError, match=r"x4 zero-shot,.*1,000"):
        save_extended(extended(), tmp_path / "longer", records=records, tokens_trained=1000)
    longer = patch_model(make_tiny_llama(max_position_embeddings=128), "yarn", 4)
    with pytest.raises(InvalidRequestError, match=r".yarn x4: 128 -> 512"):
        save_extended(longer, tmp_path / "longer", records=records)
    assert not (tmp_path / "longer").exists()
    save_extended(extended(), tmp_path / "longer", records=records)
    assert read_records(tmp_path / "longer/results.jsonl") == records
    assert (tmp_path / "longer/perplexity_truncated.png").is_file()
