"""llama.cpp's server on files that ``hf-posenc export --to gguf`` writes, against the live model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from adapted_models import fit_adapted
from gguf_files import write_gguf
from hf_posenc import patch_model, save_extended
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.exports import export_gguf
from hf_posenc.serving import check_server
from llama_server import SCALING, ask, next_token, serving
from tiny_models import STATIC_METHODS, load_tiny, method_options

pytest.importorskip("xllamacpp", reason="llama.cpp's server is one wheel: pip install 'hf_posenc[dev]'")

ORIGINAL, TARGET = 256, 1024
ROWS = (64, 250, 400, 640)  # tokens read; the last two past the original length


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def ids(tokenizer) -> list[int]:
    return tokenizer(load_novel("persuasion")[:4000], verbose=False)["input_ids"][: ROWS[-1]]


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "base.gguf", load_tiny(), tokenizer)


@pytest.fixture(scope="module")
def unscaled(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the base model at the target length, the rule left out."""
    model = load_tiny()
    model.config.max_position_embeddings = TARGET
    with serving(write_gguf(tmp_path_factory.mktemp("gguf") / "unscaled.gguf", model, tokenizer), TARGET) as address:
        yield address


def extended(folder: Path, tokenizer, key: str) -> tuple[Path, PreTrainedModel]:
    model = load_tiny()
    method, options = method_options(key, model)
    patch_model(model, method, TARGET / ORIGINAL, **options)
    save_extended(model, folder, tokenizer)
    return folder, model


@torch.no_grad()
def differences(model: PreTrainedModel, ids: list[int], address: str, rows: Sequence[int]) -> torch.Tensor:
    """Return the mean absolute difference of log-probabilities at each row."""
    live = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    means = []
    for row in rows:
        served = next_token(address, ids[:row])
        own = live[row - 1, list(served)]
        means.append((own - torch.tensor(list(served.values()))).abs().mean())
    return torch.stack(means)


# What a file can say of a rule: a factor, YaRN's numbers, those and divisors, divisors alone, two lists, a base.
# The others are slow: they are in a file what one of these is, with other numbers.
EACH_KIND = ("linear", "yarn", "yarn-options", "llama3", "longrope", "abf")


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[] if key in EACH_KIND else [pytest.mark.slow]) for key in STATIC_METHODS]
)
def test_llama_server_runs_every_static_method(
    key: str, ids: list[int], base: Path, unscaled: str, tokenizer, tmp_path: Path
) -> None:
    folder, model = extended(tmp_path / "model", tokenizer, key)
    export_gguf(folder, tmp_path / "rule.gguf", base=base)
    # Two lists: Transformers takes the one for short texts by the length of the whole text, which is long here.
    with serving(tmp_path / "rule.gguf", TARGET) as address:
        assert differences(model, ids, address, ROWS).max() < 1e-4
    assert differences(model, ids, unscaled, ROWS).min() > 0.1  # the same comparison with the rule left out


@torch.no_grad()
def test_llama_server_runs_a_model_whose_projections_were_changed(ids: list[int], tokenizer, tmp_path: Path) -> None:
    result, wrapped = fit_adapted(tokenizer, TARGET)
    model = wrapped.merge_and_unload().eval()
    save_extended(model, tmp_path / "model", tokenizer, fitted_on=result.facts)
    converted = write_gguf(tmp_path / "converted.gguf", model, tokenizer)
    export_gguf(tmp_path / "model", tmp_path / "rule.gguf", base=converted)
    with serving(tmp_path / "rule.gguf", TARGET) as address:
        assert differences(model, ids, address, ROWS).max() < 1e-4
        other = patch_model(load_tiny(), result.method, context_length=TARGET, **result.options).eval()
        assert differences(other, ids, address, ROWS).max() > 1e-3  # the same rule, the weights of the base


def test_two_servers_of_one_file_read_short_and_long_requests_by_two_rules(
    ids: list[int], tokenizer, tmp_path: Path
) -> None:
    _, model = extended(tmp_path / "model", tokenizer, "yarn")
    unextended = load_tiny()
    unextended.config.max_position_embeddings = TARGET  # which --override-kv says to llama-server
    file = write_gguf(tmp_path / "base.gguf", unextended, tokenizer)
    yarn = {SCALING: "LLAMA_ROPE_SCALING_TYPE_YARN", "rope_freq_scale": ORIGINAL / TARGET, "yarn_orig_ctx": ORIGINAL}
    short, long = [row for row in ROWS if row <= ORIGINAL], [row for row in ROWS if row > ORIGINAL]
    with serving(file, ORIGINAL) as of_short, serving(file, TARGET, yarn) as of_long:
        assert differences(unextended, ids, of_short, short).max() < 1e-4
        assert differences(model, ids, of_long, long).max() < 1e-4
        assert differences(unextended, ids, of_long, short).min() > 0.1  # the wrong one is told


def test_llama_server_splits_texts_as_the_folder_does(ids: list[int], unscaled: str, tokenizer) -> None:
    text = load_novel("persuasion")[:2000]
    tokens = ask(unscaled, "/tokenize", {"content": text, "add_special": False})["tokens"]
    assert tokens == tokenizer(text)["input_ids"]


def test_verify_tells_the_rule_of_a_server(
    base: Path, unscaled: str, tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = extended(tmp_path / "model", tokenizer, "yarn")
    export_gguf(folder, tmp_path / "rule.gguf", base=base)
    with serving(tmp_path / "rule.gguf", TARGET) as address:
        assert (
            main(["export", str(folder), "--verify", address, "--server-dtype", "float32", "--dtype", "float32"]) == 0
        )
        printed = capsys.readouterr().out
        linear, _ = extended(tmp_path / "linear", tokenizer, "linear")
        check = check_server(linear, address, dtype="float32")
    assert "agrees: the server runs yarn x4; the mean difference from yarn x4 is " in printed
    assert "at most 0.001 is taken for rounding" in printed
    assert "probe: 512 tokens of a novel, 240 log-probabilities, 120 of them past the original length of 256" in printed
    assert "tokenizer" not in printed
    assert (check.verdict, check.rule) == ("another", "yarn x4")
    assert check.differences["yarn x4"].mean < 1e-4
    assert check.differences["linear x4"].mean > 0.1

    assert main(["export", str(folder), "--verify", f"{unscaled}/v1", "--dtype", "float32"]) == 1
    printed = capsys.readouterr().out
    assert "unscaled: the server runs the unscaled model" in printed
    assert "1.00 ± 0.00 of the way" in printed


@pytest.mark.slow
def test_verify_tells_a_lost_attention_factor_and_a_rule_that_it_does_not_know(
    base: Path, tokenizer, tmp_path: Path
) -> None:
    folder, _ = extended(tmp_path / "model", tokenizer, "yarn")
    for number, (attention_factor, verdict, rule) in enumerate(
        ((1.0, "another", "yarn without its attention factor"), (1.3, "differs", None))
    ):
        other = patch_model(load_tiny(), "yarn", 4, attention_factor=attention_factor)
        save_extended(other, tmp_path / f"other{number}", tokenizer)
        export_gguf(tmp_path / f"other{number}", tmp_path / f"{number}.gguf", base=base)
        with serving(tmp_path / f"{number}.gguf", TARGET) as address:
            check = check_server(folder, address, dtype="float32")
        assert (check.verdict, check.rule) == (verdict, rule)
