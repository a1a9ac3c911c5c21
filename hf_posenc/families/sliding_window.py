"""Sliding windows: how far information reaches, and what becomes of a window that ends before the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.family_data import FULL_ATTENTION
from hf_posenc.spec import check_length
from hf_posenc.utils.units import ContextLength
from hf_posenc.utils.warning import warn_user

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEEP, OFF = "keep", "off"


def window_of_all_layers(config: PreTrainedConfig) -> int | None:
    """Return the sliding window, in tokens, that every layer has; None if some layer reads the whole context."""
    if FULL_ATTENTION & set(getattr(config, "layer_types", None) or ()):
        return None
    return int(getattr(config, "sliding_window", None) or 0) or None


def choose_window(config: PreTrainedConfig, requested: str | int, target: int) -> int | None:
    """Return the window a model is to have: a number of tokens, or None for none.

    Args:
        config: The model's text config.
        requested: ``"keep"``, ``"off"``, or a number of tokens.
        target: The length the model is extended to, in tokens.

    Raises:
        ValueError: The model has no window on every layer that could be changed, or information cannot reach as far
            as ``target`` through the window that stays: it moves on by one window in each layer.
    """
    window = window_of_all_layers(config)
    if requested != KEEP and window is None:
        raise InvalidRequestError(
            f"{argument('sliding_window', requested)}: model_type {config.model_type!r} has no sliding window on every "
            "layer, so there is nothing to change (where others read everything, layers with a window keep it)."
        )
    if requested != KEEP and not can_change(config):
        raise InvalidRequestError(
            f"{argument('sliding_window', requested)}: each layer of model_type {config.model_type!r} keeps the window "
            f"that it is built with (config.layer_types), which is {window} tokens, so it cannot be changed."
        )
    if requested == OFF:
        return None
    chosen = window if requested == KEEP else int(check_window(requested))
    if chosen is None:
        return None
    reach = chosen * int(config.num_hidden_layers)
    if reach < target:
        raise InvalidRequestError(
            f"a sliding window of {chosen} tokens on {config.num_hidden_layers} layers carries information at most "
            f"{reach} tokens, so {target} cannot be reached. "
            + (f"Pass {argument('sliding_window', 'off')}, or a larger one." if can_change(config) else "")
        )
    return chosen


def can_change(config: PreTrainedConfig) -> bool:
    """Return whether layers read the window from the config, and not from what they were built with."""
    return not getattr(config, "layer_types", None)


def check_window(requested: str | int) -> str | int:
    """Return ``"keep"``, ``"off"`` or a number of tokens, which may be given as ``"4k"``.

    Raises:
        ValueError, TypeError: It is none of them.
    """
    if requested in (KEEP, OFF):
        return requested
    try:
        return check_length(
            argument("sliding_window"), ContextLength(requested) if isinstance(requested, str) else requested
        )
    except ValueError as error:
        raise InvalidRequestError(
            f"{argument('sliding_window')} must be 'keep', 'off' or a number of tokens: {error}"
        ) from None


def warn_about_window(config: PreTrainedConfig, target: int) -> None:
    """Say how far information reaches, and how, if a window that every layer has ends before ``target`` tokens."""
    window = window_of_all_layers(config)
    if window is not None and window < target:
        layers = int(config.num_hidden_layers)
        warn_user(
            f"config.sliding_window is {window}: each layer looks back {window} tokens, so what is further away "
            f"arrives only through other tokens (at most {window} x {layers} layers = {window * layers})."
            + (f" Pass {argument('sliding_window', 'off')} to attend to all of it." if can_change(config) else "")
        )
