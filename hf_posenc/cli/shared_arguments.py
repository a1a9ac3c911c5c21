"""The flags that several commands share, and the parser of every command.

The flags of a command are the fields of dataclasses, and the help text of a field is its documentation. Three class
variables of such a dataclass arrange the help:

- ``HELP_COMMON``: the fields that ``--help`` shows; ``--help-all`` shows every field. Without it, ``--help`` shows all.
- ``HELP_GROUPS``: headings with their fields. Without it, the first line of the docstring is the only heading.
- ``HELP_HIDDEN``: fields that can be given as flags, but that neither help shows.

Nothing here imports PyTorch, so that help and error messages appear at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from hf_posenc.errors import HfPosencError, InvalidRequestError, add_flags, argument, did_you_mean
from hf_posenc.utils.units import ContextLength, Duration, MemorySize, Percent, TokenCount

if TYPE_CHECKING:
    from hf_posenc.data.reading import DocumentStream
    from hf_posenc.publishing.repository import Repository

_EXAMPLES = "examples:\n"
TRACEBACK, TRACEBACK_HELP = "--traceback", "show the Python traceback of an error"
HELP, HELP_ALL = "--help", "--help-all"
# The help of the argument that most commands begin with.
MODEL = {"model": "name on the Hub, folder or .gguf file"}


@dataclass
class ModelArguments:
    """How the model is loaded."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("dtype", "device")

    dtype: str = field(
        default="auto",
        metadata={
            "help": "float32, bfloat16, float16, checkpoint (as stored) or auto (as stored if the hardware has "
            "instructions for it, else float32)"
        },
    )
    device: str | None = field(
        default=None, metadata={"help": "cpu, cuda or auto (all GPUs); default: a GPU if there is one"}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "attention implementation of Transformers: sdpa, eager, flash_attention_2, ..."}
    )


@dataclass
class OptionArguments:
    """How the model is extended."""

    option: list[str] = field(
        default_factory=list,
        metadata={
            "help": "options of the method, such as --option beta_fast=16 ramp=paper",
            "action": "extend",
            "metavar": "K=V",
        },
    )


@dataclass
class DocumentArguments:
    """Where the texts come from."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("documents", "text_field")

    documents: str = field(
        default="",
        metadata={
            "help": "file (text, .jsonl, .json, .csv, .parquet), folder of text files, name of a dataset, "
            "novel:persuasion, or - for stdin"
        },
    )
    text_field: list[str] | None = field(
        default=None,
        metadata={
            "help": "column of the texts or chats, or two: prompt and answer; default: the first found of text, "
            "messages, conversations, prompt with completion"
        },
    )
    template: str | None = field(
        default=None,
        metadata={
            "help": "instead of --text-field: a text with columns in braces, of which the last is the answer: "
            r"'Question: {question}\nAnswer: {answer}' (\n ends a line)"
        },
    )
    split: str = field(default="train", metadata={"help": "split of a dataset"})
    config_name: str | None = field(default=None, metadata={"help": "configuration of a dataset"})

    def stream(self, *, whole: bool = True) -> DocumentStream:
        """Return the documents, to be read; ``whole`` as for ``DocumentStream``.

        Raises:
            ValueError: No documents were named.
        """
        from hf_posenc.data.reading import DocumentStream

        if not self.documents:
            raise InvalidRequestError("the following arguments are required: --documents")
        # A shell leaves \n as two characters.
        template = None if self.template is None else self.template.replace("\\n", "\n")
        return DocumentStream(self.documents, self.text_field, self.split, self.config_name, template, whole)


@dataclass
class PublishArguments:
    """Where the model is published."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("push_to_hub",)

    push_to_hub: str | None = field(
        default=None,
        metadata={
            "help": "repository of the Hub to push the model to, such as me/longer",
            "metavar": "NAME",
        },
    )
    hub_private_repo: bool | None = field(
        default=None, metadata={"help": "whether a new repository is private; default: as the account has it"}
    )
    hub_token: str | None = field(default=None, metadata={"help": "token for the Hub; default: that of the login"})
    hub_revision: str | None = field(default=None, metadata={"help": "branch to push to; default: the main one"})

    def make_repository(self) -> Repository | None:
        """Make the repository and see that it can be written to, before anything expensive; None if none is named.

        Raises:
            HubAccessError, HubUnreachableError, ValueError: It cannot, or it is not named and the others are given.
        """
        rest = {name: value for name, value in vars(self).items() if name != "push_to_hub" and value is not None}
        if self.push_to_hub is None:
            if rest:
                raise InvalidRequestError(
                    f"{' and '.join(map(argument, rest))} say how a model is pushed: name the repository with "
                    f"{argument('push_to_hub')} OWNER/NAME."
                )
            return None
        from hf_posenc.publishing.repository import make_repository

        return make_repository(
            self.push_to_hub, private=self.hub_private_repo, token=self.hub_token, revision=self.hub_revision
        )


