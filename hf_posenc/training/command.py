"""What ``hf-posenc finetune`` does once its words are read: load, train, and say what came of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hf_posenc.arguments import FinetuneModelArguments, TrainingDocumentArguments
from hf_posenc.launching import own_device
from hf_posenc.loading import check_4bit, check_path, load_model
from hf_posenc.report import text_table
from hf_posenc.sources import read, stream
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.fine_tuning import finetune
from hf_posenc.training.levers import check_levers
from hf_posenc.training.rehearsal import rehearse

logger = logging.getLogger(__name__)


def run_finetune(
    name: str,
    config: FinetuneConfig,
    source: TrainingDocumentArguments,
    loading: FinetuneModelArguments,
    tokens_trained: int | None,
) -> None:
    """Fine-tune a model and print its perplexities before and after.

    Args:
        name: Of the model on the Hub, its folder or .gguf file.
        config: The run.
        source: Where the texts come from.
        loading: How the model is loaded.
        tokens_trained: Tokens it was fine-tuned on before; None if that is not known, and counting begins at 0.

    Raises:
        ValueError, TypeError: Settings, model and texts do not go together.
    """
    check_levers(config, attention=loading.attn_implementation, quantised=loading.load_in_4bit or None)
    told = {**vars(source), **vars(loading)}
    loading.device = own_device(loading.device)
    if loading.load_in_4bit:
        check_4bit(name, config.lora)
    check_path(Path(name).expanduser(), name)
    rehearse(name, config, attention=loading.attn_implementation)
    documents = stream(source) if source.streaming and source.documents != "-" else read(source)
    model, tokenizer = load_model(name, **vars(loading))
    if tokens_trained is None:
        logger.warning("%s does not say how many tokens it was trained on. Counting begins with this run.", name)
    result = finetune(model, tokenizer, documents, config, tokens_trained=tokens_trained or 0, source=told)
    if os.environ.get("RANK", "0") != "0":  # torchrun and accelerate: the first process speaks for all
        return
    print(text_table(result.records))
    print(f"\ntrained on {result.tokens_trained:,} tokens in all; saved: {result.output_dir}")
