"""Perplexity by context length as a metric of the ``evaluate`` library.

``evaluate.load(hf_posenc.evaluation.METRIC).compute(predictions=texts, model=model, tokenizer=tokenizer,
context_lengths=[512, 2048])``
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from hf_posenc.evaluation import perplexity

_INPUTS = """
Args:
    predictions: The texts, as strings.
    model: A causal language model, patched or not.
    context_lengths: Tokens fed at a time.
    **kwargs: As `hf_posenc.perplexity` takes them: tokenizer, protocol, stride, cut, output ...
Returns:
    perplexities: {context length: perplexity} of the first protocol.
    records: What `hf_posenc.perplexity` returns, as dicts: each number with how it was measured.
"""


class PerplexityByLength(evaluate.Metric):  # type: ignore[misc]  # evaluate is untyped
    """The same numbers as ``hf_posenc.perplexity``."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Perplexity of a causal language model at several context lengths.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(self, predictions: list[str], **kwargs: Any) -> dict[str, Any]:
        records = perplexity(documents=list(predictions), **kwargs)
        first = [record for record in records if record.protocol == records[0].protocol]
        return {
            "perplexities": {record.context_length: record.perplexity for record in first},
            "records": [vars(record) for record in records],
        }
