"""Model cards: metadata as the Hub takes it, numbers as they were measured, and code that loads the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import ModelCard, metadata_save

from hf_posenc.checkpoint.manifest import tokens_trained
from hf_posenc.data.reading import DocumentStream
from hf_posenc.evaluation import Record, perplexity, read_records
from hf_posenc.methods.registry import method_names
from hf_posenc.patching.api import describe, is_patched, patch_model, unpatch_model, unpatched, verify_model
from hf_posenc.publishing.provenance import BaseModel, document_source, find_base_model, source_settings
from hf_posenc.training import finetune, training_run
from tiny_llama import make_tiny_llama
from tiny_runs import SEQ, config, killed_at, load, load_as_the_card_says, logits_of

WITH_PARAMETERS = method_names("has_parameters")

HUB_ID = "owner/tiny-64"
OTHER = {"license": "other", "license_name": "tiny-licence", "license_link": "LICENSE.md", "language": ["en", "fr"]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the Hub, the only one that is looked into."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub: Path, name: str, card: dict[str, Any] | None) -> Path:
    """Return the folder of a model in the cache, as a download leaves it, with a card of this metadata."""
    spot = hub / f"models--{name.replace('/', '--')}"
    snapshot = spot / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (spot / "refs").mkdir()
    (spot / "refs/main").write_text("c0ffee")
    (snapshot / "config.json").write_text("{}")
    if card is not None:
        metadata_save(snapshot / "README.md", card)
    return snapshot


def folder(spot: Path, *, manifest: str = "", config: str = "", card: dict[str, Any] | None = None) -> str:
    """Return the path of a model's folder whose files name these models as its base."""
    spot.mkdir()
    (spot / "config.json").write_text(json.dumps({"_name_or_path": config}))
    if manifest:
        (spot / "context_extension.json").write_text(json.dumps({"base_model": manifest}))
    if card is not None:
        metadata_save(spot / "README.md", card)
    return str(spot)


def test_a_name_on_the_hub_is_the_base_and_its_licence_comes_whole(hub: Path) -> None:
    cached(hub, HUB_ID, {**OTHER, "pipeline_tag": "text-generation", "tags": ["other"]})
    link = f"https://huggingface.co/{HUB_ID}/blob/main/LICENSE.md"
    facts = {**OTHER, "license_link": link, "pipeline_tag": "text-generation"}
    assert find_base_model(HUB_ID) == BaseModel(HUB_ID, HUB_ID, is_exact=True, card=facts)
    assert find_base_model("owner/not-loaded") == BaseModel("owner/not-loaded", "owner/not-loaded", is_exact=True)
    snapshot = cached(hub, "gpt2", {"license": "mit"})
    expected = BaseModel("gpt2", "gpt2", is_exact=True, card={"license": "mit"})
    assert find_base_model("gpt2") == find_base_model(str(snapshot)) == expected
    assert find_base_model("gpt3") == BaseModel("gpt3")  # a word that nothing says to be a name on the Hub