def parse(
    command: str,
    summary: str | None,
    argv: Sequence[str],
    known: Sequence[Any],
    positional: dict[str, str],
    nargs: Mapping[str, str] | None = None,
    defaults: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
) -> Any:
    """Parse the words that follow a command.

    Args:
        command: Its name, for the help and the messages.
        summary: What it does, a docstring: its first line and its examples are for the help.
        argv: The words.
        known: The dataclasses to fill.
        positional: Positional arguments with their help.
        nargs: Number of positional arguments, as for argparse: ``"+"`` for one or more words, ``"?"`` for none or one.
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

        def _check_value(self, action: argparse.Action, value: Any) -> None:
            if action.choices is not None and value not in action.choices:
                known = [str(choice) for choice in action.choices]
                message = f"unknown value {str(value)!r}.{did_you_mean(str(value), known)} Known: {', '.join(known)}."
                raise argparse.ArgumentError(action, message)

        def _get_option_tuples(self, option_string: str) -> list[Any]:
            # A flag with dashes and with underscores is one: an abbreviation of both is not ambiguous.
            return list({id(found[0]): found for found in super()._get_option_tuples(option_string)}.values())

    nargs = nargs or {}
    forms = {"+": "{} ...", "?": "[{}]"}
    words = [forms.get(nargs.get(name, ""), "{}").format(name.upper()) for name in positional]
    usage = " ".join(["hf-posenc", command, *words, "[flags]"])
    examples = "\n".join(f"  {example}" for example in examples_in(summary))
    parser = Parser(known, usage=usage, description=summary_line(summary), formatter_class=_Help, add_help=False)
    # Of --help-all: --help has no line to spare.
    parser.epilog = f"{_EXAMPLES}{examples}" if examples else None
    for action in parser._actions:  # both forms are read, and those with dashes shown, in help and in messages
        action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    for name, help_text in positional.items():
        parser.add_argument(name, help=help_text, metavar=name.upper(), nargs=nargs.get(name))
    rare = {"traceback"}.union(*map(_rare, known))
    parser.add_argument("-h", HELP, action=_ShowHelp, command=command, rare=rare, help="show the common flags and exit")
    parser.add_argument(HELP_ALL, action=_ShowHelp, command=command, rare=(), help="show every flag and exit")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)  # main looks for this word itself
    _group_flags(parser, known)
    _check_flags(command, argv, parser)
    parser.set_defaults(command=command)  # so that a namespace is returned even where nothing is positional
    if defaults is not None and not {"-h", HELP, HELP_ALL} & set(argv):
        _put_defaults(parser, argv, defaults)
    *filled, given, others = parser.parse_args_into_dataclasses(
        list(argv), look_for_args_file=False, return_remaining_strings=True
    )
    if others:
        takes = " ".join([*(name.upper() for name in positional), "and flags"]) if positional else "flags only"
        parser.error(f"unexpected {' '.join(others)!r}: hf-posenc {command} takes {takes}")
    return given, *filled


def _group_flags(parser: argparse.ArgumentParser, known: Sequence[Any]) -> None:
    """Put the flags of each dataclass under their headings."""
    flags = parser._optionals._group_actions
    groups: dict[str, Any] = {}  # dataclasses with one heading share it
    for kind in known:
        names = tuple(one.name for one in fields(kind))
        for action in flags:
            if action.dest in getattr(kind, "HELP_HIDDEN", ()):
                action.help = argparse.SUPPRESS
        one_group = {summary_line(kind.__doc__).rstrip("."): (*getattr(kind, "HELP_COMMON", names), *_rare(kind))}
        for title, of_group in getattr(kind, "HELP_GROUPS", one_group).items():
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            group = groups[title]
            for name in of_group:
                for action in [action for action in flags if action.dest == name]:
                    flags.remove(action)
                    group._group_actions.append(action)


def _rare(kind: Any) -> list[str]:
    """Return the fields of a dataclass that ``--help`` leaves out, in their order."""
    names = [one.name for one in fields(kind)]
    common = getattr(kind, "HELP_COMMON", names)
    return [name for name in names if name not in common]


class HelpShown(SystemExit):
    """The help of a command was printed, and the program ends.

    Attributes:
        parser: The parser of the command.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """Take the parser; the exit code is 0."""
        super().__init__(0)
        self.parser = parser


