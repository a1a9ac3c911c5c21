"""Single settings of a run: which numbers, switches and words each may be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, TrainingArguments

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownNameError, argument
from hf_posenc.spec import check_number

if TYPE_CHECKING:
    from hf_posenc.training.config import FinetuneConfig

EIGHT_BIT_ADAMW = "adamw_bnb_8bit"
_BITSANDBYTES = ("bnb", "paged", "lion", "ademamix")  # in the names of its optimizers; and adamw_8bit
# The least that whole numbers and numbers may be; of the latter, the learning rate must be above it.
_WHOLE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "lora_rank": 1, "lora_alpha": 1}
_WHOLE |= {"save_steps": 1, "logging_steps": 1, "logits_chunk": 1, "pose_chunks": 2, "eval_documents": 0, "seed": 0}
_NUMBERS = ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2")
_SHARES = ("short_share", "group_share")
_SWITCHES = (
    "lora",
    "lora_embeddings",
    "shifted_sparse_attention",
    "gradient_checkpointing",
    "check_first_loss",
    "assistant_only_loss",
)
_SWITCHES_OR_NONE = ("bf16", "completion_only_loss")
# Where the package that is imported is not called as the tracker is; any one of them will do.
_IMPORTED = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "kubeflow": (),  # no package: it is told where to report by the cluster
}
# Where `pip install` wants another name.
_INSTALLED = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}
_CHOICES = {
    "on_scaled": ("refuse", "replace"),
    "position_schedule": ("full", "pose", "random"),
    "lora_targets": ("attention", "all-linear"),
}
# Options of TrainingArguments whose values are those of an enumeration.
_ENUMS: dict[str, type[Enum]] = {
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
}
# Options of TrainingArguments that hf_posenc decides: why another value is refused, and what to give in its place.
_BUDGET = "token_budget says how long a run is"
_MEASURED = "perplexity is measured before and after the training (eval_lengths, eval_documents), not during it"
_BLOCKS = "documents are packed into blocks, read in an order that a resumed run repeats (seed)"
_LOGGED = (
    "every step is logged to train_log.jsonl, and a loss that is not finite stops the run (logging_steps: console)"
)
_LAUNCHED = "weights are shared out as the launcher says: --accelerate-config fsdp2, zero3, context_parallel_2gpu, ..."
_DECIDED = {
    **dict.fromkeys(("num_train_epochs", "max_steps"), _BUDGET),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "eval_strategy", "eval_steps", "eval_delay"), _MEASURED),
    **dict.fromkeys(("per_device_eval_batch_size", "prediction_loss_only", "eval_on_start"), _MEASURED),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"), _MEASURED),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval"), _MEASURED),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), _MEASURED),
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name", "group_by_length"), _BLOCKS),
    **dict.fromkeys(("train_sampling_strategy", "data_seed", "dataloader_drop_last", "ignore_data_skip"), _BLOCKS),
    **dict.fromkeys(("logging_strategy", "logging_first_step", "logging_nan_inf_filter"), _LOGGED),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config"), _LAUNCHED),
    "fp16": "half precision is bfloat16 here: give bf16",
    "label_smoothing_factor": "the loss in chunks is the plain cross-entropy",
    "auto_find_batch_size": "the tokens of a step are fixed: give a smaller per_device_train_batch_size",
    "save_only_model": "a checkpoint without the optimizer's state cannot be gone on from",
    "save_on_each_node": "the first process writes the checkpoints",
    "liger_kernel_config": "of liger-kernel the norms and MLPs are used; positions and loss stay those of hf_posenc",
    "hub_strategy": "the trained model is pushed when it is finished",
}


def is_of_bitsandbytes(optim: str) -> bool:
    """Say whether an optimizer is one of bitsandbytes, which keep their states in blocks of whole weights."""
    return optim == "adamw_8bit" or any(part in optim for part in _BITSANDBYTES)


def check_count(name: str, value: Any, kind: type[int]) -> int:
    """Return a number of tokens, which may be written as ``16k``.

    Raises:
        TypeError, ValueError: It is none, or less than 1.
    """
    try:
        number = kind(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument(name)}: {error}") from None
    if number != value and not isinstance(value, str):
        raise InvalidRequestError(f"{argument(name)} must be a whole number of tokens, got {value!r}.")
    if number < 1:
        raise InvalidRequestError(f"{argument(name)} must be at least 1 token, got {value!r}.")
    return number


def decided_options() -> dict[str, str]:
    """Return the options of TrainingArguments that hf_posenc decides, of this Transformers, and why."""
    known = {one.name for one in dataclasses.fields(TrainingArguments)}
    return {name: why for name, why in _DECIDED.items() if name in known}


def check_trainer_options(config: FinetuneConfig) -> dict[str, Any]:
    """Refuse values of TrainingArguments that are unknown, or that hf_posenc decides.

    Returns:
        Values to put in their place: words for members of enumerations, and what JSON says.

    Raises:
        ValueError: With what is known, or what to do.
    """
    found: dict[str, Any] = {}
    for name, kind in _ENUMS.items():
        word, known = getattr(config, name), [str(one.value) for one in kind]
        word = word.value if isinstance(word, Enum) else word
        if word not in known:
            raise UnknownNameError(name, word, known)
        found[name] = word
    # What HfArgumentParser makes of these two is not their default, though it means the same.
    counts, debug = config.include_num_input_tokens_seen, config.debug or ""
    found["include_num_input_tokens_seen"] = ("all" if counts else "no") if isinstance(counts, bool) else counts
    found["debug"] = debug if isinstance(debug, str) else " ".join(str(getattr(one, "value", one)) for one in debug)
    usual = type(config).defaults()
    for name, why in decided_options().items():
        value = found.get(name, getattr(config, name))
        if value not in (usual[name], None):
            raise InvalidRequestError(f"{argument(name)} cannot be {value!r} here: {why}.")
    if found["save_strategy"] == "best" or found["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy"):
        name = "save_strategy" if found["save_strategy"] == "best" else "lr_scheduler_type"
        raise InvalidRequestError(
            f"{argument(name)} {found[name]!r} goes by evaluations during the training: {_MEASURED}."
        )
    for one in dataclasses.fields(TrainingArguments):
        value = getattr(config, one.name)
        if one.init and isinstance(value, str) and value.startswith("{"):
            try:
                found[one.name] = json.loads(value)
            except ValueError as error:
                raise InvalidRequestError(
                    f'{argument(one.name)} must be JSON such as {{"num_cycles": 2}}, got {value!r}: {error}'
                ) from None
    if config.dataloader_prefetch_factor is not None and config.dataloader_num_workers == 0:
        raise InvalidRequestError(
            f"{argument('dataloader_prefetch_factor')} goes with dataloader_num_workers: give that too."
        )
    return found


def whole_numbers(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return as whole numbers what TrainingArguments holds as floats, where it is whole."""
    floats = {name: settings[name] for name in (*_WHOLE, "warmup_steps") if isinstance(settings[name], float)}
    return {name: int(value) for name, value in floats.items() if value.is_integer()}


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
            raise InvalidRequestError(f"{argument(name)} must be a whole number >= {least}, got {value!r}.")
    warmup = check_number(argument("warmup_steps"), settings["warmup_steps"], at_least=0)
    if warmup >= 1 and not warmup.is_integer():
        raise InvalidRequestError(
            f"{argument('warmup_steps')} must be a whole number of steps, or a share of the run below 1, got {warmup}."
        )
    limit = settings["save_total_limit"]
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidRequestError(
            f"{argument('save_total_limit')} must be a whole number >= 1, or None to keep all, got {limit!r}."
        )
    numbers = {name: check_number(argument(name), settings[name], at_least=0) for name in (*_NUMBERS, *_SHARES)}
    for name in _SHARES:
        if numbers[name] > 1 or (name == "group_share" and numbers[name] == 0):
            raise InvalidRequestError(f"{argument(name)} must be a share between 0 and 1, got {numbers[name]}.")
    numbers["length_upsampling"] = check_number(
        argument("length_upsampling"), settings["length_upsampling"], at_least=1
    )
    for name in ("adam_beta1", "adam_beta2"):
        if not numbers[name] < 1:
            raise InvalidRequestError(f"{argument(name)} must be in [0, 1), got {numbers[name]!r}.")
    try:
        numbers["learning_rate"] = check_number(argument("learning_rate"), settings["learning_rate"], above=0)
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
            raise InvalidTypeError(f"{argument(name)} must be True or False, got {settings[name]!r}.")
    for name, known in _CHOICES.items():
        if (word := settings[name]) not in known:
            raise InvalidRequestError(f"unknown {name} {word!r}. Known: {', '.join(filter(None, known))}.")


def check_trackers(report_to: str | list[str] | None) -> None:
    """Refuse a tracker that Transformers does not know, or whose package is missing, before anything is trained.

    Args:
        report_to: ``"none"``, ``"all"`` (that are installed), or the names of one or more trackers.

    Raises:
        ValueError: It is unknown, or not installed; the message says how to install it.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name not in ("none", "all"):
            _check_tracker(name, INTEGRATION_TO_CALLBACK)


def _check_tracker(name: str, trackers: Collection[str]) -> None:
    if name not in trackers:
        known = ", ".join(("none", "all", *trackers))
        raise InvalidRequestError(f"unknown report_to {name!r}. Known: {known}.")
    packages = _IMPORTED.get(name, (name,))
    if packages and not any(find_spec(package) for package in packages):
        raise InvalidRequestError(
            f"{argument('report_to')} {name!r} needs a package that is not installed: pip install "
            f"{_INSTALLED.get(name, name)}"
        )
