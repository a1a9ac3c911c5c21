"""Questions on long texts before and after a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.patching.api import patch_model
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training.answers import ANSWERS
from tiny_models import load_tiny
from tiny_runs import losses


def tiny() -> Any:
    model = load_tiny()
    return model, AutoTokenizer.from_pretrained(tiny_model_path())


def run(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"method": "yarn", "factor": 2, "token_budget": 1024, "seq_len": 512, "eval_documents": 0}
    return finetune(*tiny(), [load_novel("emma")[:40_000]], FinetuneConfig(str(folder), **{**given, **changes}))


def test_the_same_questions_are_asked_before_and_after(tmp_path: Path) -> None:
    result = run(tmp_path / "asked", eval_tasks=["passkey"], eval_questions=3, learning_rate=1e-3)
    cells = [(one.tokens_trained, one.context_length, one.question) for one in result.answers]
    assert sorted(cells) == [(n, length, at) for n in (0, 1024) for length in (256, 512) for at in range(3)]
    assert read_retrieval_records(tmp_path / "asked" / ANSWERS) == result.answers
    by_hand = retrieval(patch_model(tiny()[0], "yarn", factor=2), tiny()[1], ["passkey"], [512], questions=3)
    before, after = ([one for one in result.answers[6 * n : 6 * n + 6] if one.context_length == 512] for n in (0, 1))
    assert [one.nll_sum for one in before] == [one.nll_sum for one in by_hand]
    trained = retrieval(result.model, tiny()[1], ["passkey"], [512], questions=3, tokens_trained=1024)
    assert [one.nll_sum for one in after] == [one.nll_sum for one in trained] != [one.nll_sum for one in by_hand]
    card = (tmp_path / "asked/README.md").read_text("utf-8")
    assert "| task | tokens | before the training | after it |\n|---|---:|---:|---:|\n| passkey | 256 | " in card
    assert "Only perplexity was measured" not in card
    run(tmp_path / "not-asked", learning_rate=1e-3)
    assert losses(tmp_path / "not-asked") == losses(tmp_path / "asked")  # the questions change nothing
    card = (tmp_path / "not-asked/README.md").read_text("utf-8")
    assert "Answers from long texts" not in card


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval_tasks": ["passkeys"]}, "passkeys"),
        ({"eval_tasks": ["passkey"], "eval_questions": 0}, "eval_questions"),
        ({"eval_tasks": ["passkey"], "eval_questions": 50}, "256"),
        ({"eval_tasks": ["niah_multivalue"], "eval_questions": 2}, "niah_multivalue"),
    ],
)
def test_questions_that_cannot_be_asked(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
