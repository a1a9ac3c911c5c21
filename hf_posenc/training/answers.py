"""Questions on long texts, asked before a training and after it: what it gained at the lengths it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_posenc.evaluation.intervals import share_right
from hf_posenc.evaluation.records import RetrievalRecord
from hf_posenc.retrieving.measuring_retrieval import check_prompts, retrieval
from hf_posenc.training.run_plan import DataPlan
from hf_posenc.utils.units import length_name

ANSWERS = "retrieval.jsonl"  # the records, in the folder of a run


def check_questions(data: DataPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse questions that cannot be asked, before anything is measured.

    Raises:
        ValueError: A length is too short for a task and its questions, or a task has one question for a text.
    """
    if data.eval_tasks:
        check_prompts(tokenizer, data.eval_tasks, data.task_lengths, data.eval_questions)


def ask(model: Any, tokenizer: PreTrainedTokenizerBase, data: DataPlan, **facts: Any) -> list[RetrievalRecord]:
    """Ask a model a plan's questions, on one text of each task and length; ``facts`` as ``retrieval`` takes them."""
    if not data.eval_tasks:
        return []
    return retrieval(model, tokenizer, data.eval_tasks, data.task_lengths, questions=data.eval_questions, **facts)


def table(before: Sequence[RetrievalRecord], after: Sequence[RetrievalRecord]) -> list[dict[str, str]]:
    """Return how many answers were right, as rows of a table: a task and length each."""
    return [
        {
            "task": task,
            "tokens": length_name(length),
            **{
                name: str(share_right([one for one in records if (one.task, one.context_length) == (task, length)]))
                for name, records in (("before the training", before), ("after it", after))
            },
        }
        for task, length in dict.fromkeys((one.task, one.context_length) for one in after)
    ]
