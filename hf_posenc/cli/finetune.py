"""``hf-posenc finetune``: load, train, and say what came of it."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posenc.cli.output_folders import check_folder
from hf_posenc.cli.shared_arguments import (
    MODEL,
    DocumentArguments,
    ModelArguments,
    OptionArguments,
    parse,
    parse_options,
)
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.utils.launching import LaunchArguments, launch_words, relaunch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_posenc.training.config import FinetuneConfig

logger = logging.getLogger(__name__)


@dataclass
class FinetuneModelArguments(ModelArguments):
    """How the model is loaded."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = ()

    load_in_4bit: bool = field(
        default=False,
        metadata={"help": "hold the weights in 4 bits (bitsandbytes, NF4, nested), to train --lora adapters on them"},
    )


@dataclass
class TrainingDocumentArguments(DocumentArguments):
    """Where the texts to train on come from."""

    streaming: bool = field(
        default=False,
        metadata={
            "help": "read a dataset as a stream, only until the token budget and the held-out texts are complete"
        },
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "Jinja file with a chat template, used and saved instead of the tokenizer's"},
    )


@dataclass
class RunArguments:
    """The run."""

    config: str | None = field(
        default=None,
        metadata={
            "help": "TOML or YAML file of flags (options of the method under options), such as run.toml of an earlier "
            "run; flags override it, and it overrides --recipe"
        },
    )


def finetune(argv: Sequence[str]) -> None:
    """Extend a model, fine-tune it on a budget of tokens, measure it before and after, and save it.

    Examples:
        hf-posenc finetune MODEL --documents books/ --method yarn --factor 4 --token-budget 1M --output-dir trained
        hf-posenc finetune MODEL --config run.toml --output-dir again
    """
    from hf_posenc.training import FinetuneConfig
    from hf_posenc.training.run_file import settings_besides_flags

    settable = (FinetuneConfig, TrainingDocumentArguments, FinetuneModelArguments)
    given, config, source, loading, options, _, launch = parse(
        "finetune",
        finetune.__doc__,
        argv,
        (*settable, OptionArguments, RunArguments, LaunchArguments),
        MODEL,
        defaults=lambda flags: settings_besides_flags(flags, settable),
    )
    if options.option:
        config = dataclasses.replace(config, options={**config.options, **parse_options(options.option)})
    check_folder(given.model, config.output_dir)
    if words := launch_words(launch, argv):
        relaunch(words)
    run_finetune(given.model, config, source, loading)


def run_finetune(
    name: str,
    config: FinetuneConfig,
    source: TrainingDocumentArguments,
    loading: FinetuneModelArguments,
) -> None:
    """Fine-tune a model and print the perplexities of the base model, and before and after.

    Args:
        name: Name of the model on the Hub, its folder or .gguf file.
        config: The run.
        source: Where the texts come from.
        loading: How the model is loaded.

    Raises:
        ValueError, TypeError: Settings, model and texts do not go together.
    """
    from hf_posenc.checkpoint.loading import check_path, load_model
    from hf_posenc.checkpoint.manifest import has_base_weights, tokens_trained
    from hf_posenc.checkpoint.quantised import check_4bit
    from hf_posenc.data.examples import ExampleTokenizer
    from hf_posenc.families.rotary_model import RotaryModel
    from hf_posenc.publishing.repository import make_repository
    from hf_posenc.reporting import text_table
    from hf_posenc.training.base_model_facts import ModelFacts
    from hf_posenc.training.data import read_tokens
    from hf_posenc.training.dry_run import dry_run
    from hf_posenc.training.launch import Launch
    from hf_posenc.training.run_plan import plan_run
    from hf_posenc.training.training_run import Run
    from hf_posenc.utils.launching import own_device

    launch = Launch.from_environment()
    as_given = {**vars(source), **vars(loading)}
    if config.use_cpu:
        loading.device = "cpu"
    loading.device = own_device(loading.device)
    if loading.load_in_4bit:
        check_4bit(name, config.lora)
    check_path(Path(name).expanduser(), name)
    chat_template = _read_chat_template(source.chat_template_path)
    planned = partial(
        dry_run, name, config, launch, attention=loading.attn_implementation, is_quantised=loading.load_in_4bit or None
    )
    planned()
    streamed = source.streaming and source.documents != "-"
    documents: Iterable[Any] = source.stream(whole=False) if streamed else source.stream().all()
    if (first := next(iter(documents), None)) is None:  # of a stream
        raise InvalidRequestError(f"{source.documents!r} holds no text.")
    special = config.assistant_only_loss or config.completion_only_loss or config.task_mix is not None
    if special or not isinstance(first, str):
        tokenizer = _tokenizer_of(name, chat_template)
        tokenize = ExampleTokenizer(
            tokenizer, assistant_only_loss=config.assistant_only_loss, completion_only_loss=config.completion_only_loss
        )
        if isinstance(documents, list):
            documents = read_tokens(tokenize, documents)
        else:  # a stream is read later, but its first document has to suit
            tokenize(first, "document 0")
    if config.task_mix is not None:  # a stream is read twice, as far as the budget goes
        planned(texts=(tokenizer, documents))
    is_first = os.environ.get("RANK", "0") == "0"  # of torchrun's or accelerate's processes
    repository = make_repository(**config.hub) if config.hub and is_first else None  # before the weights are loaded
    model, tokenizer = load_model(name, **vars(loading))
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    trained = tokens_trained(name)
    if trained is None:
        logger.warning("%s does not say how many tokens it was trained on. Counting begins with this run.", name)
    plan = plan_run(config, ModelFacts.of(RotaryModel(model)), launch, as_given)
    run = Run(plan, model, tokenizer, trained or 0, is_base=has_base_weights(name), repository=repository)
    result = run.do(documents)
    if not is_first:
        return
    print(text_table([*result.records, *result.answers]))
    print(f"\ntrained on {result.tokens_trained:,} tokens in all; saved: {result.output_dir}")


def _read_chat_template(path: str | None) -> str | None:
    """Return the content of a chat template's file.

    Raises:
        FileNotFoundError: The file does not exist.
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
    from hf_posenc.checkpoint.loading import read_tokenizer

    tokenizer = read_tokenizer(name)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
