"""The texts of a run as token ids: what is trained on, what is measured on, and at which lengths."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.examples import ExampleTokenizer
from hf_posenc.training.mixing import MixedDataset
from hf_posenc.training.packing import MaskedTokens, PackedDataset, SingleDocumentBlocks, Tokens, check_ids, ids_of
from hf_posenc.training.positions import PositionSchedule, block_length

logger = logging.getLogger(__name__)

_HELD_OUT = 20  # one part in so many

# Texts, token ids, or rows of a dataset. What is no sequence is a stream: read until the token budget is filled.
Documents = Iterable[str] | Iterable[Tokens] | Iterable[Mapping[str, Any]] | Iterable[str | dict[str, Any]]


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    Attributes:
        packed: The blocks it is trained on.
        held_out: Token ids it is measured on; empty where nothing is measured.
        lengths: Context lengths it is measured at, in tokens, rising.
    """

    packed: PackedDataset
    held_out: list[torch.Tensor]
    lengths: list[int]


def prepare_texts(
    rotary: RotaryModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    config: FinetuneConfig,
    positions: PositionSchedule,
) -> Texts:
    """Tokenize, check, hold out and pack.

    Args:
        rotary: The model, for its vocabulary.
        tokenizer: Its EOS ends each document.
        documents, eval_documents: As for ``finetune``.
        config: The run.
        positions: How they run in a block of the extended model.

    Raises:
        ValueError: No documents, none that counts in the loss, token ids the model has no embedding for, or kinds of
            data (``task_mix``) that do not suit them.
    """
    original, target = positions.original_length, positions.target_length
    lengths = sorted(set(config.eval_lengths or default_lengths(original, target)))
    vocab_size = rotary.text_config.vocab_size
    eos = _eos(tokenizer, vocab_size)
    train, held_out = _split(tokenizer, documents, eval_documents, max(lengths), original, config)
    check_ids([ids_of(document) for document in train], vocab_size)
    check_ids(held_out, vocab_size, "held-out document")
    seq_len = block_length(config, positions)
    check_enough_text([ids_of(document) for document in train], held_out, lengths, seq_len, config)
    kind = PackedDataset if config.packs_documents else SingleDocumentBlocks
    packed = kind(
        upsample(train, original, config.length_upsampling, config.seed),
        seq_len,
        eos_token_id=eos,
        seed=config.seed,
        positions=positions,
    )
    if config.task_mix is not None:
        packed = MixedDataset(packed, tokenizer, train, config)
    return Texts(packed, held_out, lengths)


def num_held_out(num_documents: int) -> int:
    """Return how many of several documents are held out: the last twentieth, one at least."""
    return max(1, round(num_documents / _HELD_OUT))


