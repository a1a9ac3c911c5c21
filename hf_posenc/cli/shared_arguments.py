"""The flags that several commands have, as dataclasses whose help texts are their documentation, and their parser.

The flags of one command are in its file, or are the fields of the configs that it lists. Nothing here imports PyTorch,
so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from hf_posenc.errors import HfPosencError, InvalidRequestError, add_flags, did_you_mean

if TYPE_CHECKING:
    from hf_posenc.data.columns import Document
    from hf_posenc.data.reading import DocumentStream

_EXAMPLES = "examples:\n"
TRACEBACK, TRACEBACK_HELP = "--traceback", "show where an error came from"
# The help of the argument that most commands begin with.
MODEL = {"model": "name on the Hub, folder or .gguf file"}


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

    def texts(self) -> list[str]:
        """Return all texts.

        Raises:
            OSError, ValueError: There are none, they are chats, or they cannot be read.
        """
        from hf_posenc.data.reading import read_documents

        return read_documents(self._named(), **self._of_dataset())

    def examples(self) -> list[Document]:
        """Return all texts, chats, and prompts with answers.

        Raises:
            OSError, ValueError: There are none, or they cannot be read.
        """
        from hf_posenc.data.reading import DocumentStream

        return DocumentStream(self._named(), **self._of_dataset(), whole=True).all()

    def stream(self) -> DocumentStream:
        """Return what reads them one by one, each when it is needed.

        Raises:
            OSError, ValueError: As for ``examples``.
        """
        from hf_posenc.data.reading import DocumentStream

        examples = DocumentStream(self._named(), **self._of_dataset())
        if next(iter(examples), None) is None:  # now, not once the model is loaded
            raise InvalidRequestError(f"{self.documents!r} holds no text.")
        return examples

    def _named(self) -> str:
        if not self.documents:
            raise InvalidRequestError("the following arguments are required: --documents")
        return self.documents

    def _of_dataset(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in ("text_field", "template", "split", "config_name")}
        if self.template is not None:
            settings["template"] = self.template.replace("\\n", "\n")  # which a shell leaves as two characters
        return settings


def parse(
    command: str,
    summary: str | None,
    argv: Sequence[str],
    known: Sequence[Any],
    positional: dict[str, str],
    several: bool = False,
    defaults: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
) -> Any:
    """Parse the words that follow a command.

    Args:
        command: Its name, for the help and the messages.
        summary: What it does, a docstring: its first line and its examples are for the help.
        argv: The words.
        known: The dataclasses to fill.
        positional: Positional arguments with their help.
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
            raise InvalidRequestError(f"{message} (hf-posenc {command} --help lists the flags)")

        def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
            try:
                return super()._get_value(action, arg_string)
            except argparse.ArgumentError as error:
                if isinstance(error.__context__, HfPosencError):  # which argparse replaces by the name of the type
                    raise argparse.ArgumentError(action, str(error.__context__)) from None
                raise

        def _get_option_tuples(self, option_string: str) -> list[Any]:
            # A flag with dashes and with underscores is one: an abbreviation of both is not ambiguous.
            return list({id(found[0]): found for found in super()._get_option_tuples(option_string)}.values())

    usage = " ".join(
        ["hf-posenc", command, *(name.upper() + (" ..." if several else "") for name in positional), "[flags]"]
    )
    examples = "\n".join(f"  {example}" for example in examples_in(summary))
    parser = Parser(known, usage=usage, description=first_line(summary), formatter_class=_Help)
    parser.epilog = f"{_EXAMPLES}{examples}" if examples else None
    for action in parser._actions:  # both forms are read, and those with dashes shown, in help and in messages
        action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    for name, help_text in positional.items():
        parser.add_argument(name, help=help_text, metavar=name.upper(), nargs="+" if several else None)
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)  # for main, which looks for the word
    _group_flags(parser, known)
    _check_flags(command, argv, parser)
    parser.set_defaults(command=command)  # so that a namespace is returned even where nothing is positional
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
        for title, of_group in getattr(kind, "HELP_GROUPS", {first_line(kind.__doc__).rstrip("."): names}).items():
            group = parser.add_argument_group(title)
            for action in [action for action in flags if action.dest in of_group]:
                flags.remove(action)
                group._group_actions.append(action)


def first_line(text: str | None) -> str:
    """Return the first line of a docstring."""
    return (text or "").partition("\n")[0]


def examples_in(text: str | None) -> list[str]:
    """Return the commands in the section ``Examples:`` of a docstring, one a line."""
    section = (text or "").partition("\n    Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in section.splitlines() if line.strip()]


def _check_flags(command: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse a flag that a command does not have, with the nearest one, before any other mistake is reported.

    Raises:
        ValueError: A flag is unknown.
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
        action.default = argparse.SUPPRESS  # only what the words say, also where it is the default
    for action in required:
        action.required = False
    given = parser.parse_args(list(argv))
    for action, default in usual:
        action.default = default
    values = defaults(given)
    parser.set_defaults(**values)
    for action in required:
        action.required = action.dest not in values


class _Help(argparse.HelpFormatter):
    """Flags with their values once, defaults only where flags have any, and examples as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        values = "" if action.nargs in (0, "?") else self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {values}".strip()

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.option_strings and action.required:
            return f"{text} (required)".replace("%", "%%")
        if not action.option_strings or not action.default or action.default == argparse.SUPPRESS:
            return text
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
        return f"{text} (default: {default})".replace("%", "%%")


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return ``{"beta_fast": 16, "ramp": "paper"}`` for ``["beta_fast=16", "ramp=paper"]``; values are JSON or words.

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
