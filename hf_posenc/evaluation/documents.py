"""The token ids that are scored: the same texts at every length of a protocol, and hashes that identify them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_posenc.data.packing import check_ids
from hf_posenc.data.reading import tokenize_text
from hf_posenc.data.tokens import spread, whole_pieces
from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.evaluation.config import EvalConfig
from hf_posenc.evaluation.windows import Run
from hf_posenc.utils.warning import warn_user

logger = logging.getLogger(__name__)

Document = str | Sequence[int] | torch.Tensor


def to_token_ids(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[torch.Tensor]:
    """Return int64 ``(num_tokens,)`` on the CPU for each document, a text or already token ids.

    Args:
        documents: Texts, or rows of token ids.
        tokenizer: The model's own; None where all documents are token ids.
        vocab_size: The model's: larger ids are refused.

    Raises:
        TypeError: One text or one row of ids instead of a list of them, ids that are not whole numbers, or a text
            without a tokenizer.
        ValueError: No document, or an id outside the model's vocabulary.
    """
    if isinstance(documents, (str, torch.Tensor)) or (len(documents) > 0 and isinstance(documents[0], int)):
        raise InvalidTypeError(
            "documents must be a list of texts or of rows of token ids. Put a single document into a list."
        )
    if len(documents) == 0:
        raise InvalidRequestError("documents is empty: there is nothing to measure on.")
    ids = [_one_row(document, tokenizer) for document in documents]
    check_ids(ids, vocab_size)
    return ids


def _one_row(document: Document, tokenizer: PreTrainedTokenizerBase | None) -> torch.Tensor:
    if isinstance(document, str):
        if tokenizer is None:
            raise InvalidTypeError("documents given as texts need tokenizer=, the model's own.")
        return tokenize_text(tokenizer, document)
    row = torch.as_tensor(document)
    if row.dim() != 1:
        raise InvalidTypeError(f"token ids must be rows of one dimension, got shape {tuple(row.shape)}.")
    if row.is_floating_point() and len(row):  # an empty list comes as float32
        raise InvalidTypeError(f"token ids must be whole numbers, got {row.dtype}.")
    return row.to(device="cpu", dtype=torch.int64)


def _tell_left_out(ids: Sequence[torch.Tensor], num_kept: int, needed: int) -> None:
    longest = max(len(row) for row in ids)
    if num_kept == 0:
        raise InvalidRequestError(
            f"none of the {len(ids)} documents has the {needed} tokens that the longest context length needs; the "
            f"longest has {longest}. Give longer documents, or context lengths up to {longest}."
        )
    if num_kept < len(ids):
        warn_user(
            f"{len(ids) - num_kept} of {len(ids)} documents have less than the {needed} tokens that the longest "
            "context length needs and are left out of every length, so that all lengths compare the same documents."
        )


def hash_token_ids(ids: Iterable[torch.Tensor]) -> str:
    """Return a short hash of rows of token ids, of their order and of where one ends."""
    digest = hashlib.sha256()
    for row in ids:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a short hash of how a tokenizer cuts texts; empty where there is none."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {"vocab": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    for passing in ("truncation", "padding"):  # left over from the last call, not a property of the tokenizer
        state.pop(passing, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


def settle_bos(
    runs: Sequence[Run],
    text_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    bos: Literal["prepended"] | None,
) -> tuple[list[Run], int | None]:
    """Decide which runs have a BOS token, and where, by the request and by what the protocol's own code does.

    Args:
        runs: From ``EvalConfig.runs``.
        text_config: The model's, which has the BOS token where there is no tokenizer.
        tokenizer: The model's own, or None.
        bos: The request, for protocols that leave it open.

    Returns:
        The runs, and the id of the token, None where no run has it.

    Raises:
        ValueError: There is no BOS token where one is needed.
    """
    of_model = getattr(text_config, "bos_token_id", None)
    own_id = of_model if tokenizer is None else tokenizer.bos_token_id
    bos_id = of_model if own_id is None and bos else own_id
    if bos and bos_id is None:
        raise InvalidRequestError("bos='prepended', but neither the tokenizer nor the model's config has a BOS token.")
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
    return settled, bos_id


def texts_of(
    run: Run, ids: Sequence[torch.Tensor], longest: int, least: int, bos_id: int | None, config: EvalConfig
) -> list[torch.Tensor]:
    """Return the token ids int64 ``(num_tokens,)`` of each text a run measures.

    All lengths are measured on the same texts: documents that do not reach the longest are left out.

    Args:
        run: The protocol, with its BOS settled.
        ids: Token ids of each document.
        longest: The longest context length of all runs.
        least: Tokens that a text must have for any of them to be scored.
        bos_id: Token id of BOS, if there is any.
        config: What is taken of the documents, checked by its ``runs``.

    Raises:
        ValueError: No document is long enough, or one begins with the BOS token that would be put before it.
    """
    rule, limit, most = run.rule, config.max_tokens, config.max_documents
    start = torch.tensor([bos_id] if run.bos == "prepended" else [], dtype=torch.int64)
    if rule.shape == "stream":  # LongLoRA's data has nothing between documents
        return [torch.cat([start, *spread(ids, most)])[:limit]]
    # A document's and a window's own BOS is one of its tokens; what comes after the last token fed is scored at the
    # end of a document.
    spare = int(rule.shape == "end") - int(run.bos != "none")
    kept = (limit or longest) + spare
    needed = kept if config.cut else (config.min_tokens or longest) + spare
    needed = max(needed, least - len(start))
    long_enough = [row for row in ids if len(row) >= needed]
    _tell_left_out(ids, len(long_enough), needed)
    if config.cut:
        texts = whole_pieces(long_enough, kept)
    else:
        texts = [row if rule.whole and limit is None else row[:kept] for row in long_enough]
    if run.bos != "none" and any(len(text) and int(text[0]) == bos_id for text in texts):
        where = "bos='prepended'" if rule.bos is None else f"protocol {run.protocol!r}"
        raise InvalidRequestError(
            f"{where} puts BOS (token {bos_id}) before every {'window' if run.bos == 'each_window' else 'document'}, "
            f"but a text already starts with it. Give texts without{', or leave bos out' if rule.bos is None else ''}."
        )
    return [torch.cat([start, text]) for text in spread(texts, most)]


def count_documents(run: Run, texts: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], config: EvalConfig) -> int:
    """Return the number of documents that a run's texts are made of."""
    return len(spread(ids, config.max_documents) if run.rule.shape == "stream" else texts)


def choose_texts(
    runs: list[Run], ids: list[torch.Tensor], bos_id: int | None, config: EvalConfig
) -> dict[Run, list[torch.Tensor]]:
    """Return each run's texts, chosen once for all runs that read the same."""
    longest = max(run.context_length for run in runs)
    chosen: dict[tuple[object, ...], list[torch.Tensor]] = {}
    texts = {}
    for run in runs:
        reads = (run.rule.shape, run.bos)
        if reads not in chosen:
            least = max(one.least_tokens for one in runs if (one.rule.shape, one.bos) == reads)
            chosen[reads] = texts_of(run, ids, longest, least, bos_id, config)
        texts[run] = chosen[reads]
    return texts


def warn_of_averages(runs: Sequence[Run]) -> None:
    """Say of each protocol whose perplexity is a mean of window means that it is one."""
    for name in dict.fromkeys(run.protocol for run in runs if run.average == "windows"):
        logger.warning(
            "%s: this perplexity is the mean of window means: a window with few tokens counts like a full one, so it "
            "does not compare with perplexities that weigh all tokens alike.",
            name,
        )
