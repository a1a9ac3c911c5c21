"""Texts on which a model is to go on predicting what it predicts, made once for each model and kept in a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.data.packing import PackedDocuments
from hf_posenc.data.retained_texts import LIKELY, RetainedTexts, first_token
from hf_posenc.data.tokens import whole_pieces
from hf_posenc.evaluation.documents import hash_token_ids
from hf_posenc.evaluation.lm_head import DEFAULT_ROWS_PER_CHUNK, decoder_body, head_logits, row_chunks
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_json, hash_weights
from hf_posenc.patching.api import describe
from hf_posenc.training.positions import PositionSchedule, document_arguments
from hf_posenc.utils.console import Progress
from hf_posenc.utils.processes import from_main

logger = logging.getLogger(__name__)

LENGTH = 512  # tokens of a text
MOST_TOKENS = 262_144  # of all texts: a run that reads more reads them again
_TOGETHER = 32  # texts that are written at a time


def retained_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    length: int,
    seed: int,
    documents: Sequence[torch.Tensor] = (),
) -> RetainedTexts:
    """Return short texts and the model's distributions there, as it is.

    Half of the texts are pieces of the documents, as far as those have so many; the model writes the others, each from
    its first token on, at temperature 1. They are kept in the cache folder of huggingface_hub (``HF_HOME``), and made
    anew for other weights, settings or documents, and in autocast. In a distributed run the first process makes them.

    Args:
        model: The model, whose distributions are to be retained.
        tokenizer: Its; each text that is written begins with ``first_token``.
        num_tokens: Tokens that a run reads; texts of at most ``MOST_TOKENS`` are made.
        length: Tokens of a text, ``LENGTH`` at most.
        seed: Of what is drawn.
        documents: Token ids, int64 ``(num_tokens,)`` each.

    Raises:
        ValueError: The tokenizer has neither token.
    """
    length, first = min(length, LENGTH), first_token(tokenizer)
    count = -(-min(num_tokens, MOST_TOKENS) // length)
    read = _pieces(documents, length, count // 2, seed)
    positions = torch.arange(length).expand(count, length)

    def texts() -> torch.Tensor:
        return torch.cat([read, written(model, first, length, count - len(read), seed)])

    return _kept(model, texts, positions, first=first, seed=seed, read=hash_token_ids(read))


def long_retained_texts(
    model: PreTrainedModel, num_tokens: int, packed: PackedDocuments, positions: PositionSchedule
) -> RetainedTexts:
    """Return pieces of packed documents as long as a block, and the model's distributions there.

    They are kept as by ``retained_texts``. A piece may hold several documents, of which it is read as one text.

    Args:
        model: The extended model, as a training begins with it.
        num_tokens: Tokens that a run reads; pieces of at most ``MOST_TOKENS`` are read, so that more come again.
        packed: The documents.
        positions: How positions run in a piece; its seed draws the pieces too.

    Returns:
        Texts of ``packed.seq_len`` tokens; as many as the documents fill, or one, if that is fewer.
    """
    length, stream = packed.seq_len, packed.stream
    drawn = torch.randperm(max(1, len(stream) // length), generator=torch.Generator().manual_seed(positions.seed))
    starts = drawn[: -(-min(num_tokens, MOST_TOKENS) // length), None] * length
    pieces = stream[(starts + torch.arange(length)) % len(stream)]
    position_ids = torch.stack([positions.of(index, [length], short=False) for index in range(len(pieces))])
    return _kept(model, lambda: pieces, position_ids, read=hash_token_ids(pieces))


def _kept(
    model: PreTrainedModel, texts: Callable[[], torch.Tensor], position_ids: torch.Tensor, **settings: Any
) -> RetainedTexts:
    """Return texts with the model's distributions, from the cache if they are there; ``settings`` decide them."""
    config = model.config.get_text_config(decoder=True)
    rules = [
        str(describe(model)),
        *(str(getattr(config, name, None)) for name in ("rope_parameters", "sliding_window")),
    ]
    settings |= {"likely": LIKELY, "autocast": torch.is_autocast_enabled(model.device.type)}
    identity = hash_json([hash_weights(model), rules, settings, hash_token_ids(position_ids)])
    file = Path(constants.HF_HOME) / "hf_posenc" / f"retained-texts-{identity}.safetensors"

    def make() -> RetainedTexts:
        count, length = position_ids.shape
        if file.is_file():
            logger.info("%d texts of %d tokens that are retained: %s", count, length, file)
        else:
            logger.info("the model reads %d texts of %d tokens, which are kept in %s", count, length, file)
            with_likely(model, texts(), position_ids, LIKELY).save(file)
        return RetainedTexts.load(file)

    return from_main(make)  # as other machines have other caches


def _pieces(documents: Sequence[torch.Tensor], length: int, count: int, seed: int) -> torch.Tensor:
    """Return pieces of the documents, drawn at random, that do not overlap: int64 ``(count, length)``, or fewer."""
    whole = whole_pieces(documents, length)
    drawn = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack([whole[at] for at in drawn]) if len(drawn) else torch.empty(0, length, dtype=torch.long)


@torch.no_grad()
def written(model: PreTrainedModel, first: int, length: int, count: int, seed: int) -> torch.Tensor:
    """Let the model write texts from a token on, at temperature 1; return int64 ``(count, length)``."""
    own = model.generation_config
    generate: Any = model.generate
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_length": length}
    # A text may end, and another begin behind it: so it is in what models are trained on.
    drawn |= {"eos_token_id": None, "pad_token_id": first}
    texts = [torch.empty(0, length, dtype=torch.long)]
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        evaluation_mode(model),
        torch.random.fork_rng(devices),
        Progress("the model's own texts", count, unit="texts") as bar,
    ):
        torch.manual_seed(seed)
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # the model's may penalise
        try:
            for start in range(0, count, _TOGETHER):
                begin = torch.full((min(_TOGETHER, count - start), 1), first, device=model.device)
                texts.append(generate(begin, attention_mask=torch.ones_like(begin), **drawn).cpu())
                bar.update(len(begin))
        finally:
            model.generation_config = own
    return torch.cat(texts)


@torch.no_grad()
def with_likely(model: PreTrainedModel, texts: torch.Tensor, position_ids: torch.Tensor, number: int) -> RetainedTexts:
    """Return texts, int64 ``(count, length)``, each at its positions, with the ``number`` likeliest next tokens."""
    body, number, found = decoder_body(model), min(number, model.config.get_text_config(decoder=True).vocab_size), []
    with evaluation_mode(model), Progress("texts that are retained", len(texts), unit="texts") as bar:
        for text, positions in zip(texts.to(model.device), position_ids.to(model.device), strict=True):
            hidden = body(**document_arguments(text, positions), use_cache=False).last_hidden_state[0]
            chunks = row_chunks(len(hidden), DEFAULT_ROWS_PER_CHUNK)
            best = [head_logits(model, hidden[rows]).float().log_softmax(-1).topk(number) for rows in chunks]
            found.append([torch.cat([each[at].cpu() for each in best]) for at in (1, 0)])
            bar.update(1)
    likely_ids, likely_log_probs = (torch.stack(each) for each in zip(*found, strict=True))
    return RetainedTexts(texts, position_ids, likely_ids, likely_log_probs)