def hold_out(documents: Sequence[Tokens], longest: int) -> tuple[list[Tokens], list[Tokens]]:
    """Split documents into those to train on and the last twentieth, to measure on.

    Of a single document the tail is held out: a twentieth, but at least ``longest`` tokens where that is no more than a
    quarter. Where it is more, a twentieth has to do, and ``longest`` is not measured.

    Args:
        documents: Token ids, 1-D.
        longest: The longest length to be measured, in tokens.
    """
    if len(documents) > 1:
        num_held = num_held_out(len(documents))
        return list(documents[:-num_held]), list(documents[-num_held:])
    (only,) = documents
    tail = max(len(only) // _HELD_OUT, longest if longest <= len(only) // 4 else 0)
    return [only[: len(only) - tail]], [only[len(only) - tail :]]


def default_lengths(original: int, target: int) -> list[int]:
    """Half the original length, the original, the target."""
    return sorted({max(2, original // 2), original, target})


def upsample(documents: Sequence[Tokens], longer_than: int, times: float, seed: int) -> list[Tokens]:
    """Repeat the documents of more than ``longer_than`` tokens, so that a pass reads them ``times`` as often as others.

    Of a broken number the fraction is a share of these documents, drawn by ``seed``, that come once more.
    """
    long = [document for document in documents if len(document) > longer_than]
    if times != 1 and not long:
        logger.warning("length_upsampling %g changes nothing: no document is longer than %d tokens", times, longer_than)
    if times == 1 or not long:
        return list(documents)
    whole, fraction = divmod(times, 1)
    order = torch.randperm(len(long), generator=torch.Generator().manual_seed(seed)).tolist()
    more = [long[index] for index in order[: round(fraction * len(long))]]
    logger.info(
        "%d of %d documents are longer than %d tokens and are read %g times as often",
        len(long),
        len(documents),
        longer_than,
        times,
    )
    return [*documents, *long * (int(whole) - 1), *more]


def _eos(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int | None:
    eos: Any = tokenizer.eos_token_id
    if eos is None:
        logger.warning(
            "the tokenizer has no end-of-sequence token, so none is put after each document, and the model does not "
            "learn where a text ends. Set tokenizer.eos_token to the one the model was trained with."
        )
    elif not 0 <= eos < vocab_size:
        raise InvalidRequestError(
            f"the tokenizer's eos_token_id is {eos}, but the model's vocabulary has {vocab_size} ids: they do not "
            "belong together, or model.resize_token_embeddings(len(tokenizer)) is missing."
        )
    return eos  # type: ignore[no-any-return]  # tokenizers leave it untyped


def _split(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    longest: int,
    original: int,
    config: FinetuneConfig,
) -> tuple[list[Tokens], list[torch.Tensor]]:
    """Return what to train on, and token ids to measure on: all of a held-out chat, whatever counts in training."""
    holds_out = config.eval_documents > 0 and eval_documents is None
    if isinstance(documents, (Sequence, torch.Tensor)):
        tokens = to_token_ids(tokenizer, documents, config)
    else:
        tokens = read_stream(tokenizer, documents, original, config, holds_out)
    if not tokens:
        raise InvalidRequestError("there are no documents to train on.")
    held: list[Tokens] = []
    if holds_out:
        tokens, held = hold_out(tokens, longest)
    elif eval_documents is not None and config.eval_documents:
        held = to_token_ids(tokenizer, eval_documents, None)
    return tokens, [ids_of(document) for document in held]


def read_stream(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    original: int,
    config: FinetuneConfig,
    holds_out: bool,
) -> list[Tokens]:
    """Read a stream until what is left of it to train on, in one pass, fills the token budget.

    Args:
        tokenizer: For texts.
        documents: As for ``finetune``.
        original: Tokens the model was trained on; longer documents may be upsampled.
        config: The run.
        holds_out: Some of the documents are to be measured on.

    Returns:
        Tokens of documents, of which each has some that count in the loss.
    """
    taken: list[Tokens] = []
    filled = [0.0]  # by so many documents
    tokenize, without = ExampleTokenizer(tokenizer, config), 0
    for number, document in enumerate(documents):
        tokens = tokenize(document, f"document {number}")
        if not _counts(tokens):
            without += 1
            continue
        taken.append(tokens)
        times = config.length_upsampling if len(taken[-1]) > original else 1
        filled.append(filled[-1] + len(taken[-1]) * times)
        if filled[len(taken) - (num_held_out(len(taken)) if holds_out else 0)] >= config.token_budget:
            said = "the token budget is filled, the rest of the source is not read"
            break
    else:
        said = "all of the source"
    logger.info("read %d documents, %d tokens: %s", len(taken), sum(map(len, taken)), said)
    _tell_left_out(without, len(taken))
    return taken


def to_token_ids(
    tokenizer: PreTrainedTokenizerBase, documents: Documents, config: FinetuneConfig | None
) -> list[Tokens]:
    """Return the tokens of documents; those without any that counts in the loss are left out, with a warning.

    Args:
        tokenizer: For what is no token ids yet.
        documents: As for ``finetune``.
        config: The run; None for documents that are only measured on.

    Raises:
        TypeError: It is one document, or holds what is none.
        ValueError: As ``ExampleTokenizer``, or no token of any document counts in the loss.
    """
    if isinstance(documents, (str, torch.Tensor, MaskedTokens, Mapping)):
        raise InvalidTypeError(
            "documents must be a list of texts, rows or token id tensors; put a single one in a list."
        )
    tokenize = ExampleTokenizer(tokenizer, config)
    tokens = [tokenize(document, f"document {number}") for number, document in enumerate(documents)]
    counting = [document for document in tokens if _counts(document)]
    _tell_left_out(len(tokens) - len(counting), len(counting))
    return counting


def _counts(document: Tokens) -> bool:
    return not isinstance(document, MaskedTokens) or bool(document.counted.any())


def _tell_left_out(without: int, counting: int) -> None:
    if without and not counting:
        raise InvalidRequestError(
            f"none of the {without} documents has a token that counts in the loss: no answers, or no turns of the "
            f"role 'assistant'. Mend the data, or train on all tokens, without {argument('assistant_only_loss')} "
            f"and with {argument('completion_only_loss', False)}."
        )
    if without:
        logger.warning(
            "%d of %d documents have no token that counts in the loss (no answer, or no turn of the assistant's), and "
            "are left out",
            without,
            without + counting,
        )


def check_enough_text(
    train_ids: Sequence[torch.Tensor],
    held_out: Sequence[torch.Tensor],
    lengths: Sequence[int],
    seq_len: int,
    config: FinetuneConfig,
) -> None:
    """Refuse texts that cannot be trained or measured on, and warn where no document fills a block.

    Args:
        train_ids, held_out: Token ids, each 1-D.
        lengths: Context lengths to be measured, in tokens, rising.
        seq_len: Tokens of a block.
        config: The run.

    Raises:
        ValueError: The message says how many tokens there are, how many it takes, and what to do.
    """
    empty = [index for index, document in enumerate(train_ids) if document.numel() == 0]
    if empty:
        raise InvalidRequestError(
            f"{len(empty)} of {len(train_ids)} documents to train on hold no token, document {empty[0]} first. Leave "
            "them out; a single document must be long enough for a part to be held out; or train without "
            f"measuring: {argument('eval_documents', 0)}."
        )
    tokens = sum(document.numel() for document in train_ids)
    if tokens + len(train_ids) < seq_len:  # each may get an end-of-sequence token
        raise InvalidRequestError(
            f"the {_count(train_ids)} to train on hold {tokens:,} tokens in all, {100 * tokens / seq_len:.1f} % of one "
            f"block of {seq_len:,}: the model would read the same words over and over within a block. Give more text, "
            f"or a smaller {argument('seq_len')}."
        )
    reach = max((len(document) for document in held_out), default=0)
    if config.eval_documents and reach < lengths[0]:
        raise InvalidRequestError(
            f"nothing can be measured: the longest held-out text has {reach:,} tokens, the shortest length to be "
            f"measured is {lengths[0]:,}. Give longer documents, shorter {argument('eval_lengths')}, or train without "
            f"measuring: {argument('eval_documents', 0)}."
        )
    if config.task_mix is None:
        _warn_about_short_documents([document.numel() for document in train_ids], seq_len, config)


def _warn_about_short_documents(lengths: Sequence[int], seq_len: int, config: FinetuneConfig) -> None:
    longest = max(lengths)
    if longest >= seq_len:
        return
    mean = sum(lengths) / len(lengths)
    learned = f", and no distance beyond {longest:,} tokens is learned" if config.position_schedule == "full" else ""
    blocks = "packed from several, which do not see each other" if config.packs_documents else "padded"
    logger.warning(
        "all %d documents are shorter than a block of %d tokens: the longest has %d and fills %.1f %% of one, the mean "
        "%.1f %%. Blocks are %s%s. Give longer documents, or a smaller "
        f"{argument('seq_len')}.",
        len(lengths),
        seq_len,
        longest,
        100 * longest / seq_len,
        100 * mean / seq_len,
        blocks,
        learned,
    )


def _count(documents: Sequence[torch.Tensor]) -> str:
    return f"{len(documents)} document{'s' if len(documents) > 1 else ''}"
