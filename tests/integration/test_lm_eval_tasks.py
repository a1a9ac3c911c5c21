"""lm-eval runs our retrieval tasks: an oracle scores 1, a random model 0. Slow, as ``test_lm_eval``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel
from hf_posenc.cli.main import main
from lm_eval_packages import find_lm_eval
from oracles import Oracle
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(rouge_score|sacrebleu|word2number|nltk).*"),
]
ASCII = "".join(one for one in load_novel(HELD_OUT_NOVEL)[2000:60_000] if one.isascii())
TASKS = ("kv", "babilong_qa1", "niah_multivalue")
LENGTHS = [1600, 2000]


@pytest.fixture(scope="module", autouse=True)
def lm_eval() -> Path:
    return find_lm_eval()


@pytest.fixture(autouse=True)
def novel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of one token a character knows ASCII only, and six novels of such tokens take long."""
    monkeypatch.setattr("hf_posenc.retrieving.haystack.load_novel", lambda name: ASCII)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_llama(max_position_embeddings=max(LENGTHS)).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def run(lm: Any, folder: Path, tasks: tuple[str, ...], **metadata: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from hf_posenc.retrieving.lm_eval_tasks import write_task_files

    folder.mkdir()
    write_task_files([f"hf_posenc_{name}" for name in tasks], folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    names = [f"hf_posenc_{name}" for name in tasks]
    results = simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
    assert results is not None
    return results


def test_an_oracle_scores_one_and_a_random_model_nothing(checkpoint: Path, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from hf_posenc.evaluation.lm_eval_model import ExtendedLM

    tokenizer = make_tiny_tokenizer()
    knowing = make_tiny_llama(max_position_embeddings=max(LENGTHS))
    Oracle(knowing, tokenizer)
    request = {"tokenizer": str(checkpoint), "max_seq_lengths": LENGTHS, "num_samples": 2}
    results = run(ExtendedLM(knowing, tokenizer=tokenizer), tmp_path / "knowing", TASKS, **request)
    for name in TASKS:
        row = results["results"][f"hf_posenc_{name}"]
        assert {key: row[key] for key in row if key.endswith(",none") and "stderr" not in key} == {
            f"{length},none": 1.0 for length in LENGTHS
        }
        samples = results["samples"][f"hf_posenc_{name}"]
        assert [sample["doc"]["length"] for sample in samples] == [1600, 1600, 2000, 2000]
        for one in samples:
            fed, kwargs = one["arguments"][0]
            assert fed == one["doc"]["text"] + one["doc"]["answer_prefix"]
            used = len(tokenizer(fed).input_ids) + kwargs["max_gen_toks"]
            assert one["doc"]["length"] - 160 < used <= one["doc"]["length"]
    random = HFLM(make_tiny_llama(max_position_embeddings=max(LENGTHS)), tokenizer=tokenizer)
    results = run(random, tmp_path / "random", ("kv",), **request | {"max_seq_lengths": 1600})
    assert results["results"]["hf_posenc_kv"]["1600,none"] == 0


def test_the_command_knows_the_tasks(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["lm-eval", str(checkpoint), "--device", "cpu", "--tasks", "hf_posenc_graph,hf_posenc_kv"]
    more = ["--metadata", json.dumps({"max_seq_lengths": [1500], "num_samples": 1}), "--output_path", "out"]
    assert main([*words, *more]) == 0
    (written,) = Path("out").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    assert {*results} == {"hf_posenc_graph_bfs", "hf_posenc_graph_parents", "hf_posenc_kv"}
    assert all("1500,none" in row for row in results.values())
    capsys.readouterr()
    assert main(["lm-eval", str(checkpoint), "--tasks=hf_posenc_mrrc", "--device", "cpu"]) == 2
    assert "'mrrc'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"max_seq_lengths": [1500, 90]}, "task 'kv' does not fit into 90 tokens"),
        ({"num_samples": 0}, "samples must be at least 1, got 0"),
        ({"max_seq_lengths": "4k"}, "must be whole numbers of tokens, such as [4096, 8192]"),
    ],
)
def test_mistakes_are_said_before_weights_are_opened(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], metadata: dict[str, Any], message: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    words = ["lm-eval", str(broken), "--device", "cpu", "--tasks", "hf_posenc_kv", "--metadata", json.dumps(metadata)]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_is_refused(checkpoint: Path) -> None:
    from hf_posenc.retrieving.lm_eval_tasks import RetrievalTask

    for metadata, message in (
        ({}, "a retrieval task needs the model's tokenizer"),
        ({"tokenizer": str(checkpoint), "max_seq_lengths": [90]}, "task 'kv' does not fit into 90 tokens"),
        ({"tokenizer": str(checkpoint), "num_samples": 0}, "samples must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            RetrievalTask({"task": "hf_posenc_kv", "metadata": metadata})


def test_the_length_that_a_refusal_names_is_the_shortest(checkpoint: Path) -> None:
    from hf_posenc.retrieving.lm_eval_tasks import RetrievalTask

    def build(length: int) -> RetrievalTask:
        metadata = {"tokenizer": str(checkpoint), "max_seq_lengths": [length], "num_samples": 1}
        return RetrievalTask({"task": "hf_posenc_passkey", "metadata": metadata})

    with pytest.raises(ValueError, match="64 are left free") as refused:
        build(90)
    named = re.search(r"at least (\d+)\.", str(refused.value))
    assert named is not None
    build(int(named[1]))
    with pytest.raises(ValueError, match=f"at least {named[1]}"):
        build(int(named[1]) - 1)