class _ShowHelp(argparse.Action):
    """Print the help and exit; the flags of the fields ``rare`` are left out, and their number is given instead."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, command: str, rare: Collection[str], help: str | None = None
    ) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)
        self.command, self.rare = command, rare

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        left_out = [action for action in shown if action.dest in self.rare]
        for action in left_out:
            action.help = argparse.SUPPRESS
        if left_out:
            flags = len({action.dest for action in left_out})
            parser.epilog = f"`hf-posenc {self.command} {HELP_ALL}` lists every flag ({flags} more)."
        parser.print_help()
        raise HelpShown(parser)


def summary_line(text: str | None) -> str:
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


# What stands for the value of a flag in the help, by the type of the value.
_METAVARS = {
    ContextLength: "TOKENS",
    TokenCount: "TOKENS",
    Duration: "TIME",
    MemorySize: "SIZE",
    Percent: "PERCENT",
    int: "N",
    float: "X",
}


def _metavar(action: argparse.Action) -> str:
    """Return the placeholder for the value of a flag: its kind, or the last word of the flag's name."""
    if getattr(action.type, "__name__", "") == "string_to_bool":  # HfArgumentParser's type of a bool or None
        return "{true,false}"
    return next(
        (name for kind, name in _METAVARS.items() if action.type is kind), action.dest.rpartition("_")[2].upper()
    )


class _Help(argparse.HelpFormatter):
    """Flags with their values once, defaults only where flags have any, and examples as they are written."""

    def __init__(self, prog: str, **settings: Any) -> None:
        width = min(shutil.get_terminal_size().columns, 120) - 2
        super().__init__(prog, max_help_position=36, width=width, **settings)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        values = "" if action.nargs in (0, "?") else self._format_args(action, _metavar(action))
        return f"{', '.join(action.option_strings)} {values}".strip()

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "+":
            return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."
        return super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.option_strings and action.required:
            return f"{text} (required)".replace("%", "%%")
        if not action.option_strings or not action.default or action.default == argparse.SUPPRESS:
            return text
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
        return f"{text} (default: {default})".replace("%", "%%")


def parse_options(pairs: list[str], flag: str = "--option", example: str = "beta_fast=16") -> dict[str, Any]:
    """Return ``{"beta_fast": 16, "ramp": "paper"}`` for ``["beta_fast=16", "ramp=paper"]``; values are JSON or words.

    Raises:
        ValueError: A pair without ``=``, or one option given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"{flag} takes name=value, such as {example}, got {pair!r}.")
        name = name.strip().replace("-", "_")
        if name in options:
            raise InvalidRequestError(f"{flag} {name} is given twice.")
        options[name] = _value(text)
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
