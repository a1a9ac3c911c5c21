"""The texts a number is of, with the BOS its protocol wants: the same for all lengths of one protocol."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.documents import bos_token_id, make_stream, select_documents
from hf_posenc.evaluation.plans import Run, spread
from hf_posenc.families.discovery import unwrap

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What is taken of the documents; see ``perplexity``."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    cut: bool = False
    max_documents: int | None = None


def check_sizes(**sizes: int | None) -> None:
    """Raise unless each number, where one is given, is at least 1.

    Raises:
        ValueError: One is less.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise InvalidRequestError(f"{argument(name)} must be at least 1, got {value}.")


def check_choice(runs: Sequence[Run], choice: Choice) -> None:
    """Check what is to be taken of the documents, as far as it goes without them.

    Raises:
        ValueError: A number below 1, or a choice that makes no sense for a protocol.
    """
    sizes = {name: getattr(choice, name) for name in ("max_tokens", "min_tokens", "max_documents")}
    check_sizes(**sizes)
    if choice.cut and choice.min_tokens is not None:
        raise InvalidRequestError(
            f"{argument('cut')} makes pieces of one length, so {argument('min_tokens')} has no meaning there. Leave "
            "one of them out."
        )
    longest = max(run.context_length for run in runs)
    if choice.max_tokens is not None and choice.max_tokens < longest and any(_by_document(run) for run in runs):
        raise InvalidRequestError(
            f"{argument('max_tokens')} ({choice.max_tokens}) must not be less than the longest context length "
            f"({longest})."
        )
    for run in runs:
        if not _by_document(run) and (choice.cut or choice.min_tokens is not None):
            raise InvalidRequestError(
                f"protocol {run.protocol!r} joins all documents: leave {argument('cut')} and "
                f"{argument('min_tokens')} out."
            )
        if run.rule.shape == "beginning" and (choice.min_tokens or longest) < longest:
            raise InvalidRequestError(
                f"{argument('min_tokens')} ({choice.min_tokens}) is less than the longest context length "
                f"({longest}), all of which "
                f"protocol {run.protocol!r} reads of every document. Leave {argument('min_tokens')} out."
            )


def _by_document(run: Run) -> bool:
    return run.rule.shape != "stream"


def check_bos(runs: Sequence[Run], bos: str | None) -> None:
    """Check what is asked of BOS tokens, as far as it goes without the model.

    Raises:
        ValueError: It is asked for in a protocol that has a rule of its own.
    """
    if bos is not None and (own := [run.protocol for run in runs if run.rule.bos is not None]):
        raise InvalidRequestError(
            f"protocol {own[0]!r} has a rule of its own for BOS tokens, so bos={bos!r} cannot be asked for. Leave bos "
            "out, or measure the other protocols in a call of their own."
        )


def settle_bos(
    runs: Sequence[Run],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    bos: Literal["prepended"] | None,
) -> tuple[list[Run], int | None]:
    """Decide where a BOS token stands in each run, by what is asked for and by what the protocol's own code does.

    Args:
        runs: As planned.
        model: Its config has a BOS token where there is no tokenizer.
        tokenizer: The model's own, or None.
        bos: What is asked for, of protocols that leave it open.

    Returns:
        The runs, and the id of the token, None where no run has it.

    Raises:
        ValueError: ``bos`` for a protocol that has a rule of its own, or no token where one is needed.
    """
    asked = bos_token_id(model, tokenizer, bos)
    check_bos(runs, bos)
    source = unwrap(model).config.get_text_config() if tokenizer is None else tokenizer
    own_id = getattr(source, "bos_token_id", None)
    settled = []
    for run in runs:
        if run.rule.bos is None:
            run = replace(run, bos=bos or "none")
        elif own_id is None:
            if run.rule.needs_bos:
                raise InvalidRequestError(
                    f"protocol {run.protocol!r} puts a BOS token before every window, and there is none."
                )
            run = replace(run, bos="none")
        settled.append(run)
    return settled, own_id if asked is None else asked


def texts_of(
    run: Run, ids: Sequence[torch.Tensor], longest: int, bos_id: int | None, choice: Choice
) -> list[torch.Tensor]:
    """Return the token ids int64 ``(num_tokens,)`` of each text a run measures.

    Args:
        run: The protocol, with its BOS settled.
        ids: Token ids of each document.
        longest: The longest context length of all runs.
        bos_id: Token id of BOS, if there is any.
        choice: What is taken of the documents, checked by ``check_choice``.

    Raises:
        ValueError: No document is long enough.
    """
    shape, limit = run.rule.shape, choice.max_tokens
    before = bos_id if run.bos == "prepended" else None
    if shape == "stream":
        return [make_stream(ids, max_tokens=limit, bos_id=before, max_documents=choice.max_documents)]
    # A window's own BOS is one of its tokens; what comes after the last token fed is scored at the end of a document.
    spare = int(shape == "end") - int(run.bos == "each_window")
    if run.bos == "each_window" and any(len(row) and int(row[0]) == bos_id for row in ids):
        raise InvalidRequestError(
            f"protocol {run.protocol!r} puts BOS (token {bos_id}) before every window, but a document already starts "
            "with it. Give the documents without."
        )
    return select_documents(
        ids,
        longest + spare,
        max_tokens=None if limit is None else limit + spare,
        bos_id=before,
        cut=choice.cut,
        max_documents=choice.max_documents,
        min_tokens=None if choice.min_tokens is None else choice.min_tokens + spare,
        whole=run.rule.whole and not choice.cut,
    )


def count_documents(run: Run, texts: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], choice: Choice) -> int:
    """Return how many documents a run's texts are made of."""
    return len(spread(ids, choice.max_documents) if run.rule.shape == "stream" else texts)


def choose_texts(
    runs: list[Run], ids: list[torch.Tensor], bos_id: int | None, choice: Choice
) -> dict[Run, list[torch.Tensor]]:
    """Return each run's texts, chosen once for all runs that read the same."""
    longest = max(run.context_length for run in runs)
    chosen: dict[tuple[object, ...], list[torch.Tensor]] = {}
    texts = {}
    for run in runs:
        reads = (run.rule.shape, run.rule.whole, run.bos)
        if reads not in chosen:
            chosen[reads] = texts_of(run, ids, longest, bos_id, choice)
        texts[run] = chosen[reads]
    return texts


def tell_of_averages(runs: Sequence[Run]) -> None:
    """Say of each protocol whose perplexity is a mean of window means that it is one."""
    for name in dict.fromkeys(run.protocol for run in runs if run.average == "windows"):
        logger.warning(
            "%s: this perplexity is the mean of window means: a window with few tokens counts like a full one, so it "
            "does not compare with perplexities that weigh all tokens alike.",
            name,
        )
