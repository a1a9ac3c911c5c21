"""The errors that hf_posenc raises on purpose, each with what a program that catches it needs as fields.

``except HfPosencError`` catches them all. Each class is also the built-in exception that the mistake would be
anywhere else, so ``except ValueError`` catches a bad value and ``except FileNotFoundError`` a file that is missing.
Warnings and errors name arguments by ``argument``, so that a command can name its flags instead.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class HfPosencError(Exception):
    """Any error that hf_posenc raises on purpose; its text says what came, what is allowed and what to do."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call the class with the text alone, and subclasses take their fields instead.
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[HfPosencError], args: tuple[Any, ...]) -> HfPosencError:
    error = kind.__new__(kind)
    error.args = args
    return error


class InvalidRequestError(HfPosencError, ValueError):
    """A value, or a combination of values, that is not allowed; or data, a file or a model that does not fit."""


class InvalidTypeError(HfPosencError, TypeError):
    """A value of a type that is not allowed, or an argument that nothing takes."""


class UnknownNameError(InvalidRequestError):
    """A name that nothing has.

    Attributes:
        kind: What it was to name: "method", "preset", "recipe", "command".
        name: As it was given.
        known: The names there are, in the order to show them in.
    """

    def __init__(self, kind: str, name: Any, known: Iterable[str], key: Any = None) -> None:
        """Make the text, with the nearest known name.

        Args:
            kind: As the attribute.
            name: As the attribute.
            known: As the attribute.
            key: ``name`` as the known ones are written, in lower case for example; None if it needs no change.
        """
        self.kind, self.name, self.known = kind, name, tuple(known)
        hint = did_you_mean(name if key is None else key, self.known)
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(self.known)}.")


class UnknownOptionError(InvalidTypeError):
    """An option that a method does not have.

    Attributes:
        method: Its name.
        option: The option's name.
        known: The options it has.
        methods: The methods that have the option.
    """

    def __init__(self, method: str, option: str, known: Iterable[str], methods: Iterable[str]) -> None:
        """Make the text, with the method's own options and the methods that have this one."""
        self.method, self.option, self.known, self.methods = method, option, tuple(known), tuple(methods)
        others = f" ({', '.join(self.methods)} {'does' if len(self.methods) == 1 else 'do'})" if self.methods else ""
        allowed = f" It takes: {', '.join(self.known)}." if self.known else " It takes none."
        super().__init__(f"method {method!r} takes no option {option!r}{others}.{allowed}")


class UnsupportedModelError(HfPosencError, ValueError):
    """A model that cannot be extended, or not by this method.

    Attributes:
        model_type: Model type of its config.
        method: The method that it does not support; None if it supports none.
        reason: Why, as the end of a sentence without its full stop.
        code: The reason's key in ``families.refusals.REASONS``; None if it has none.
        values: What the reason's text is filled in with.
    """

    def __init__(
        self,
        model_type: str,
        reason: str,
        method: str | None = None,
        *,
        code: str | None = None,
        values: Mapping[str, Any] | None = None,
        advice: str = "",
    ) -> None:
        """Make the text; ``advice`` is a sentence that follows the reason."""
        self.model_type, self.reason, self.method = model_type, reason, method
        self.code, self.values = code, dict(values or {})
        what = f"model_type {model_type!r}"
        text = f"{what} is not supported" if method is None else f"method {method!r} is not supported for {what}"
        super().__init__(f"{text}: {reason}.{f' {advice}' if advice else ''}")


class AlreadyExtendedError(HfPosencError, ValueError):
    """A model that is patched, or whose checkpoint is scaled, is to be extended again: factors do not multiply.

    Attributes:
        method: What it is extended by.
        factor: Its target / original length.
    """

    def __init__(self, message: str, method: str, factor: float) -> None:
        """Take the text as it is."""
        self.method, self.factor = method, factor
        super().__init__(message)


class RotaryMismatchError(HfPosencError, RuntimeError):
    """A live model does not compute the positions that its config or its patch says."""


