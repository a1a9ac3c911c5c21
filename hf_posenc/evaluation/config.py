"""The settings of perplexity: their defaults and help texts are declared only here.

Imports no PyTorch, so that the command line can show its help and refuse mistakes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument, did_you_mean
from hf_posenc.evaluation.protocols import PROTOCOLS, Average
from hf_posenc.evaluation.windows import Run, plan_runs
from hf_posenc.settings import check_settings, flag, setting, tokens, whole, word
from hf_posenc.utils.units import ContextLength

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT_CONTEXT = 4096
_SHARES = 4  # a short context serves a quarter as many tokens


@dataclass
class EvalConfig:
    """What is measured, and how.

    The names are those of ``perplexity``. Each help text is the documentation.
    """

    context_lengths: list[ContextLength] = field(metadata={"help": "text lengths to measure, in tokens: 512 2k 32k"})
    protocol: list[str] = field(
        default_factory=lambda: ["truncated"],
        metadata={
            "help": "which tokens are scored: one or more of " + ", ".join(PROTOCOLS),
            "choices": PROTOCOLS,
            "metavar": "PROTOCOL",
        },
    )
    stride: int | None = setting(
        None,
        whole(0),
        "tokens by which a sliding window advances; default: the published number, half the length for same_tokens, "
        "else 256, or half of a shorter window",
    )
    last_k: int | None = setting(
        None, whole(0), "number of last tokens that last_k (default: 256) and rerope (default: 4096) score"
    )
    max_tokens: ContextLength | None = setting(
        None, tokens(ContextLength), "tokens of each document that windows go over; default: to its end"
    )
    min_tokens: ContextLength | None = setting(
        None, tokens(ContextLength), "skip documents with fewer tokens; default: the longest length"
    )
    average: Literal["tokens", "windows"] | None = setting(
        None,
        word("tokens", "windows"),
        "tokens or windows: mean of window means, as in some papers; default: the protocol's own",
    )
    bos: Literal["prepended"] | None = setting(
        None, word("prepended"), "prepended: put a BOS token before every document"
    )
    prefill_chunk: ContextLength | None = setting(
        None,
        tokens(ContextLength),
        "feed this many tokens at a time with a KV cache: the same results; the log shows the memory",
    )
    logits_chunk: int | None = setting(
        None, whole(1), "positions whose logits are in memory at one time; default: what fits into 64 MiB"
    )
    batch_size: int | None = setting(
        None, whole(1), "sliding windows in one forward pass; default: chosen by their length, 1 for long ones"
    )
    max_documents: int | None = setting(None, whole(1), "measure at most this many documents, evenly spread")
    cut: bool = setting(False, flag, "cut long documents into pieces of the longest length")

    @classmethod
    def of(
        cls, context_lengths: Sequence[int] | EvalConfig, protocol: str | Sequence[str] | None = None, **settings: Any
    ) -> EvalConfig:
        """Return a config that is given, or one made of its fields.

        Args:
            context_lengths: Tokens fed at a time; or a whole config, beside which nothing else may be given.
            protocol: One name or several; None is ``truncated``.
            **settings: The other fields.

        Raises:
            InvalidTypeError: A field is unknown, or something is given beside a config.
        """
        if isinstance(context_lengths, EvalConfig):
            if given := [*settings, *([] if protocol is None else ["protocol"])]:
                raise InvalidTypeError(f"an EvalConfig says how to measure: leave {', '.join(given)} out.")
            return context_lengths
        known = {each.name for each in fields(EvalConfig)}
        for name in settings:
            if name not in known:
                raise InvalidTypeError(f"there is no setting {name!r}.{did_you_mean(name, known)}")
        names = ["truncated"] if protocol is None else [protocol] if isinstance(protocol, str) else list(protocol)
        return EvalConfig(context_lengths, names, **settings)  # type: ignore[arg-type]  # ``runs`` checks the lengths

    def runs(self) -> list[Run]:
        """Return the numbers to measure, each setting checked as far as it goes without a model and texts.

        Raises:
            TypeError: ``context_lengths`` is not a list of whole numbers.
            ValueError: A setting is out of its range, or has no meaning for a protocol.
        """
        check_settings(self)
        average: Average | None = self.average
        runs = plan_runs(self.protocol, self.context_lengths, self.stride, self.last_k, average)
        self._check_used(runs)
        self._check_documents(runs)
        if self.bos is not None and (own := [run.protocol for run in runs if run.rule.bos is not None]):
            raise InvalidRequestError(
                f"protocol {own[0]!r} has a rule of its own for BOS tokens, so bos={self.bos!r} cannot be requested. "
                "Leave bos out, or measure the other protocols in a call of their own."
            )
        return runs

    def _check_used(self, runs: Sequence[Run]) -> None:
        """Raise for a setting that no protocol of this call reads."""
        moves = [run for run in runs if run.rule.moves]
        used = {
            "stride": (moves, "moves a window"),
            "last_k": ([run for run in runs if run.last_k is not None], "scores the last tokens"),
            "batch_size": ([*moves, *(run for run in runs if run.protocol == "longppl")], "has several windows"),
            "max_tokens": ([run for run in runs if run.rule.whole or self.cut], "reads documents to their end"),
        }
        for name, (readers, does) in used.items():
            if getattr(self, name) is not None and not readers:
                raise InvalidRequestError(
                    f"{argument(name)} is for a {argument('protocol')} that {does}, not for "
                    f"{', '.join(self.protocol)}; leave it out, or measure such a one."
                )

    def _check_documents(self, runs: Sequence[Run]) -> None:
        """Check what is to be taken of the documents."""
        if self.cut and self.min_tokens is not None:
            raise InvalidRequestError(
                f"{argument('cut')} makes pieces of one length, so {argument('min_tokens')} has no meaning there. "
                "Leave one of them out."
            )
        longest = max(run.context_length for run in runs)
        by_document = [run for run in runs if run.rule.shape != "stream"]
        if self.max_tokens is not None and self.max_tokens < longest and by_document:
            raise InvalidRequestError(
                f"{argument('max_tokens')} ({self.max_tokens}) must not be less than the longest context length "
                f"({longest})."
            )
        for run in runs:
            if run.rule.shape == "stream" and (self.cut or self.min_tokens is not None):
                raise InvalidRequestError(
                    f"protocol {run.protocol!r} joins all documents: leave {argument('cut')} and "
                    f"{argument('min_tokens')} out."
                )
            if run.rule.shape == "beginning" and (self.min_tokens or longest) < longest:
                raise InvalidRequestError(
                    f"{argument('min_tokens')} ({self.min_tokens}) is less than the longest context length "
                    f"({longest}), all of which protocol {run.protocol!r} reads of every document. Leave "
                    f"{argument('min_tokens')} out."
                )
        moving = {run.context_length for run in runs if run.rule.moves}
        if self.cut and self.max_tokens is None and moving == {longest}:
            raise InvalidRequestError(
                f"{argument('cut')} makes pieces of the longest context length ({longest}), over which a window of "
                f"that length cannot move. Leave {argument('cut')} out, or give {argument('max_tokens')}."
            )


@dataclass
class OutputConfig:
    """Where results go, and under which names."""

    output: str | None = field(
        default=None, metadata={"help": "append results to this .jsonl file, and skip those that it holds"}
    )
    label: str = field(default="", metadata={"help": "name of the row in a report"})
    model_name: str | None = field(
        default=None,
        metadata={"help": "name of the model in results, where only rows of one name are compared; default: MODEL"},
    )
    hide_progress: bool = field(default=False, metadata={"help": "show no progress bar"})


@dataclass(frozen=True)
class KeyTokens:
    """The settings by which ``longppl`` finds the tokens that need the long context.

    Attributes:
        evaluator: The model that chooses them, with the same tokenizer; None lets the measured one choose, so that
            numbers of two models are of different tokens.
        alpha: Nats that a token gains from the long context, at least.
        beta: Log-probability of a token after the long context, at least.
        short_context: Tokens; None takes 4096, or half the original length where that is less.
    """

    evaluator: PreTrainedModel | None = None
    alpha: float = field(
        default=2.0, metadata={"help": "longppl: nats that a key token gains from the long context, at least"}
    )
    beta: float = field(
        default=-2.0, metadata={"help": "longppl: log-probability of a key token after the long context, at least"}
    )
    short_context: int | None = field(
        default=None,
        metadata={"help": "longppl: tokens of the short context; default: 4096, at most half the original length"},
    )

    def short_tokens(self, original_length: int | None) -> int:
        """Return the short context in tokens, for a model of so many original tokens."""
        if self.short_context is not None:
            return self.short_context
        return SHORT_CONTEXT if original_length is None else max(_SHARES, min(SHORT_CONTEXT, original_length // 2))


def short_step(short_context: int) -> int:
    """Return the number of tokens that share one short context."""
    return max(1, short_context // _SHARES)


def check_short_context(short: int, lengths: Sequence[int]) -> None:
    """Raise unless each context length has tokens that can gain from it.

    Raises:
        ValueError: A short context below one token, or a context length that is not longer.
    """
    if short < 1:
        raise InvalidRequestError(f"{argument('short_context')} must be at least 1 token, got {short}.")
    step = short_step(short)
    if lengths and min(lengths) <= short + step:
        raise InvalidRequestError(
            f"longppl compares with a short context of {short} to {short + step - 1} tokens, so context lengths must "
            f"be more than {short + step}, got {min(lengths)}. Give longer ones, or a smaller short_context."
        )
