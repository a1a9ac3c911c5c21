"""Single settings of a run: which numbers, switches and words each may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posenc.spec import check_number

LR_SCHEDULES = ("constant_with_warmup", "linear", "cosine")
EIGHT_BIT_ADAMW = "adamw_bnb_8bit"
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", EIGHT_BIT_ADAMW)
# The least that whole numbers and numbers may be; of the latter, the learning rate must be above it.
_WHOLE = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "lora_rank": 1, "lora_alpha": 1, "save_steps": 1}
_WHOLE |= {"logging_steps": 1, "logits_chunk": 1, "pose_chunks": 2, "warmup_steps": 0, "eval_documents": 0, "seed": 0}
_NUMBERS = ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2")
_SHARES = ("short_share", "group_share")
_SWITCHES = (
    "lora",
    "lora_embeddings",
    "shifted_sparse_attention",
    "gradient_checkpointing",
    "resume",
    "check_first_loss",
    "assistant_only_loss",
)
_SWITCHES_OR_NONE = ("bf16", "completion_only_loss")
_CHOICES = {
    "on_scaled": ("refuse", "replace"),
    "position_schedule": ("full", "pose", "random"),
    "lora_targets": ("attention", "all-linear"),
    "lr_schedule": LR_SCHEDULES,
    "optim": (None, *OPTIMIZERS),
}


def check_count(name: str, value: Any, kind: type[int]) -> int:
    """Return a number of tokens, which may be written as ``16k``.

    Raises:
        TypeError, ValueError: It is none, or less than 1.
    """
    try:
        number = kind(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if number != value and not isinstance(value, str):
        raise ValueError(f"{name} must be a whole number of tokens, got {value!r}.")
    if number < 1:
        raise ValueError(f"{name} must be at least 1 token, got {value!r}.")
    return number


def check_numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    """Check the numbers of a run.

    Args:
        settings: All settings by name.

    Returns:
        Those that are not whole numbers by nature, as floats.

    Raises:
        TypeError, ValueError: One is no number, or out of its range.
    """
    for name, least in _WHOLE.items():
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")
    numbers = {name: check_number(name, settings[name], at_least=0) for name in (*_NUMBERS, *_SHARES)}
    for name in _SHARES:
        if numbers[name] > 1 or (name == "group_share" and numbers[name] == 0):
            raise ValueError(f"{name} must be a share between 0 and 1, got {numbers[name]}.")
    numbers["length_upsampling"] = check_number("length_upsampling", settings["length_upsampling"], at_least=1)
    for name in ("adam_beta1", "adam_beta2"):
        if not numbers[name] < 1:
            raise ValueError(f"{name} must be in [0, 1), got {numbers[name]!r}.")
    try:
        numbers["learning_rate"] = check_number("learning_rate", settings["learning_rate"], above=0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} YaRN and PI use 2e-5.") from None
    return numbers


def check_words(settings: Mapping[str, Any]) -> None:
    """Check the switches of a run, and the words that stand for one of several ways.

    Raises:
        TypeError: A switch that is not True or False.
        ValueError: An unknown word.
    """
    for name in (*_SWITCHES, *(name for name in _SWITCHES_OR_NONE if settings[name] is not None)):
        if not isinstance(settings[name], bool):
            raise TypeError(f"{name} must be True or False, got {settings[name]!r}.")
    for name, known in _CHOICES.items():
        if (word := settings[name]) not in known:
            raise ValueError(f"unknown {name} {word!r}. Known: {', '.join(filter(None, known))}.")