def test_a_path_that_is_gone_is_no_name_on_the_hub(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert find_base_model("outputs/run") == BaseModel("run")
    cached(hub, "outputs/run", {"license": "mit"})  # loaded from the Hub, whatever folder is here
    assert find_base_model("outputs/run").hub_id == "outputs/run"


def test_a_folder_is_read_and_what_it_names(hub: Path, tmp_path: Path) -> None:
    cached(hub, HUB_ID, {"license": "apache-2.0", "language": "en"})
    known = {"license": "apache-2.0", "language": "en"}
    by_manifest = folder(tmp_path / "one", manifest=HUB_ID, config="somewhere/else")
    by_config = folder(tmp_path / "two", config=HUB_ID, manifest="/a/path/that/is/gone")
    by_card = folder(tmp_path / "three", card={"base_model": [HUB_ID]})
    for path, name in ((by_manifest, "one"), (by_config, "two"), (by_card, "three")):
        assert find_base_model(path) == BaseModel(name, HUB_ID, is_exact=False, card=known)
    further = folder(tmp_path / "four", manifest=by_card, card={"license": "other", "license_link": "LICENSE"})
    # The nearest licence, whole: that of the further one has another name, and a file here has no link.
    assert find_base_model(further) == BaseModel("four", HUB_ID, card={"license": "other", "language": "en"})
    merged = folder(tmp_path / "five", card={"base_model": ["a/b", "c/d"]})
    assert find_base_model(merged) == BaseModel("five")


def test_nothing_is_taken_from_what_cannot_be_read(hub: Path, tmp_path: Path) -> None:
    assert find_base_model("") == BaseModel()
    assert find_base_model(str(tmp_path / "gone")) == BaseModel("gone")
    circle = folder(tmp_path / "circle", manifest=str(tmp_path / "circle"))
    assert find_base_model(circle) == BaseModel("circle")
    for number, text in enumerate(("---\nlicense: [\n---\n", "---\n- mit\n---\n", "no metadata")):
        spot = tmp_path / f"damaged{number}"
        (Path(folder(spot)) / "README.md").write_text(text)
        (spot / "context_extension.json").write_text("{")
        assert find_base_model(str(spot)) == BaseModel(spot.name)
    gguf = tmp_path / "circle" / "model-f16.gguf"
    gguf.touch()
    assert find_base_model(str(gguf)).name == "model-f16"


@pytest.mark.parametrize(
    ("chosen", "words", "hub_id"),
    [
        ({}, "texts given in Python, which have no name", None),
        ({"documents": "-"}, "a text from standard input", None),
        ({"documents": "novel:emma"}, "the novel `emma`, which is part of hf_posenc", None),
        ({"documents": "HERE/my book.txt"}, "the file `my book.txt`", None),
        ({"documents": "HERE"}, "the folder `texts`", None),
        (
            {"documents": "owner/texts", "split": "train[:9]", "config_name": "en"},
            "the dataset [`owner/texts`](https://huggingface.co/datasets/owner/texts), configuration `en`, split "
            "`train[:9]`",
            "owner/texts",
        ),
        ({"documents": "pg19"}, "the dataset [`pg19`](https://huggingface.co/datasets/pg19)", "pg19"),
    ],
)
def test_documents_are_named_without_a_path(
    chosen: dict[str, str], words: str, hub_id: str | None, tmp_path: Path
) -> None:
    here = tmp_path / "texts"
    here.mkdir()
    (here / "my book.txt").touch()
    chosen = {name: value.replace("HERE", str(here)) for name, value in chosen.items()}
    found = document_source(chosen)
    assert (found.words, found.hub_id) == (words, hub_id)


def table_of(card: ModelCard) -> dict[str, list[tuple[float, ...]]]:
    """Return the rows of the card's table of perplexities: by label, (perplexity, low, high) at each length."""
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if "[" in line and line.startswith("|")]
    return {label: [tuple(map(float, re.findall(r"[\d.]+", cell))) for cell in cells] for label, *cells in rows}


def rounded(records: list[Record]) -> list[tuple[float, ...]]:
    return [
        tuple(round(value, 2) for value in (record.perplexity, record.ci_low, record.ci_high)) for record in records
    ]


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"method": "yarn"},
    "adapter": {"method": "linear", "lora": True},
    "staged": {"method": "dynamic_yarn"},
    "encoding": {"method": "t5_bias", "factor": 1.0, "seq_len": 64, "eval_lengths": [32, 64]},
}


