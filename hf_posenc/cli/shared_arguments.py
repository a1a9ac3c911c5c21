"""What the commands take, as dataclasses: each field is a flag, and its help text its documentation.

And the parser that fills them; ``checks`` has what can be said of them before a model is loaded.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn

from hf_posenc.errors import InvalidRequestError, add_flags, did_you_mean
from hf_posenc.utils.units import ContextLength, Duration, TokenCount

TRACEBACK, TRACEBACK_HELP = "--traceback", "show where an error came from"
# The same as in exports.stacks, which imports PyTorch too.
STACKS = ("vllm", "sglang", "llama.cpp", "tgi")


@dataclass
class ModelArguments:
    """How the model is loaded."""

    dtype: str = field(
        default="auto",
        metadata={
            "help": "auto (the checkpoint's own where the hardware has instructions for it, else float32), checkpoint "
            "(its own everywhere), float32, bfloat16 or float16"
        },
    )
    device: str | None = field(
        default=None, metadata={"help": "cpu, cuda, auto (all GPUs); default: a GPU if there is one"}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa, eager, flash_attention_2, ..."})


@dataclass
class FinetuneModelArguments(ModelArguments):
    """How the model is loaded to be trained."""

    load_in_4bit: bool = field(
        default=False,
        metadata={"help": "hold the weights in 4 bits (NF4, nested; bitsandbytes) and train --lora adapters on them"},
    )


@dataclass
class RunArguments:
    """Where settings come from besides the flags."""

    config: str | None = field(
        default=None,
        metadata={
            "help": "TOML file of flags, as run.toml of an earlier run: their names are its keys, the method's options "
            "stand under [options]; flags win over it, and it wins over --recipe"
        },
    )


@dataclass
class OptionArguments:
    """The method's own options."""

    option: list[str] = field(
        default_factory=list,
        metadata={
            "help": "options of the method: --option beta_fast=16 ramp=paper",
            "action": "extend",
            "metavar": "K=V",
        },
    )


@dataclass
class DocumentArguments:
    """Where the texts come from."""

    documents: str = field(
        default="",
        metadata={
            "help": "text, .jsonl, .json, .csv or .parquet file, folder of text files, - (stdin), novel:persuasion, or "
            "a dataset's name"
        },
    )
    text_field: list[str] | None = field(
        default=None,
        metadata={
            "help": "column of texts, or of chats to train on; or two: prompt and answer. Default: text, messages, "
            "conversations, or prompt with completion, the first there is"
        },
    )
    template: str | None = field(
        default=None,
        metadata={
            "help": "instead of --text-field: a text with columns in braces, the last of them the answer: "
            r"'Question: {question}\nAnswer: {answer}' (\n ends a line)"
        },
    )
    split: str = field(default="train", metadata={"help": "split of a dataset"})
    config_name: str | None = field(default=None, metadata={"help": "configuration of a dataset"})


@dataclass
class TrainingDocumentArguments(DocumentArguments):
    """Where the texts to train on come from."""

    streaming: bool = field(
        default=False,
        metadata={"help": "read a dataset as a stream, and only until the token budget and the held-out are filled"},
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "Jinja file with the chat template to use, and to save, instead of the tokenizer's"},
    )


@dataclass
class PatchArguments:
    """Which rule is written into the checkpoint."""

    method: str | None = field(
        default=None, metadata={"help": "a name from `hf-posenc methods`; default: yarn, unless --preset is given"}
    )


@dataclass
class ReportArguments:
    """Where a report goes."""

    output_dir: str = field(default="report", metadata={"help": "folder for report.html, report.md and the plots"})
    title: str = field(
        default="Results by context length",
        metadata={"help": "heading of the report; names the models if this does not"},
    )


@dataclass
class ExportArguments:
    """Which program is to run the model."""

    to: str = field(metadata={"help": "one of vllm, sglang, llama.cpp, tgi", "choices": STACKS})
    # A keyword of Python, so the field has another name than the flag.
    as_method: str | None = field(
        default=None,
        metadata={
            "help": "for a rule that only hf_posenc runs: the static rule to run in its place, such as yarn",
            "aliases": ["--as"],
            "metavar": "METHOD",
        },
    )


@dataclass
class MethodsArguments:
    """What is listed."""

    families: bool = field(
        default=False, metadata={"help": "list the model types that can be extended, and why others cannot"}
    )


@dataclass
class DoctorArguments:
    """Where the mended config goes, and what the config does not say."""

    live: bool = field(
        default=False, metadata={"help": "load the model too, and hold its modules against what the config means"}
    )
    fix: str | None = field(
        default=None, metadata={"help": "write a mended config to this folder or .json file (the input gets a .bak)"}
    )
    original_max_position_embeddings: ContextLength | None = field(
        default=None, metadata={"help": "tokens the model was trained on, where the config does not say it"}
    )
    rope_theta: float | None = field(default=None, metadata={"help": "the base, where the config lost it"})
    ramp: Literal["code", "paper", "harmonic"] | None = field(
        default=None, metadata={"help": "curve that a YaRN model was trained with: harmonic for PoSE's"}
    )
    trained_length: ContextLength | None = field(
        default=None, metadata={"help": "tokens a LongLoRA merge was tuned to, whose config lacks the linear rule"}
    )
    capabilities: bool = field(
        default=False, metadata={"help": "without PATH: the model types that can be extended, and why others cannot"}
    )


