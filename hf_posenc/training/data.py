"""The texts of a run as tokens: what is trained on, what is measured on, and the blocks that are made of it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.data.examples import ExampleTokenizer
from hf_posenc.data.packing import PackedDocuments, check_ids
from hf_posenc.data.reading import added_bos
from hf_posenc.data.retained_texts import RetainedTexts
from hf_posenc.data.tokens import MaskedTokens, Tokens, ids_of
from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.mixtures import get_kind
from hf_posenc.mixtures.base import Material
from hf_posenc.training.blocks import MixedBlocks, PackedBlocks, TrainingBlocks
from hf_posenc.training.positions import FULL
from hf_posenc.training.run_plan import DataPlan, StagePlan

logger = logging.getLogger(__name__)

_HELD_OUT = 20  # one part in so many

# Texts, token ids, or rows of a dataset. What is no sequence is a stream: read until the token budget is filled.
Documents = Iterable[str] | Iterable[Tokens] | Iterable[Mapping[str, Any]] | Iterable[str | dict[str, Any]]


@dataclass(frozen=True)
class Texts:
    """The texts of a run as tokens.

    Attributes:
        train: Documents that are trained on; each has a token that counts in the loss.
        held_out: Token ids that are measured on; empty where nothing is measured.
    """

    train: list[Tokens]
    held_out: list[torch.Tensor]


def read_texts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    data: DataPlan,
    vocab_size: int,
) -> Texts:
    """Tokenize the documents of a run, check them, and hold some of them out.

    Args:
        tokenizer: The model's.
        documents, eval_documents: As for ``finetune``.
        data: What of the documents counts, how much of a stream is read, and what is measured.
        vocab_size: Vocabulary size of the model.

    Raises:
        ValueError: No documents, none that counts in the loss, or token ids that the model has no embedding for.
    """
    measures = data.eval_documents > 0
    holds_out = measures and eval_documents is None
    tokenize = ExampleTokenizer(
        tokenizer, assistant_only_loss=data.assistant_only_loss, completion_only_loss=data.completion_only_loss
    )
    train = read_tokens(tokenize, documents, _fills(data, holds_out=holds_out))
    if not train:
        raise InvalidRequestError("there are no documents to train on.")
    held: list[Tokens] = []
    if holds_out:
        train, held = hold_out(train, max(data.eval_lengths))
    elif eval_documents is not None and measures:
        enough = "there are enough texts to measure on"
        held = read_tokens(ExampleTokenizer(tokenizer), eval_documents, _can_be_measured(data), enough)
    held_out = [ids_of(document) for document in held]
    check_ids([ids_of(document) for document in train], vocab_size)
    check_ids(held_out, vocab_size, "held-out document")
    return Texts(train, held_out)


def make_blocks(
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    data: DataPlan,
    stage: StagePlan,
    vocab_size: int,
    retained: Mapping[str, RetainedTexts] | None = None,
) -> TrainingBlocks:
    """Return the blocks that a stage is trained on.

    Args:
        tokenizer: Its EOS ends each document, and its BOS begins each if the tokenizer adds one to a text.
        texts: Texts of the run.
        data: How blocks are made.
        stage: How long they are, how their positions run, and how many of them are read.
        vocab_size: Vocabulary size of the model.
        retained: Texts with what the model predicted there, by the kinds of data that need them. They may be put into
            it later, before the first block of such a kind is read.

    Raises:
        ValueError: The texts are too short, or kinds of data (``task_mix``) do not suit them.
    """
    check_enough_text(texts, data, stage)
    positions = stage.positions
    packed = PackedDocuments(
        upsample(texts.train, positions.original_length, data.length_upsampling, stage.seed),
        stage.seq_len,
        eos_token_id=_eos(tokenizer, vocab_size),
        bos_token_id=_bos(tokenizer, vocab_size),
        seed=stage.seed,
        one_document=data.one_document,
    )
    if data.task_mix is None:
        return PackedBlocks(packed, positions, stage.num_blocks, stage.seed)
    free_texts = [document for document in texts.train if not isinstance(document, MaskedTokens)]
    reading = [name for name in data.task_mix if get_kind(name).reads_texts]
    if reading and len(free_texts) < len(texts.train):
        raise InvalidRequestError(
            f"{argument('task_mix')}: {' and '.join(reading)} are made of free text, and "
            f"{len(texts.train) - len(free_texts)} of {len(texts.train)} documents are chats or prompts with answers. "
            "Give texts, or leave these kinds out."
        )
    material = Material(tokenizer, free_texts, packed, stage.seed, {} if retained is None else retained)
    makers = {name: get_kind(name)(material) for name in data.task_mix}
    return MixedBlocks(packed, positions, makers, data.task_mix, stage.max_steps, stage.blocks_per_step)


def num_held_out(num_documents: int) -> int:
    """Return the number of documents that are held out: the last twentieth, one at least."""
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
    else:
        _check_id("eos_token_id", eos, vocab_size)
    return eos  # type: ignore[no-any-return]  # tokenizers leave it untyped


def _bos(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int | None:
    bos = added_bos(tokenizer)
    if bos is not None:
        _check_id("bos_token_id", bos, vocab_size)
    return bos


def _check_id(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequestError(
            f"the tokenizer's {name} is {token}, but the model's vocabulary has {vocab_size} ids: they do not "
            "belong together, or model.resize_token_embeddings(len(tokenizer)) is missing."
        )


def _fills(data: DataPlan, *, holds_out: bool) -> Callable[[Sequence[Tokens]], bool]:
    """Return what says whether a pass over the documents that are trained on fills the token budget."""
    tokens = [0.0]  # of a pass over so many documents

    def is_enough(read: Sequence[Tokens]) -> bool:
        times = data.length_upsampling if len(read[-1]) > data.original_length else 1
        tokens.append(tokens[-1] + len(read[-1]) * times)
        return tokens[len(read) - (num_held_out(len(read)) if holds_out else 0)] >= data.token_budget

    return is_enough


def _can_be_measured(data: DataPlan) -> Callable[[Sequence[Tokens]], bool]:
    """Return what says whether as many documents as are measured reach the longest length."""
    lengths = itertools.count(1)
    longest = max(data.eval_lengths)

    def is_enough(read: Sequence[Tokens]) -> bool:
        return len(read[-1]) >= longest and next(lengths) >= data.eval_documents

    return is_enough


def read_tokens(
    tokenize: ExampleTokenizer,
    documents: Documents,
    is_enough: Callable[[Sequence[Tokens]], bool] | None = None,
    reason: str = "the token budget is filled",
) -> list[Tokens]:
    """Return the tokens of documents; those without any that counts in the loss are left out, with a warning.

    Args:
        tokenize: It makes them, and says which of them count.
        documents: As for ``finetune``.
        is_enough: A stream is read until this is true of what was read; None reads all.
        reason: Why no more of it is read, for the log.

    Raises:
        TypeError: It is one document, or holds something that is no document.
        ValueError: As ``ExampleTokenizer``, or no token of any document counts in the loss.
    """
    if isinstance(documents, (str, torch.Tensor, MaskedTokens, Mapping)):
        raise InvalidTypeError(
            "documents must be a list of texts, rows or token id tensors. Put a single document into a list."
        )
    if isinstance(documents, Sequence):
        is_enough = None
    read: list[Tokens] = []
    without, end = 0, "all of the source"
    for number, document in enumerate(documents):
        tokens = tokenize(document, f"document {number}")
        if not _counts(tokens):
            without += 1
            continue
        read.append(tokens)
        if is_enough is not None and is_enough(read):
            end = f"{reason}, the rest of the source is not read"
            break
    if is_enough is not None:
        logger.info("read %d documents, %d tokens: %s", len(read), sum(map(len, read)), end)
    if without and not read:
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
            without + len(read),
        )
    return read


def _counts(document: Tokens) -> bool:
    return not isinstance(document, MaskedTokens) or bool(document.counted.any())


def check_enough_text(texts: Texts, data: DataPlan, stage: StagePlan) -> None:
    """Refuse texts that cannot be trained or measured on, and warn where no document fills a block.

    Raises:
        ValueError: The message says how many tokens there are, how many are needed, and what to do.
    """
    train, seq_len = [ids_of(document) for document in texts.train], stage.seq_len
    empty = [index for index, document in enumerate(train) if document.numel() == 0]
    if empty:
        raise InvalidRequestError(
            f"{len(empty)} of {len(train)} documents to train on hold no token, document {empty[0]} first. Leave "
            "them out; a single document must be long enough for a part to be held out; or train without "
            f"measuring: {argument('eval_documents', 0)}."
        )
    num_tokens = sum(document.numel() for document in train)
    if num_tokens + 2 * len(train) < seq_len:  # each may get tokens for its beginning and its end
        raise InvalidRequestError(
            f"the {_count(train)} to train on hold {num_tokens:,} tokens in all, {100 * num_tokens / seq_len:.1f} % of "
            f"one block of {seq_len:,}: the model would read the same words over and over within a block. Give more "
            f"text, or a smaller {argument('seq_len')}."
        )
    reach = max((len(document) for document in texts.held_out), default=0)
    shortest = min(data.eval_lengths)
    if data.eval_documents and reach < shortest:
        raise InvalidRequestError(
            f"nothing can be measured: the longest held-out text has {reach:,} tokens, the shortest length to be "
            f"measured is {shortest:,}. Give longer documents, shorter {argument('eval_lengths')}, or train without "
            f"measuring: {argument('eval_documents', 0)}."
        )
    if data.task_mix is None:
        _warn_about_short_documents([document.numel() for document in train], data, stage)


def _warn_about_short_documents(lengths: Sequence[int], data: DataPlan, stage: StagePlan) -> None:
    longest, seq_len = max(lengths), stage.seq_len
    if longest >= seq_len:
        return
    mean = sum(lengths) / len(lengths)
    learned = f", and no distance beyond {longest:,} tokens is learned" if stage.positions.kind == FULL else ""
    blocks = "padded" if data.one_document else "packed from several, which do not see each other"
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
