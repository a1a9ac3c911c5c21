"""The texts that a model writes itself before it is trained, made once for each model and kept in a cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.data.own_texts import LIKELY, OwnTexts, first_token
from hf_posenc.evaluation.lm_head import decoder_body, head_logits
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_json, hash_weights
from hf_posenc.utils.console import Progress
from hf_posenc.utils.processes import from_main

logger = logging.getLogger(__name__)

LENGTH = 512  # tokens of a text
MOST_TOKENS = 65_536  # of all texts: a run that reads more reads them again
_TOGETHER = 32  # texts that are written at a time


def own_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_tokens: int, length: int, seed: int
) -> OwnTexts:
    """Return texts that the model writes as it is, each from its first token on, at temperature 1.

    They are kept in the cache folder of huggingface_hub (``HF_HOME``), and written anew for other weights or settings.
    In a distributed run the first process writes them.

    Args:
        model: The model, whose distributions are to be retained.
        tokenizer: Its; each text begins with ``first_token``.
        num_tokens: Tokens that a run reads; at most ``MOST_TOKENS`` are written.
        length: Tokens of a text, at most.
        seed: Of what is drawn.

    Raises:
        ValueError: The tokenizer has neither token.
    """
    length = min(length, LENGTH)
    count = -(-min(num_tokens, MOST_TOKENS) // length)
    settings = {"first": first_token(tokenizer), "length": length, "count": count, "seed": seed, "likely": LIKELY}
    identity = hash_json([hash_weights(model), settings, str(model.config.to_dict().get("rope_parameters"))])
    file = Path(constants.HF_HOME) / "hf_posenc" / f"own-texts-{identity}.safetensors"

    def write() -> None:
        if file.is_file():
            logger.info("%d texts of the model's own: %s", count, file)
            return
        logger.info("the model writes %d texts of %d tokens, which are kept in %s", count, length, file)
        written(model, settings).save(file)

    from_main(write)
    return OwnTexts.load(file)


@torch.no_grad()
def written(model: PreTrainedModel, settings: Mapping[str, int]) -> OwnTexts:
    """Write texts; ``settings`` as ``own_texts`` has them."""
    count, number = settings["count"], min(settings["likely"], model.vocab_size)
    body, own = decoder_body(model), model.generation_config
    generate: Any = model.generate
    drawn: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_length": settings["length"],
    }
    # A text may end, and another begin behind it: so it is in what models are trained on.
    drawn |= {"eos_token_id": None, "pad_token_id": settings["first"]}
    ids, likely = [], []
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        evaluation_mode(model),
        torch.random.fork_rng(devices),
        Progress("the model's own texts", count, unit="texts") as bar,
    ):
        torch.manual_seed(settings["seed"])
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # the model's may penalise
        try:
            for start in range(0, count, _TOGETHER):
                begin = torch.full((min(_TOGETHER, count - start), 1), settings["first"], device=model.device)
                texts = generate(begin, attention_mask=torch.ones_like(begin), **drawn)
                ids.append(texts.cpu())
                for text in texts:
                    hidden = body(input_ids=text[None], use_cache=False).last_hidden_state[0]
                    likely.append(head_logits(model, hidden).float().log_softmax(-1).topk(number))
                    bar.update()
        finally:
            model.generation_config = own
    log_probs = torch.stack([found.values.cpu() for found in likely])
    return OwnTexts(torch.cat(ids), torch.stack([found.indices.cpu() for found in likely]), log_probs)