def test_a_stream_says_all_that_reads_it_again() -> None:
    """run.toml did not have the template, and another run by it read other columns."""
    chosen = {"text_field": None, "split": "test", "config_name": "b", "template": "{a} {b}"}
    assert source_settings(DocumentStream("rows.csv", **chosen)) == {"documents": "rows.csv", **chosen}


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_is_what_the_hub_takes_and_its_code_loads_the_model(
    kind: str, hub: Path, base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    snapshot = cached(hub, HUB_ID, OTHER)
    load(base_folder).save_pretrained(snapshot)
    run = config(tmp_path / "run", token_budget=4 * SEQ, **KINDS[kind])
    source = {"documents": "owner/texts", "split": "train"}
    base = load(HUB_ID)  # type: ignore[arg-type]  # by its name on the Hub
    result = finetune(base, tokenizer, documents, run, source=source)

    card = ModelCard.load(tmp_path / "run/README.md")
    data = card.data.to_dict()
    index = data.pop("model-index")
    is_adapter = kind == "adapter"
    assert data == {
        **OTHER,
        "license_link": f"https://huggingface.co/{HUB_ID}/blob/main/LICENSE.md",
        "base_model": HUB_ID,
        "base_model_relation": "adapter" if is_adapter else "finetune",
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["owner/texts"],
        "metrics": ["perplexity"],
        "tags": ["hf_posenc", "context-extension", "long-context", run.method, *(["lora"] if is_adapter else [])],
    }
    records = read_records(tmp_path / "run/results.jsonl")
    count = len(records) // 3
    assert [record.method for record in records] == ["none"] * count + [run.method] * 2 * count
    parts = [records[:count], records[count : 2 * count], records[2 * count :]]
    assert list(table_of(card).values()) == [rounded(part) for part in parts]
    assert len({row[0] for row in map(rounded, parts)}) == 3 or kind == "staged"  # which leaves short texts alone
    [results] = index[0]["results"]
    assert results["dataset"]["type"] == "owner/texts"
    assert [metric["value"] for metric in results["metrics"]] == [round(one.perplexity, 4) for one in parts[2]]

    for hidden in (str(tmp_path), "snapshots"):
        assert hidden not in card.content
    assert ("**Load it with `hf_posenc.load_extended`**" in card.text.split("Context length")[0]) == (kind != "whole")
    loaded = load_as_the_card_says(tmp_path / "run")
    assert describe(loaded["model"]) == describe(result.model)
    length = records[-1].context_length
    torch.testing.assert_close(logits_of(loaded["model"], length), logits_of(result.model, length), rtol=0, atol=1e-5)
    assert loaded["tokenizer"].model_max_length == describe(result.model)["context_length"]
    if is_adapter:  # merged by the card's code too
        assert tokens_trained(tmp_path / "run-merged") == 4 * SEQ


@pytest.mark.parametrize(
    "chosen", [{"method": "yarn", "lora": True}, {"method": "t5_bias", "factor": 1.0, "seq_len": 64}]
)
def test_the_unextended_row_is_the_published_model_and_training_does_not_depend_on_it(
    chosen: dict[str, Any],
    base_folder: Path,
    tmp_path: Path,
    tokenizer: Any,
    documents: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {"token_budget": 4 * SEQ, "eval_lengths": [32, 64], **chosen}  # adapters and parameters that are drawn
    measured = finetune(load(base_folder), tokenizer, documents, config(tmp_path / "measured", **chosen))
    requested: dict[str, Any] = {"tokenizer": tokenizer, "cut": True, "max_documents": 2}
    alone = perplexity(load(base_folder), documents[-1:], [32, 64], **requested)
    assert [(record.nll_sum, record.run_key) for record in measured.records[:2]] == [
        (one.nll_sum, one.run_key) for one in alone
    ]
    with monkeypatch.context() as patch:
        patch.setattr(training_run.Run, "_measure_unextended", lambda *args: [])
        without = finetune(load(base_folder), tokenizer, documents, config(tmp_path / "not", **chosen))
    assert [record.nll_sum for record in without.records] == [record.nll_sum for record in measured.records[2:]]
    torch.testing.assert_close(logits_of(without.model, 64), logits_of(measured.model, 64), rtol=0, atol=0)


def test_without_measurements_the_card_says_so(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    run = config(tmp_path / "run", token_budget=2 * SEQ, eval_documents=0)
    assert finetune(load(base_folder), tokenizer, documents, run).records == []
    card = ModelCard.load(tmp_path / "run/README.md")
    assert "Not measured: no held-out text is long enough, or eval_documents was 0." in card.text
    assert "metrics" not in card.data.to_dict()


def test_a_base_without_a_name_and_texts_without_one(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor], hub: Path
) -> None:
    (tmp_path / "my texts.jsonl").write_text("\n".join(json.dumps({"text": tokenizer.decode(d)}) for d in documents))
    stream = DocumentStream(tmp_path / "my texts.jsonl")
    run = config(tmp_path / "run", token_budget=4 * SEQ, eval_lengths=[32, 4096])
    finetune(load(base_folder), tokenizer, stream, run)
    card = ModelCard.load(tmp_path / "run/README.md")
    data = card.data.to_dict()
    assert data.keys() == {"library_name", "metrics", "pipeline_tag", "tags"}
    assert "# base, extended to 128 tokens" in card.text
    assert "Base model: `base`. Its files name no model on the Hub" in card.text
    assert "- documents: the file `my texts.jsonl`" in card.text
    assert "the last part of the file `my texts.jsonl`, held out from training" in card.text
    assert "No held-out text reaches 4096 tokens" in card.text
    assert "Not known: no card of the base model was there" in card.text
    assert str(tmp_path) not in card.content


def test_a_resumed_run_gives_the_same_card(
    base_folder: Path,
    tmp_path: Path,
    tokenizer: Any,
    documents: list[torch.Tensor],
) -> None:
    def run(spot: str, **changes: Any) -> None:
        chosen = config(tmp_path / spot / "run", token_budget=6 * 2 * SEQ, save_steps=2, **changes)
        finetune(load(base_folder), tokenizer, documents, chosen)

    run("straight")
    with killed_at(3):
        run("killed")
    run("killed", resume_from_checkpoint=True)
    cards = [(tmp_path / spot / "run/README.md").read_text() for spot in ("straight", "killed")]
    assert cards[0] == cards[1]
    assert len(read_records(tmp_path / "killed/run/results.jsonl")) == 9  # nothing was measured twice


def test_a_rule_that_is_replaced_is_named_beside_the_base_model(
    tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    rule = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {"rope_theta": 10000.0, **rule, "original_max_position_embeddings": 32}
    run = config(tmp_path / "run", token_budget=2 * SEQ, factor=4.0, on_scaled="replace", eval_lengths=[64])
    finetune(make_tiny_llama(rope_parameters=scaled), tokenizer, documents, run)
    labels = list(table_of(ModelCard.load(tmp_path / "run/README.md")))
    assert labels[0] == "the base model, before this run (`llama3`, 2 times)"
    assert labels[1] == "extended to 128 tokens, not yet trained"


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "dca", *sorted(WITH_PARAMETERS)])
def test_an_extension_that_is_taken_out_for_a_while_comes_back_as_it_was(method: str, tokenizer: Any) -> None:
    model = make_tiny_llama()
    plain = logits_of(model, 64)
    limit = tokenizer.model_max_length
    patch_model(model, method, 1 if method in WITH_PARAMETERS else 2, tokenizer=tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "positional_encoding" in name:  # as if it had learned something
                parameter += torch.randn_like(parameter)
    before, described = logits_of(model, 64), describe(model)
    with unpatched(model):
        assert not is_patched(model)
        assert tokenizer.model_max_length == limit
        torch.testing.assert_close(logits_of(model, 64), plain, rtol=0, atol=0)
    assert describe(model) == described
    assert tokenizer.model_max_length == described["context_length"]
    verify_model(model)
    torch.testing.assert_close(logits_of(model, 64), before, rtol=0, atol=0)
    unpatch_model(model)
    torch.testing.assert_close(logits_of(model, 64), plain, rtol=0, atol=0)
