"""What ``hf-posenc finetune`` does once its words are read: load, train, and say what came of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_posenc.checkpoint.loading import check_4bit, check_path, load_model, tokenizer_source
from hf_posenc.checkpoint.pretrained import load_tokenizer
from hf_posenc.cli.shared_arguments import FinetuneModelArguments, TrainingDocumentArguments
from hf_posenc.cli.sources import read_examples, stream
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.report import text_table
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.examples import ExampleTokenizer
from hf_posenc.training.extending import dry_run
from hf_posenc.training.fine_tuning import finetune
from hf_posenc.training.setting_checks import check_combination
from hf_posenc.training.texts import to_token_ids
from hf_posenc.utils.launching import own_device

logger = logging.getLogger(__name__)


def run_finetune(
    name: str,
    config: FinetuneConfig,
    source: TrainingDocumentArguments,
    loading: FinetuneModelArguments,
    tokens_trained: int | None,
) -> None:
    """Fine-tune a model and print its perplexities as it came, before and after.

    Args:
        name: Of the model on the Hub, its folder or .gguf file.
        config: The run.
        source: Where the texts come from.
        loading: How the model is loaded.
        tokens_trained: Tokens it was fine-tuned on before; None if that is not known, and counting begins at 0.

    Raises:
        ValueError, TypeError: Settings, model and texts do not go together.
    """
    check_combination(config, attention=loading.attn_implementation, quantised=loading.load_in_4bit or None)
    told = {**vars(source), **vars(loading)}
    if config.use_cpu:
        loading.device = "cpu"
    loading.device = own_device(loading.device)
    if loading.load_in_4bit:
        check_4bit(name, config.lora)
    check_path(Path(name).expanduser(), name)
    chat_template = read_chat_template(source.chat_template_path)
    dry_run(name, config, attention=loading.attn_implementation)
    streamed = source.streaming and source.documents != "-"
    documents: Iterable[Any] = stream(source) if streamed else read_examples(source)
    if config.assistant_only_loss or config.completion_only_loss or not isinstance(next(iter(documents)), str):
        tokenizer = _tokenizer_of(name, chat_template)
        documents = _tokenized(documents, tokenizer, config)
    model, tokenizer = load_model(name, **vars(loading))
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokens_trained is None:
        logger.warning("%s does not say how many tokens it was trained on. Counting begins with this run.", name)
    result = finetune(model, tokenizer, documents, config, tokens_trained=tokens_trained or 0, source=told)
    if os.environ.get("RANK", "0") != "0":  # torchrun and accelerate: the first process speaks for all
        return
    print(text_table(result.records))
    print(f"\ntrained on {result.tokens_trained:,} tokens in all; saved: {result.output_dir}")


def read_chat_template(path: str | None) -> str | None:
    """Return what a chat template's file holds.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no text.
    """
    if path is None:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingFileError(f"--chat-template-path: there is no file {path!r}. Give a file with a Jinja template.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"--chat-template-path: {path!r} is no text, so no template: {error}.") from error


def _tokenizer_of(name: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer without the model: what chats are refused for is said before weights are loaded."""
    path = Path(name).expanduser()
    try:
        tokenizer = load_tokenizer(tokenizer_source(str(path if path.exists() else name)))
    except OSError as error:
        raise InvalidRequestError(
            f"the tokenizer of {name!r} cannot be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _tokenized(documents: Iterable[Any], tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Iterable[Any]:
    """Return the tokens of documents; a stream is returned as it came, once its first document suits."""
    if isinstance(documents, list):
        return to_token_ids(tokenizer, documents, config)
    ExampleTokenizer(tokenizer, config)(next(iter(documents)), "document 0")
    return documents
