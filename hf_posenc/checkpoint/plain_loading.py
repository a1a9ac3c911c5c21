"""Loading what is in ``config.json`` and nothing else, where loading is otherwise extended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_plain: ContextVar[bool] = ContextVar("plain_loading", default=False)


@contextmanager
def plain_loading() -> Iterator[None]:
    """While open, ``from_pretrained`` loads what is in ``config.json`` and nothing else, as without hf_posenc."""
    token = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(token)


def is_plain_loading() -> bool:
    """Return whether ``plain_loading`` is open."""
    return _is_plain.get()
