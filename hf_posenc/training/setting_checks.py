"""The settings of a run, checked: what each may be, and which do not go together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, TrainingArguments

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, MissingPackageError, UnknownNameError, argument
from hf_posenc.families.unmasked_layers import in_words
from hf_posenc.methods.registry import make_method, method_names
from hf_posenc.spec import check_number
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_folder import last_checkpoint

if TYPE_CHECKING:
    from hf_posenc.training.config import FinetuneConfig

EIGHT_BIT_ADAMW = "adamw_bnb_8bit"
_BITSANDBYTES = ("bnb", "paged", "lion", "ademamix")  # in the names of its optimizers; and adamw_8bit
# The least that whole numbers and numbers may be; of the latter, the learning rate must be above it.
_WHOLE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "lora_rank": 1, "lora_alpha": 1}
_WHOLE |= {"save_steps": 1, "logging_steps": 1, "logits_chunk": 1, "pose_chunks": 2, "eval_documents": 0, "seed": 0}
_NUMBERS = ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2")
_SHARES = ("short_share", "group_share")
# Where the package that is imported is not called as the tracker is; any one of them will do.
_IMPORTED = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "kubeflow": (),  # no package: the cluster says where to report
}
# Where `pip install` wants another name.
_INSTALLED = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}
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
    except TypeError as error:
        raise InvalidTypeError(f"{argument(name)}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{argument(name)}: {error}") from None
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


def check_numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    """Check the numbers of a run.

    Args:
        settings: All settings by name.

    Returns:
        What to put in their places: whole numbers where TrainingArguments holds floats, and floats elsewhere.

    Raises:
        TypeError, ValueError: One is no number, or out of its range.
    """
    floats = {name: settings[name] for name in (*_WHOLE, "warmup_steps") if isinstance(settings[name], float)}
    numbers: dict[str, float] = {name: int(value) for name, value in floats.items() if value.is_integer()}
    for name, least in _WHOLE.items():
        value = numbers.get(name, settings[name])
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
    numbers |= {name: check_number(argument(name), settings[name], at_least=0) for name in (*_NUMBERS, *_SHARES)}
    for name in _SHARES:
        if numbers[name] > 1 or (name == "group_share" and numbers[name] == 0):
            raise InvalidRequestError(f"{argument(name)} must be a share between 0 and 1, got {numbers[name]}.")
    upsampling = settings["length_upsampling"]
    numbers["length_upsampling"] = check_number(argument("length_upsampling"), upsampling, at_least=1)
    for name in ("adam_beta1", "adam_beta2"):
        if not numbers[name] < 1:
            raise InvalidRequestError(f"{argument(name)} must be in [0, 1), got {numbers[name]!r}.")
    rate, hint = settings["learning_rate"], "YaRN and PI use 2e-5."
    numbers["learning_rate"] = check_number(argument("learning_rate"), rate, above=0, hint=hint)
    return numbers


def check_mixture(config: FinetuneConfig, shares: Mapping[str, float]) -> None:
    """Refuse other settings that contradict the kinds of data of a mixture.

    Raises:
        ValueError: A setting does not go with a kind, or is said by another one.
    """
    from hf_posenc.training.mixtures import get_kind

    if not config.packing:
        raise InvalidRequestError(
            f"{argument('packing', False)} puts one document into a block, and those of {argument('task_mix')} hold "
            "several pieces. Leave one of the two out."
        )
    if config.short_share:
        raise InvalidRequestError(
            f"{argument('short_share')} goes without {argument('task_mix')}: in a mixture the kind short_text is what "
            "it does, with its own share."
        )
    answers = [name for name in shares if get_kind(name).counts_answers]
    if config.completion_only_loss is False and answers:
        raise InvalidRequestError(
            f"{argument('completion_only_loss', False)} counts all tokens, and of {' and '.join(answers)} only the "
            f"answers count. Leave one of the two out."
        )
    texts = [name for name in shares if get_kind(name).reads_texts]
    for name in ("assistant_only_loss", "completion_only_loss"):
        if getattr(config, name) and texts:
            raise InvalidRequestError(
                f"{argument(name)} is for chats or prompts with answers, and {' and '.join(texts)} of "
                f"{argument('task_mix')} are made of free text. Leave one of the two out; the answers of kv and "
                "needles count alone in any case."
            )
    if config.length_upsampling != 1 and not {"text", "short_text"} & shares.keys():
        raise InvalidRequestError(
            f"{argument('length_upsampling')} says how often documents are read as text, which is no kind of "
            f"{argument('task_mix')} here. Leave it out, or give text a share."
        )


def check_words(config: FinetuneConfig) -> None:
    """Check the fields of ours that are True or False, and those that are one of several words.

    Raises:
        TypeError: A field that is not True or False.
        ValueError: An unknown word.
    """
    from hf_posenc.training.config import FinetuneConfig

    hints = get_type_hints(type(config))
    for name in (*FinetuneConfig.__annotations__, "on_scaled"):
        value, hint = getattr(config, name), hints[name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise UnknownNameError(name, value, get_args(hint))
        if hint in (bool, bool | None) and not isinstance(value, (bool, *get_args(hint)[1:])):
            raise InvalidTypeError(f"{argument(name)} must be True or False, got {value!r}.")


def check_trackers(report_to: str | list[str] | None) -> None:
    """Refuse a tracker that Transformers does not know, or whose package is missing, before anything is trained.

    Args:
        report_to: ``"none"``, ``"all"`` (that are installed), or the names of one or more trackers.

    Raises:
        ValueError: It is unknown, or not installed; the message says how to install it.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name in ("none", "all"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            raise UnknownNameError("report_to", name, ("none", "all", *INTEGRATION_TO_CALLBACK))
        packages = _IMPORTED.get(name, (name,))
        if packages and not any(find_spec(package) for package in packages):
            raise InvalidRequestError(
                f"{argument('report_to')} {name!r} needs a package that is not installed: pip install "
                f"{_INSTALLED.get(name, name)}"
            )


_FLASH = ("flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Combination:
    """The settings of a run, and what it runs on: what conflicts are looked for in.

    Attributes:
        config: The run.
        launch: How its processes were started.
        attention: ``attn_implementation``; None if that is left to Transformers, which takes SDPA.
        quantised: The model's weights are; None if that is not known yet.
        seq_len: Tokens of a block; None if that is not known before the model's config is read.
        needs_hf_posenc: The model's rule is in its attention, whatever ``config`` names.
        unmasked: What ``unmasked_layers`` says of the model; empty if that is not known yet.
    """

    config: FinetuneConfig
    launch: Launch
    attention: str | None = None
    quantised: bool | None = None
    seq_len: int | None = None
    needs_hf_posenc: bool = False
    unmasked: Mapping[str, int] = field(default_factory=dict)

    @property
    def changes_attention(self) -> bool:
        """Whether the method changes the attention itself, as ``dynamic`` and ``self_extend`` do."""
        method = self.config.method
        return self.needs_hf_posenc or (method is not None and make_method(method, 2.0, {}).needs_hf_posenc)

    @property
    def inner_attention(self) -> str:
        """The implementation that computes the attention, whatever hf_posenc put around it."""
        from hf_posenc.attention.inner import inner_name  # brings torch's compiler, which --help would wait for

        return inner_name(self.attention or "sdpa")

    @cached_property  # several conflicts look at it, and finding it reads every file of a checkpoint
    def checkpoint(self) -> Path | None:
        """The checkpoint that the run resumes from; None if it begins."""
        if not self.config.resumes:
            return None
        named = self.config.named_checkpoint
        return named or last_checkpoint(Path(str(self.config.output_dir)), contents=False)[0]

    def checkpoint_has(self, pattern: str) -> bool:
        """Return whether the run resumes from a checkpoint with such a file or folder."""
        return self.checkpoint is not None and any(self.checkpoint.glob(pattern))


class Conflict(NamedTuple):
    """Settings that do not go together: a limit of PyTorch, accelerate, DeepSpeed or this package.

    Found late it costs a loaded model, and some would never be found: the run would train on wrong positions or masks.

    Attributes:
        name: Short, for the tests.
        holds: Whether a run has it.
        message: What does not go together and what to do; formatted with ``config``, ``launch``, ``attention``,
            ``seq_len`` and ``method``.
    """

    name: str
    holds: Callable[[Combination], bool]
    message: str


_FSDP_SHARDS, _DEEPSPEED_FILES = "pytorch_model_fsdp_*", "global_step*"  # in a checkpoint
CONFLICTS = (
    Conflict(
        "fsdp1",
        lambda s: s.launch.fsdp == 1,
        "FSDP version 1 casts buffers under mixed precision, so it rounds the rotary frequencies. Use FSDP2: "
        "--accelerate-config fsdp2 (fsdp_version: 2).",
    ),
    Conflict(
        "fsdp and its own activation checkpointing",
        lambda s: s.launch.fsdp > 0 and s.launch.wraps_layers,
        "fsdp_activation_checkpointing wraps the layers, whose names then fit no checkpoint. Set it to false and pass "
        "gradient_checkpointing=True (--gradient-checkpointing).",
    ),
    Conflict(
        "tensor parallelism",
        lambda s: s.launch.tp_size > 1,
        "tensor parallelism (parallelism_config_tp_size {launch.tp_size}) is not supported: the loss in chunks needs "
        "the whole head. Share out the weights by --accelerate-config fsdp2.",
    ),
    Conflict(
        "groups and processes",
        lambda s: s.launch.processes % (s.launch.cp_size * s.launch.sp_size) != 0,
        "{launch.processes} processes cannot form groups of {launch.cp_size} x {launch.sp_size} (cp_size x sp_size). "
        "Start a multiple of that (--num-processes).",
    ),
    Conflict(
        "cp and sp",
        lambda s: s.launch.cp_size > 1 and s.launch.sp_size > 1,
        "context parallelism (cp_size {launch.cp_size}) and Ulysses (sp_size {launch.sp_size}) both cut sequences. "
        "Set one of the sizes to 1.",
    ),
    Conflict(
        "cp without fsdp2",
        lambda s: s.launch.cp_size > 1 and s.launch.fsdp != 2,
        "context parallelism (cp_size {launch.cp_size}) needs FSDP2: --accelerate-config context_parallel_2gpu, or "
        "fsdp_version: 2 in a file of your own.",
    ),
    Conflict(
        "cp and attention",
        lambda s: s.launch.cp_size > 1 and s.attention not in (None, "sdpa"),
        "context parallelism passes keys around in SDPA only, and attn_implementation is {attention!r}. Leave it out, "
        "or give sdpa.",
    ),
    Conflict(
        "cp and seq_len",
        lambda s: s.launch.cp_size > 1 and s.seq_len is not None and s.seq_len % (2 * s.launch.cp_size) != 0,
        "context parallelism cuts a block into 2 x cp_size = 2 x {launch.cp_size} chunks, and seq_len {seq_len} is "
        "not divisible by that. Choose another seq_len (--seq-len).",
    ),
    Conflict(
        "sp without deepspeed",
        lambda s: s.launch.sp_size > 1 and s.launch.zero is None,
        "Ulysses (sp_size {launch.sp_size}) needs DeepSpeed: --accelerate-config alst_ulysses_4gpu, or "
        "distributed_type: DEEPSPEED in a file of your own.",
    ),
    Conflict(
        "sp and attention",
        lambda s: s.launch.sp_size > 1 and (s.attention or s.launch.sp_attention) not in _FLASH,
        "Ulysses keeps packed documents apart with FlashAttention only (SDPA takes a block for one text): give "
        "attn_implementation flash_attention_2, and parallelism_config_sp_attn_implementation the same.",
    ),
    Conflict(
        "sp and seq_len",
        lambda s: s.launch.sp_size > 1 and s.seq_len is not None and s.seq_len % s.launch.sp_size != 0,
        "Ulysses cuts a block into sp_size = {launch.sp_size} parts, and seq_len {seq_len} is not divisible by that. "
        "Choose another seq_len (--seq-len).",
    ),
    Conflict(
        "cp and short windows",
        lambda s: s.launch.cp_size > 1 and s.config.short_share > 0,
        "context parallelism knows no mask but the causal one, and short_share {config.short_share} reads blocks as "
        "several windows, which would see each other. Leave it out, or launch with --accelerate-config fsdp2.",
    ),
    Conflict(
        "cp and a mixture",
        lambda s: s.launch.cp_size > 1 and s.config.task_mix is not None,
        "context parallelism cannot keep the pieces of a block apart, and those of task_mix may have several. Launch "
        "with --accelerate-config fsdp2.",
    ),
    Conflict(
        "a mixture and layers without a mask",
        lambda s: bool(s.unmasked) and s.config.task_mix is not None,
        "the model cannot be trained on a task_mix, whose blocks hold several pieces: {layers} let a token see others "
        "whatever the attention mask says. Leave it out, and give packing=False (--packing false).",
    ),
    Conflict(
        "short windows and layers without a mask",
        lambda s: bool(s.unmasked) and s.config.short_share > 0,
        "the model cannot be trained with short_share {config.short_share}, which reads blocks as several windows: "
        "{layers} let a token see others whatever the attention mask says. Leave it out, and give packing=False "
        "(--packing false).",
    ),
    Conflict(
        "shared sequences and layers without a mask",
        lambda s: bool(s.unmasked) and s.launch.shares_sequences,
        "the model cannot be trained with context or sequence parallelism, which shows each process a part of a "
        "sequence: {layers} need all of it. Launch with --accelerate-config fsdp2, and give packing=False (--packing "
        "false).",
    ),
    Conflict(
        "packing and layers without a mask",
        lambda s: bool(s.unmasked) and s.config.packing,
        "the model cannot keep several documents of a block apart: {layers} let a token see others whatever the "
        "attention mask says. Give packing=False (--packing false): a block is then one document, cut or padded to "
        "its length.",
    ),
    Conflict(
        "shared sequences and a method in the attention",
        lambda s: s.launch.shares_sequences and s.changes_attention,
        "{method} changes the attention itself, which then sees one process' part of a sequence only. Train it "
        "without context or sequence parallelism: --accelerate-config fsdp2.",
    ),
    Conflict(
        "shifted attention and shared sequences",
        lambda s: s.launch.shares_sequences and s.config.shifted_sparse_attention,
        "shifted_sparse_attention groups the tokens of a whole block, and context or sequence parallelism shows each "
        "process a part of it. Use one of the two.",
    ),
    Conflict(
        "shifted attention and flash",
        lambda s: s.config.shifted_sparse_attention and s.inner_attention not in ("sdpa", "eager"),
        "shifted_sparse_attention computes its groups with SDPA, and attn_implementation is {attention!r}. Leave it "
        "out, or give sdpa.",
    ),
    Conflict(
        "lora and the parameters of an encoding",
        lambda s: s.config.lora and s.config.method in method_names("has_parameters"),
        "{config.method} has parameters, which an adapter does not hold: PEFT saves its own alone. Train without LoRA.",
    ),
    Conflict(
        "quantised and shared out",
        lambda s: bool(s.quantised) and (s.launch.fsdp > 0 or s.launch.zero == 3),
        "quantised weights cannot be shared out by FSDP2 or ZeRO-3 and put together again. Launch with "
        "--accelerate-config multi_gpu, which keeps the small model whole on each GPU.",
    ),
    Conflict(
        "8-bit states shared out",
        lambda s: is_of_bitsandbytes(str(s.config.optim)) and (s.launch.fsdp > 0 or s.launch.zero is not None),
        "optim {config.optim} keeps its states in blocks of whole weights, which FSDP2 and DeepSpeed share out. Launch "
        "with --accelerate-config multi_gpu, or leave optim out.",
    ),
    Conflict(
        "a sharded checkpoint elsewhere",
        lambda s: s.checkpoint_has(_FSDP_SHARDS) and (s.launch.fsdp != 2 or "SHARDED" not in s.launch.state_dict),
        "the checkpoint in {config.output_dir} is FSDP2's SHARDED_STATE_DICT, which only the same kind of launch "
        "reads. Resume with it (fsdp_state_dict_type: SHARDED_STATE_DICT), or begin in another output_dir.",
    ),
    Conflict(
        "a deepspeed checkpoint elsewhere",
        lambda s: s.checkpoint_has(_DEEPSPEED_FILES) and s.launch.zero is None,
        "the checkpoint in {config.output_dir} is DeepSpeed's, which no other launch reads. Resume with the "
        "configuration it was begun with, or begin in another output_dir.",
    ),
    Conflict(
        "another checkpoint under deepspeed",
        lambda s: s.launch.zero is not None and s.checkpoint is not None and not s.checkpoint_has(_DEEPSPEED_FILES),
        "the checkpoint in {config.output_dir} was not written by DeepSpeed, which reads its own only. Resume without "
        "DeepSpeed, or begin in another output_dir.",
    ),
)


def check_combination(
    config: FinetuneConfig,
    launch: Launch | None = None,
    *,
    attention: str | None = None,
    quantised: bool | None = None,
    seq_len: int | None = None,
    needs_hf_posenc: bool = False,
    unmasked: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Refuse a run whose settings do not go together, before any weights are loaded.

    Args:
        config: The run.
        launch: How its processes were started; None reads the environment.
        attention, quantised, needs_hf_posenc, unmasked: As in ``Combination``.
        seq_len: Tokens of a block, once they are known; None takes those of ``config``.

    Raises:
        ValueError: The message of the first conflict.
        ImportError: The optimizer is of a package that is not installed.
    """
    if is_of_bitsandbytes(str(config.optim)) and find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            f"--optim {config.optim} needs a package that is not installed: pip install bitsandbytes"
        )
    known = seq_len or config.seq_len or config.context_length
    launch = launch or Launch.from_environment()
    run = Combination(config, launch, attention, quantised, known, needs_hf_posenc, unmasked)
    words = {"method": config.method or "the model's rule", "layers": in_words(unmasked)}
    for conflict in CONFLICTS:
        if conflict.holds(run):
            raise InvalidRequestError(conflict.message.format(**words, **vars(run)))