@dataclass
class DemoArguments:
    """How long the demo may train, and where its files go."""

    output_dir: str = field(default="outputs/demo", metadata={"help": "folder for results, report and trained model"})
    token_budget: TokenCount = field(default=TokenCount("100k"), metadata={"help": "tokens to fine-tune on"})
    dtype: str = field(default="auto", metadata={"help": "as for eval; auto is what the hardware computes natively"})


def parse(
    command: str,
    summary: str,
    argv: Sequence[str],
    known: Sequence[Any],
    places: dict[str, str],
    several: bool = False,
    defaults: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
) -> Any:
    """Parse the words that follow a command.

    Args:
        command: Its name, for the help and the messages.
        summary: One sentence, for the help.
        argv: The words.
        known: The dataclasses to fill.
        places: Positional arguments with their help.
        several: Whether a positional argument takes one or more words.
        defaults: Given what the flags say, returns values for flags that were not given; a flag that has one is not
            required.

    Returns:
        The positional arguments (a namespace), then one instance of each dataclass.

    Raises:
        ValueError: The words do not fit.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            message = re.sub(r"--\w+/(--[\w-]+)", r"\1", message)  # a flag once, with dashes
            raise InvalidRequestError(f"{message} (hf-posenc {command} --help lists the flags)")

        def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
            try:
                return super()._get_value(action, arg_string)
            except argparse.ArgumentError as error:  # argparse tells the name of our class instead of what it said
                if action.type in (ContextLength, TokenCount, Duration):
                    raise argparse.ArgumentError(action, str(error.__context__)) from None
                raise

        def _get_option_tuples(self, option_string: str) -> list[Any]:
            # A flag and its spelling with underscores are one: an abbreviation of both is not ambiguous.
            return list({id(found[0]): found for found in super()._get_option_tuples(option_string)}.values())

    usage = " ".join(
        ["hf-posenc", command, *(name.upper() + (" ..." if several else "") for name in places), "[flags]"]
    )
    parser = Parser(known, usage=usage, description=summary, formatter_class=_Help)
    for name, help_text in places.items():
        parser.add_argument(name, help=help_text, metavar=name.upper(), nargs="+" if several else None)
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)  # for main, which looks for the word
    _group_flags(parser, known)
    check_flags(command, argv, parser)
    parser.set_defaults(command=command)  # so that there is a namespace even where nothing is positional
    if defaults is not None and not {"-h", "--help"} & set(argv):
        _put_defaults(parser, argv, defaults)
    *filled, given = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    return given, *filled


def _group_flags(parser: argparse.ArgumentParser, known: Sequence[Any]) -> None:
    """List the flags in the help by what they are about: those of a dataclass, or of each of its ``HELP_GROUPS``.

    A dataclass' ``HELP_HIDDEN`` are flags too, which the help leaves out.
    """
    flags = parser._optionals._group_actions
    for kind in known:
        names = tuple(one.name for one in fields(kind))
        for action in flags:
            if action.dest in getattr(kind, "HELP_HIDDEN", ()):
                action.help = argparse.SUPPRESS
        for title, of_group in getattr(kind, "HELP_GROUPS", {_first_line(kind): names}).items():
            group = parser.add_argument_group(title)
            for action in [action for action in flags if action.dest in of_group]:
                flags.remove(action)
                group._group_actions.append(action)


def _first_line(kind: Any) -> str:
    return str(kind.__doc__).splitlines()[0].rstrip(".")


def check_flags(command: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse a flag that a command does not have, with the one it may stand for, before any other mistake is told.

    Raises:
        ValueError: There is one.
    """
    known = [flag for flag in parser._option_string_actions if flag.startswith("--") and "_" not in flag]
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and len(name) > 2 and not any(flag.startswith(name) for flag in known):
            hint = did_you_mean(name, known, shown=str)
            raise InvalidRequestError(f"there is no flag {name}.{hint} (hf-posenc {command} --help lists the flags)")
    add_flags(flag.removeprefix("--").replace("-", "_") for flag in known)


def _put_defaults(
    parser: argparse.ArgumentParser, argv: Sequence[str], defaults: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Read the words once for what decides the defaults, and put these in."""
    required = [action for action in parser._actions if action.required and action.option_strings]
    usual = [(action, action.default) for action in parser._actions]
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # only what the words say: a value like the default is told too
    for action in required:
        action.required = False
    told = parser.parse_args(list(argv))
    for action, default in usual:
        action.default = default
    values = defaults(told)
    parser.set_defaults(**values)
    for action in required:
        action.required = action.dest not in values


class _Help(argparse.HelpFormatter):
    """Flags with dashes only (underscores work too), and defaults only where there are any."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        values = "" if action.nargs in (0, "?") else self._format_args(action, action.dest.upper())
        flags = ", ".join(flag for flag in action.option_strings if "_" not in flag)
        return f"{flags} {values}".strip()

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.option_strings and action.required:
            return f"{text} (required)".replace("%", "%%")
        if not action.option_strings or not action.default or action.default == argparse.SUPPRESS:
            return text
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
        return f"{text} (default: {default})".replace("%", "%%")


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Turn ``["beta_fast=16", "ramp=paper"]`` into ``{"beta_fast": 16, "ramp": "paper"}``; values are JSON or words.

    Raises:
        ValueError: A pair without ``=``, or one option given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--option takes name=value, such as beta_fast=16, got {pair!r}.")
        name = name.strip().replace("-", "_")
        if name in options:
            raise InvalidRequestError(f"--option {name} is given twice.")
        options[name] = _value(text)
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
