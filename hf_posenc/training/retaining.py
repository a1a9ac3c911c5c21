"""Short texts on which a model is to go on predicting what it predicts, made once for each model and kept in a cache.

Some are pieces of documents, and the model writes the others itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.data.retained_texts import LIKELY, RetainedTexts, first_token
from hf_posenc.evaluation.lm_head import decoder_body, head_logits
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_json, hash_weights
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
    settings = {
        **{"first": first, "length": length, "count": count, "seed": seed, "likely": LIKELY, "read": read.tolist()},
        "autocast": torch.is_autocast_enabled(model.device.type),
    }
    identity = hash_json([hash_weights(model), settings, str(model.config.to_dict().get("rope_parameters"))])
    file = Path(constants.HF_HOME) / "hf_posenc" / f"retained-texts-{identity}.safetensors"

    def make() -> None:
        if file.is_file():
            logger.info("%d short texts: %s", count, file)
            return
        logger.info("the model writes %d texts of %d tokens, which are kept in %s", count - len(read), length, file)
        texts = torch.cat([read, written(model, first, length, count - len(read), seed)])
        with_likely(model, texts, LIKELY).save(file)

    from_main(make)
    return RetainedTexts.load(file)


def whole_pieces(documents: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Return documents cut into pieces of a length, without the shorter rest of each: int64 ``(length,)``."""
    return [piece for text in documents for piece in torch.split(text, length) if len(piece) == length]


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
def with_likely(model: PreTrainedModel, texts: torch.Tensor, number: int) -> RetainedTexts:
    """Return texts, int64 ``(count, length)``, with the ``number`` likeliest tokens after each of theirs."""
    body, found = decoder_body(model), []
    with evaluation_mode(model):
        for text in texts.to(model.device):
            hidden = body(input_ids=text[None], use_cache=False).last_hidden_state[0]
            best = head_logits(model, hidden).float().log_softmax(-1).topk(min(number, model.vocab_size))
            found.append((best.indices.cpu(), best.values.cpu()))
    likely_ids, likely_log_probs = (torch.stack(each) for each in zip(*found, strict=True))
    return RetainedTexts(texts, likely_ids, likely_log_probs)