class ExtensionMissingError(RotaryMismatchError):
    """A live model does not run the extension that its config, or a checkpoint's manifest, describes.

    Transformers' ``from_config`` and accelerate's ``load_checkpoint_and_dispatch`` build such models of folders whose
    method no config can express.

    Attributes:
        expected: What the config or the manifest says, by the names of ``describe``; only what differs.
        held: What the model runs, by the same names.
        reason: What differs, as a sentence without its full stop.
    """

    def __init__(self, expected: Mapping[str, Any], held: Mapping[str, Any], said_by: str, checkpoint: str) -> None:
        """Make the text, with the call that loads the model.

        Args:
            expected: As the attribute.
            held: As the attribute.
            said_by: What describes the extension: "its config", or the path of a manifest.
            checkpoint: The folder or name that holds the extension; "" where it is not known.
        """
        self.expected, self.held = dict(expected), dict(held)
        differing = ", ".join(f"{name} is {held.get(name)!r} and not {value!r}" for name, value in expected.items())
        source = repr(checkpoint) if checkpoint else "FOLDER"
        self.reason = f"the model does not run the extension that {said_by} describes: {differing}"
        super().__init__(
            f"{self.reason}. Load it with hf_posenc.load_extended({source}), which takes device_map and dtype as "
            "from_pretrained does; or call patch_model on the model that you have, with the same method, lengths and "
            "options."
        )


class RotaryOutputError(RotaryMismatchError):
    """A rotary module holds the right values, and hands out a cos and sin that do not come from them."""


class RunStoppedError(HfPosencError, RuntimeError):
    """A run was stopped, in training or in another of its processes, because its results would be wrong."""


class MissingFileError(HfPosencError, FileNotFoundError):
    """A file or folder that is not there."""


class HubUnreachableError(HfPosencError, ConnectionError):
    """The Hugging Face Hub does not answer, or must not be asked: no network, offline mode, a fault of the server.

    Attributes:
        repo_id: The repository that was wanted.
    """

    def __init__(self, message: str, repo_id: str) -> None:
        """Take the text as it is."""
        self.repo_id = repo_id
        super().__init__(message)


class HubAccessError(HfPosencError, PermissionError):
    """The Hugging Face Hub refuses a repository: it is not there, or private, or the token lacks the right.

    Attributes:
        repo_id: The repository that was wanted.
        status: HTTP status of the answer; None where there is no token to ask with.
    """

    def __init__(self, message: str, repo_id: str, status: int | None) -> None:
        """Take the text as it is."""
        self.repo_id, self.status = repo_id, status
        super().__init__(message)


class MissingPackageError(HfPosencError, ImportError):
    """An optional package that is not installed, or cannot be imported; the text says how to install it."""


def did_you_mean(name: Any, known: Iterable[str], *, most: int = 1, shown: Callable[[str], str] = repr) -> str:
    """Return `` Did you mean 'yarn'?`` for a name that nothing known has, beginning with a space; "" if none is near.

    Args:
        name: As it was given.
        known: What it can be.
        most: Names suggested at most.
        shown: How a name is written in the message.
    """
    near = difflib.get_close_matches(str(name), list(known), n=most)
    return f" Did you mean {' or '.join(map(shown, near))}?" if near else ""


# The arguments for which the command that runs has flags; None outside of the command line.
_flags: ContextVar[set[str] | None] = ContextVar("flags_of_the_command", default=None)
_NO_VALUE = object()


def argument(name: str, value: Any = _NO_VALUE) -> str:
    """Return an argument as the user writes it: ``sliding_window='off'``, or ``--sliding-window off`` in a command.

    Args:
        name: In Python.
        value: What it is to be given; nothing, to name the argument alone.
    """
    flags = _flags.get()
    if flags is None or name not in flags:
        return name if value is _NO_VALUE else f"{name}={value!r}"
    flag = f"--{name.replace('_', '-')}"
    if value is _NO_VALUE or value is True:
        return flag
    words = (
        "false" if word is False else str(word) for word in (value if isinstance(value, (list, tuple)) else [value])
    )
    # The line ends of a template are typed as the two characters \\n, and a message is one line.
    return " ".join([flag, *(shlex.quote("\\n".join(word.splitlines())) for word in words)])


@contextmanager
def arguments_named_as_flags() -> Iterator[None]:
    """While open, ``argument`` writes those that ``add_flags`` was given as flags."""
    token = _flags.set(set())
    try:
        yield
    finally:
        _flags.reset(token)


def add_flags(names: Iterable[str]) -> None:
    """Say which arguments are flags of the command that runs; outside of the command line it has no effect."""
    flags = _flags.get()
    if flags is not None:
        flags.update(names)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
