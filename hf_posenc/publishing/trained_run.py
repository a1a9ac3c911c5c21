"""The facts of the fine-tuning run that ended with a model, for its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_posenc.evaluation.records import Record
from hf_posenc.methods.registry import method_names
from hf_posenc.publishing.provenance import DocumentSource


class TrainedStage(NamedTuple):
    """The training of a model to one target length.

    Attributes:
        context_length: The target, in tokens.
        steps: Optimizer steps.
        tokens: Trained on.
    """

    context_length: int
    steps: int
    tokens: int


@dataclass(frozen=True)
class TrainedRun:
    """A fine-tuning run, and its words and rows in a card.

    Attributes:
        documents: What it was trained on.
        held_out: Whether the measured texts are the last of those documents; else they were given apart.
        settings: Settings of the run: learning_rate, seq_len, lora and so on, shown as they are.
        stages: Stages of this run, in order; one that trains to one length only is one stage. Tokens of the card's
            ``tokens_trained`` that are of none are those of earlier runs.
        lengths: That were to be measured, in tokens.
        unextended: Perplexities of the model without its extension, before training; empty where that is not the base.
        before, after: Perplexities of the extended model before and after training, at the same lengths.
        answers: Answers on long texts before and after, as rows of a table; empty if there were no questions.
        short_texts: What shares of the training cost on short texts, as rows of a table; empty if it was not measured.
        kept: Which of them the model has, in words.
    """

    documents: DocumentSource
    held_out: bool
    settings: Mapping[str, Any]
    stages: Sequence[TrainedStage]
    lengths: Sequence[int]
    unextended: Sequence[Record]
    before: Sequence[Record]
    after: Sequence[Record]
    answers: Sequence[Mapping[str, str]] = ()
    short_texts: Sequence[Mapping[str, str]] = ()
    kept: str = ""

    def words(self, tokens: int) -> str:
        """Return the amount of training in words, of a model that was trained on ``tokens`` tokens over all runs."""
        before_run = tokens - sum(stage.tokens for stage in self.stages)
        earlier = f" ({before_run:,} of them in earlier runs)" if before_run else ""
        staged = f" in {len(self.stages)} stages, the last" if len(self.stages) > 1 else ""
        return f"fine-tuned on {tokens:,} tokens{earlier}{staged} in blocks of {self.settings['seq_len']}"

    @property
    def measured_texts(self) -> str:
        """The texts on which the perplexities were measured, in words."""
        if self.held_out:
            return f"the last part of {self.documents.words}, held out from training"
        return "texts given apart from what it was trained on"

    @property
    def rows(self) -> list[tuple[str, Sequence[Record]]]:
        """The rows of its table: a name, and perplexities."""
        rows = [(_base_name(self.unextended[0]), self.unextended)] if self.unextended else []
        return rows + [(_row_name(records[0]), records) for records in (self.before, self.after) if records]


def changed_words(method: str, target: int) -> str:
    """Return in words how positions were changed, to a target in tokens."""
    return (
        f"`{method}` in the place of RoPE"
        if method in method_names("instead_of_rope")
        else f"extended to {target} tokens"
    )


def _base_name(record: Record) -> str:
    own = f"before this run (`{record.method}`, {record.factor:g} times)"
    return f"the base model, {'unextended' if record.method == 'none' else own}"


def _row_name(record: Record) -> str:
    trained = f"fine-tuned on {record.tokens_trained:,} tokens" if record.tokens_trained else "not yet trained"
    assert record.original_max_position_embeddings is not None  # of an extended model
    target = round(record.factor * record.original_max_position_embeddings)
    return f"{changed_words(record.method, target)}, {trained}"
