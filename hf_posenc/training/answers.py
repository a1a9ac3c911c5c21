"""Questions on long texts, asked before a training and after it: what it gained at the lengths it is for."""

from __future__ import annotations

from collections.abc import Sequence

from hf_posenc.evaluation.intervals import share_right
from hf_posenc.evaluation.records import RetrievalRecord
from hf_posenc.utils.units import length_name

ANSWERS = "retrieval.jsonl"  # the records, in the folder of a run


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
