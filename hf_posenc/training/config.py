"""The settings of a fine-tuning run: those of TrainingArguments, and ours. The defaults are the papers'."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, TrainingArguments

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.evaluation.lm_head import DEFAULT_ROWS_PER_CHUNK
from hf_posenc.methods.registry import DEFAULT_METHOD, get_method, make_method
from hf_posenc.mixtures import get_kind, read_shares, words_of
from hf_posenc.patching.extension_config import ExtensionConfig, ExtensionRequest
from hf_posenc.retrieving.tasks import expand_groups, get_task
from hf_posenc.settings import check_settings, flag, number, optional, setting, share, tokens, whole, word
from hf_posenc.spec import check_number
from hf_posenc.training.recipes import get_recipe, recipe_values
from hf_posenc.training.step_plan import LoraSettings, StepPlan
from hf_posenc.utils.units import ContextLength, Percent, TokenCount, length_name

# Options of TrainingArguments that hf_posenc decides: why another value is refused, and what to give in its place.
_BUDGET = "token_budget says how long a run is"
_MEASURED = "the model is measured before and after the training (eval_lengths, eval_tasks), not during it"
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
    "save_only_model": "a run cannot be resumed from a checkpoint without the optimizer's state",
    "save_on_each_node": "the first process writes the checkpoints",
    "liger_kernel_config": "of liger-kernel the norms and MLPs are used; positions and loss stay those of hf_posenc",
    "hub_strategy": "the trained model is pushed when it is finished",
}
# Transformers 5.23 has gradient_checkpointing under another name too; here it is kept under the first one.
_RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
_SECRET = frozenset({"hub_token"})  # never written to a file
_OF_TRAINER = tuple(each.name for each in fields(TrainingArguments) if each.init)
_HIDDEN = frozenset(name for name in _OF_TRAINER if name in _DECIDED) | _RENAMED.keys() | {"local_rank"}
_GROUPS: dict[str, tuple[str, ...]] = {
    "The run": (
        "output_dir",
        "recipe",
        "seed",
        "resume_from_checkpoint",
        "save_steps",
        "save_total_limit",
        "check_first_loss",
    ),
    "How the model is extended": (
        "method",
        "preset",
        "rope_scaling",
        "factor",
        "context_length",
        "original_max_position_embeddings",
        "sliding_window",
        "on_scaled",
        "options",
        "stages",
    ),
    "Blocks of tokens and their positions": (
        "token_budget",
        "seq_len",
        "packing",
        "position_schedule",
        "pose_chunks",
        "short_share",
        "length_upsampling",
        "task_mix",
        "shifted_sparse_attention",
        "group_share",
    ),
    "What counts in the loss": ("assistant_only_loss", "completion_only_loss"),
    "Steps of the optimizer": (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "optim",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "max_grad_norm",
    ),
    "Adapters, memory and precision": (
        "trainable",
        "lora",
        "lora_rank",
        "lora_alpha",
        "lora_embeddings",
        "gradient_checkpointing",
        "bf16",
        "logits_chunk",
    ),
    "What short texts may lose": ("keep",),
    "What is measured and logged": (
        *("eval_lengths", "eval_documents", "eval_tasks", "eval_questions"),
        *("logging_steps", "report_to", "run_name"),
    ),
    "Publishing": ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_token", "hub_revision"),
}
_GROUPS["Other options of Transformers' Trainer (TrainingArguments)"] = tuple(
    name for name in _OF_TRAINER if name not in _HIDDEN and not any(name in names for names in _GROUPS.values())
)


def _values(kind: type[Enum]) -> tuple[str, ...]:
    return tuple(str(each.value) for each in kind)


def _warmup(name: str, value: Any) -> float:
    """Check a whole number of steps, or a share of the run below 1."""
    steps = check_number(name, value, at_least=0)
    if steps >= 1 and not steps.is_integer():
        raise InvalidRequestError(
            f"{name} must be a whole number of steps, or a share of the run below 1, got {steps}."
        )
    return int(steps) if steps.is_integer() else steps


def _tasks(name: str, value: Any) -> list[str]:
    tasks = expand_groups([value] if isinstance(value, str) else value)
    for task in tasks:
        get_task(task)
    return tasks


def _lengths(name: str, value: Any) -> list[int]:
    """Check a list of lengths in tokens."""
    if not isinstance(value, (list, tuple)):
        raise InvalidTypeError(f"{name} must be a list of lengths in tokens, got {value!r}.")
    return [tokens(ContextLength)(name, length) for length in value]


def _percent(name: str, value: Any) -> Percent:
    try:
        return Percent(share(name, Percent(value)))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name}: {error}") from None


def _recipe(name: str, value: str) -> str:
    return get_recipe(value).name


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
        number: From 1.
        length: Target length, in tokens.
        token_budget: Tokens it is trained on at most.
    """

    number: int
    length: int
    token_budget: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"stage-{self.number}-{length_name(self.length)}"


@dataclass(repr=False)  # that of TrainingArguments leaves tokens out
class FinetuneConfig(ExtensionConfig, TrainingArguments):
    """A fine-tuning run: every option of TrainingArguments under its own name, and those of hf_posenc.

    Each field's help text is its documentation (and the command line's). A config describes a run and touches no
    machine: it can be made where no GPU is, and before the processes of a run have met. It checks what each field
    alone may be and which fields exclude each other; ``plan_run`` decides the rest, when the model is known.

    Raises:
        ValueError, TypeError: A value is out of range, unknown, contradicts another, or is one that hf_posenc decides.
    """

    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = _GROUPS
    HELP_COMMON: ClassVar[tuple[str, ...]] = (
        "output_dir",
        "recipe",
        "resume_from_checkpoint",
        "method",
        "factor",
        "context_length",
        "token_budget",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "lora",
        "gradient_checkpointing",
    )
    HELP_HIDDEN: ClassVar[frozenset[str]] = _HIDDEN

    output_dir: str = field(metadata={"help": "folder for the trained model, checkpoints, results and logs"})
    # Only the name: ``from_recipe`` and the command line set the values.
    recipe: str | None = setting(None, _recipe, "a recipe from `hf-posenc list recipes`; flags override its values")
    method: str | None = setting(
        None, None, "a method from `hf-posenc list methods`; default: yarn, or the method that the model has"
    )
    # Options of the method, such as {"beta_fast": 16}. Not shown as a flag: the command line has --option for them.
    options: dict[str, Any] = setting(dict, None, argparse.SUPPRESS)
    # YaRN (section 4.1) takes 400 steps of 64 blocks of 64k tokens, 1.7 B tokens; in PI (table 4) the whole window
    # is in use after 200 steps. 1M is a first try: hundreds of steps for a small model, and cheap to raise.
    token_budget: TokenCount = setting(TokenCount("1M"), tokens(TokenCount), "tokens to train on, at most (300k, 1M)")
    seq_len: ContextLength | None = setting(
        None,
        tokens(ContextLength, 2),
        "tokens of a training block; default: the target length, as in YaRN and PI, or the original length "
        "if --position-schedule skips positions",
    )
    packing: bool = setting(
        True,
        flag,
        "put several documents into a block, kept apart by attention's mask; false: one document a block, "
        "cut or padded to its length, as models with recurrent or convolution layers need",
    )
    # PoSE, section 3.2: two chunks of a short window, skipped apart at random, show every distance up to the target.
    position_schedule: Literal["full", "pose", "cream", "random"] = setting(
        "full",
        word("full", "pose", "cream", "random"),
        "positions of a training block: full (consecutive); pose (PoSE: consecutive within --pose-chunks "
        "chunks, with random gaps between them, up to the target length); cream (CREAM: a head, a tail at the "
        "target's end, and a middle between them); random (a random rising subset of the target's positions)",
    )
    pose_chunks: int = setting(2, whole(2), "chunks of each document in a block, in --position-schedule pose (PoSE: 2)")
    short_share: float = setting(
        0.0, share, "share of the blocks that is read in windows of the original length, to keep short texts; 0 to 1"
    )
    length_upsampling: float = setting(
        1.0, number(at_least=1), "how many times as often documents longer than the original length are read as others"
    )
    # Names and shares are checked by ``hf_posenc.mixtures.read_shares``.
    task_mix: list[str] | None = setting(
        None,
        None,
        "kinds of data with their shares of the tokens, each as KIND=SHARE: kv (dictionaries), chains "
        "(entries that refer to others), edges (all that is linked to one), needles (sentences hidden in the "
        "documents), knots (documents cut, shuffled and tied), text (the documents), "
        "short_text (the documents in windows of the original length), retention (short texts on which the model is to "
        "predict what it predicted before it was extended), long_retention (long ones, and as the run begins)",
        metavar="KIND=SHARE",
    )
    # Chen et al. 2024, LongRoPE and others grow in steps; each stage is a run of its own length and budget.
    stages: list[str] | None = setting(
        None, None, "several target lengths with token budgets, trained one after the other: 16k:500k 32k:500k"
    )
    # LongLoRA, section 3.2: half of the heads see groups shifted by half a group; a quarter of the block each.
    shifted_sparse_attention: bool = setting(
        False, flag, "LongLoRA: attend only within groups of a block in training; the saved model attends fully"
    )
    group_share: float = setting(
        0.25, share, "size of a group of --shifted-sparse-attention as a share of the block (LongLoRA: 0.25)"
    )
    # TRL's names and defaults.
    assistant_only_loss: bool = setting(
        False, flag, "only the assistant's turns of a chat count in the loss, not all tokens"
    )
    completion_only_loss: bool | None = setting(
        None,
        flag,
        "only the answers to prompts count in the loss; default: true; false: all tokens count",
        nargs="?",
        const=True,
    )
    per_device_train_batch_size: int = setting(1, whole(1), "blocks in one forward pass, on each device")
    gradient_accumulation_steps: int = setting(1, whole(1), "forward passes per step (YaRN, PI: 64 blocks)")
    # YaRN, section 4.1: rate 2e-5, no weight decay, linear warm-up over 20 steps, AdamW with 0.9 and 0.95.
    # PI, section 3.1: the same for 7B and 13B (1e-5 for larger ones), warming up from a tenth. Neither names a decay.
    learning_rate: float = setting(
        2e-5, number(above=0, hint="YaRN and PI use 2e-5."), "peak learning rate (YaRN, PI for 7B: 2e-5)"
    )
    lr_scheduler_type: str = setting(
        "constant_with_warmup", word(*_values(SchedulerType)), "constant_with_warmup, linear, cosine, ..."
    )
    warmup_steps: float = setting(
        20, _warmup, "steps of linear warm-up (YaRN, PI: 20), at most a fifth of the run; below 1: share of the run"
    )
    weight_decay: float = setting(0.0, number(at_least=0), "weight decay of AdamW; YaRN and PI use none")
    adam_beta1: float = setting(0.9, number(at_least=0, below=1), "first beta of AdamW (YaRN, PI: 0.9)")
    adam_beta2: float = setting(0.95, number(at_least=0, below=1), "second beta of AdamW (YaRN, PI: 0.95)")
    max_grad_norm: float = setting(
        1.0, number(at_least=0), "largest norm of the gradient, which is clipped to it; 0: no clipping"
    )
    trainable: Literal["all", "attention"] | None = setting(
        None,
        word("all", "attention"),
        "layers that are trained: all, or those of the attention alone; default: all, and with --lora the attention",
    )
    # LongLoRA, section 3.3: adapters alone fall well short of full fine-tuning at long contexts; training the
    # embedding and the norms as well, a small share of the parameters, closes the gap. Rank 8 on the attention.
    lora: bool = setting(False, flag, "train adapters, the embedding and the norms, not all weights")
    lora_rank: int = setting(8, whole(1), "rank of the adapters (LongLoRA: 8)")
    lora_alpha: int = setting(16, whole(1), "alpha of the adapters, whose output is scaled by alpha / rank")
    lora_embeddings: bool = setting(True, flag, "with --lora, train the embedding and the norms too (LongLoRA's LoRA+)")
    gradient_checkpointing: bool = setting(
        False, flag, "recompute each layer in the backward pass: less memory, about a third slower"
    )
    bf16: bool | None = setting(  # type: ignore[assignment]  # None leaves it to the model and the machine
        None,
        flag,
        "compute in bfloat16 (autocast); default: true if the checkpoint is in half precision and the "
        "hardware has instructions for bfloat16. In both cases weights are trained in float32, and saved in the "
        "checkpoint's dtype",
    )
    seed: int = setting(0, whole(0), "random seed of the order of documents and blocks, and of new weights")
    save_steps: float = setting(100, whole(1), "steps between checkpoints")
    save_total_limit: int | None = setting(
        2, optional(whole(1)), "number of checkpoints that are kept; older ones are deleted"
    )
    resume_from_checkpoint: str | None = setting(
        None, None, "continue from the last checkpoint, or from a named one", nargs="?", const="true"
    )
    check_first_loss: bool = setting(
        False, flag, "stop if the first loss differs from the loss of the same tokens outside of the trainer"
    )
    logging_steps: float = setting(
        1, whole(1), "steps between losses printed on the console; train_log.jsonl has every step"
    )
    # Trainer's own default would drop position_ids where it does not see them in a model's forward.
    remove_unused_columns: bool = setting(False, None, argparse.SUPPRESS)
    # A name, "true", or None: ``hub`` says where the model goes.
    push_to_hub: str | None = setting(  # type: ignore[assignment]  # TrainingArguments takes no name
        None,
        None,
        "push the trained model to the Hugging Face Hub, to this repository; without a name: to "
        "--hub-model-id, or one that is called as --output-dir",
        nargs="?",
        const="true",
        metavar="NAME",
    )
    hub_strategy: str = setting("end", None, argparse.SUPPRESS)
    keep: Percent | None = setting(
        None,
        _percent,
        "share by which perplexity may rise on short texts of several kinds (0.01, or with a percent sign): only so "
        "much of what the training changed is kept; default: all, and this is not measured",
    )
    eval_lengths: list[ContextLength] | None = setting(
        None, _lengths, "lengths to measure perplexity at; default: half the original length, the original, the target"
    )
    eval_documents: int = setting(
        8, whole(0), "number of held-out texts, as long as the longest measured length; 0: measure nothing"
    )
    eval_tasks: list[str] | None = setting(
        None,
        _tasks,
        "retrieval tasks and groups from `hf-posenc list tasks`, asked before and after the training, at the original "
        "length and the target",
        metavar="TASK",
    )
    eval_questions: int = setting(20, whole(1), "questions of each task and length, on one text")
    logits_chunk: int = setting(
        DEFAULT_ROWS_PER_CHUNK, whole(1), "positions whose logits are in memory at one time in the loss"
    )

    def __post_init__(self) -> None:  # not that of TrainingArguments, which sets up devices and process groups
        self.output_dir = os.path.expanduser(str(self.output_dir))
        if not self.output_dir:
            raise InvalidRequestError(f"{argument('output_dir')} is empty: name the folder the trained model goes to.")
        for newer, name in _RENAMED.items():
            if getattr(self, newer, None) is not None:
                setattr(self, name, getattr(self, newer))
                setattr(self, newer, None)
        check_settings(self)
        self._check_extension()
        self._check_trainer_options()
        if self.task_mix is not None:
            self._check_mixture()
        self.push_to_hub = _word_or_name(self.push_to_hub)
        if self.push_to_hub not in (None, "true") and self.hub_model_id not in (None, self.push_to_hub):
            raise InvalidRequestError(
                f"{argument('push_to_hub')} says {self.push_to_hub!r} and {argument('hub_model_id')} "
                f"{self.hub_model_id!r}. Give one of them."
            )
        self._check_resuming()
        self._check_recipe()

    @classmethod
    def from_recipe(cls, name: str, **overrides: Any) -> Self:
        """Make a run with the values of a recipe (see ``hf_posenc.training.recipes``); ``overrides`` win over them.

        Raises:
            ValueError, TypeError: The recipe is unknown, or as for any run.
        """
        return cls(**recipe_values(name, overrides))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each field that can be given; ``output_dir`` has none."""
        values: dict[str, Any] = {}
        for each in fields(cls):
            value = each.default if each.default_factory is MISSING else each.default_factory()
            if each.init and value is not MISSING:
                values[each.name] = value.value if isinstance(value, Enum) else value
        return values

    def settings(self) -> dict[str, Any]:
        """Return the run as plain values by name, for files: no tokens, and of TrainingArguments what is not usual."""
        usual, ours = self.defaults(), {*FinetuneConfig.__annotations__} - _DECIDED.keys()
        return {
            name: value
            for name, value in vars(self).items()
            if name not in _SECRET and (name in ours or (name in usual and value != usual[name]))
        }

    def request(self) -> ExtensionRequest:
        """Return the request for the model's extension; of a run in stages, that of the last one.

        Raises:
            ValueError, TypeError: As ``ExtensionRequest``.
        """
        names = {each.name for each in fields(ExtensionRequest) if each.init} - {"context_length"}
        length = self.target_stages()[-1].length if self.stages is not None else self.context_length
        return ExtensionRequest(
            **{name: getattr(self, name) for name in names},
            context_length=None if length is None else ContextLength(length),
        )

    @property
    def step(self) -> StepPlan:
        """The settings of an optimizer step."""
        targets = "all-linear" if self.trainable == "all" else "attention"
        adapters = LoraSettings(self.lora_rank, self.lora_alpha, targets, self.lora_embeddings)
        return StepPlan(
            batch_size=self.per_device_train_batch_size,
            num_passes=self.gradient_accumulation_steps,
            gradient_checkpointing=self.gradient_checkpointing,
            bf16=self.bf16,
            optim=str(self.optim),
            lora=adapters if self.lora else None,
            trainable="all" if self.lora or self.trainable is None else self.trainable,
            logits_chunk=self.logits_chunk,
        )

    @property
    def hub(self) -> dict[str, Any] | None:
        """Keywords of ``make_repository`` for the one that the model is pushed to; None where it is not pushed."""
        if self.push_to_hub is None:
            return None
        name = self.push_to_hub
        if name == "true":
            name = self.hub_model_id or Path(str(self.output_dir)).absolute().name
        return {
            "name": name,
            "private": self.hub_private_repo,
            "token": self.hub_token,
            "revision": self.hub_revision,
        }

    @property
    def resumes(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self.resume_from_checkpoint is not None

    @property
    def named_checkpoint(self) -> Path | None:
        """The checkpoint to continue from; None for the last one, and where the run begins."""
        named = self.resume_from_checkpoint
        return None if named in (None, "true") else Path(str(named)).expanduser()

    def target_stages(self) -> list[Stage]:
        """Return the parsed ``stages``: each word is ``LENGTH:BUDGET``, or ``LENGTH`` for equal shares of the budget.

        Raises:
            TypeError: It is not a list of words.
            ValueError: A word that cannot be read, budgets for some only, or lengths that do not rise.
        """
        words = self.stages
        if not words or isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise InvalidTypeError(
                f'stages must be a list of LENGTH:BUDGET, such as ["16k:500k", "32k:500k"], got {words!r}.'
            )
        if len({":" in word for word in words}) > 1:
            raise InvalidRequestError(f"stages: give every stage a budget or none, got {' '.join(words)!r}.")
        stages = []
        for index, text in enumerate(words, 1):
            length, colon, budget = text.partition(":")
            try:
                num_tokens = TokenCount(budget) if colon else self.token_budget // len(words)
                stages.append(Stage(index, ContextLength(length), num_tokens))
            except ValueError as error:
                raise InvalidRequestError(
                    f"stages: {text!r} is not LENGTH:BUDGET, such as 16k:500k ({error})."
                ) from None
        lengths = [stage.length for stage in stages]
        if lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise InvalidRequestError(f"stages: the lengths must rise, got {', '.join(map(str, lengths))} tokens.")
        return stages

    def _check_extension(self) -> None:
        if isinstance(self.rope_scaling, Mapping):
            self.rope_scaling = json.dumps(self.rope_scaling)
        if self.stages is not None:
            self.target_stages()
            decided = [name for name in ("factor", "context_length", "preset") if getattr(self, name) is not None]
            if decided:
                raise InvalidRequestError(f"stages say the target lengths: leave out {' and '.join(decided)}.")
        for name in ("context_length", "original_max_position_embeddings"):
            if getattr(self, name) is not None:
                setattr(self, name, tokens(ContextLength)(argument(name), getattr(self, name)))
        request = self.request()
        if self.method is not None:
            self.method = request.method
        self.sliding_window = str(request.sliding_window)
        rule = get_method(request.method or DEFAULT_METHOD)
        if self.shifted_sparse_attention and make_method(rule.name, 2.0, request.options).needs_hf_posenc:
            raise InvalidRequestError(
                f"{argument('shifted_sparse_attention')} is for static methods, such as 'yarn' and 'linear': "
                f"{rule.name!r} has an attention of its own."
            )

    def _check_trainer_options(self) -> None:
        """Refuse options of TrainingArguments that hf_posenc decides, and words that they do not know."""
        for name, kind in (("optim", OptimizerNames), ("save_strategy", SaveStrategy), ("hub_strategy", HubStrategy)):
            setattr(self, name, word(*_values(kind))(argument(name), getattr(self, name)))
        # What HfArgumentParser makes of these two is not their default, though it means the same.
        counts, debug = self.include_num_input_tokens_seen, self.debug or ""
        self.include_num_input_tokens_seen = ("all" if counts else "no") if isinstance(counts, bool) else counts
        self.debug = debug if isinstance(debug, str) else " ".join(str(getattr(each, "value", each)) for each in debug)
        usual = self.defaults()
        for name, why in _DECIDED.items():
            if name in usual and getattr(self, name) not in (usual[name], None):
                raise InvalidRequestError(f"{argument(name)} cannot be {getattr(self, name)!r} here: {why}.")
        for name, words in (("save_strategy", ["best"]), ("lr_scheduler_type", ["reduce_lr_on_plateau", "greedy"])):
            if getattr(self, name) in words:
                raise InvalidRequestError(
                    f"{argument(name)} {getattr(self, name)!r} depends on evaluations during the training: {_MEASURED}."
                )

    def _check_mixture(self) -> None:
        """Refuse other settings that contradict the kinds of data of a mixture."""
        shares = read_shares(self.task_mix)
        self.task_mix = words_of(shares)
        mixture = argument("task_mix")
        if not self.packing:
            raise InvalidRequestError(
                f"{argument('packing', False)} puts one document into a block, and those of {mixture} hold several "
                "pieces. Leave one of the two out."
            )
        if self.short_share:
            raise InvalidRequestError(
                f"{argument('short_share')} excludes {mixture}: in a mixture the kind short_text does what it does, "
                "with its own share."
            )
        answers = [name for name in shares if get_kind(name).counts_answers]
        if self.completion_only_loss is False and answers:
            raise InvalidRequestError(
                f"{argument('completion_only_loss', False)} counts all tokens, and of {' and '.join(answers)} only the "
                "answers count. Leave one of the two out."
            )
        texts = [name for name in shares if get_kind(name).reads_texts]
        for name in ("assistant_only_loss", "completion_only_loss"):
            if getattr(self, name) and texts:
                raise InvalidRequestError(
                    f"{argument(name)} is for chats or prompts with answers, and {' and '.join(texts)} of {mixture} "
                    "are made of free text. Leave one of the two out; the answers of kv and needles count alone in "
                    "any case."
                )
        if self.length_upsampling != 1 and not {"text", "short_text"} & shares.keys():
            raise InvalidRequestError(
                f"{argument('length_upsampling')} says how often documents are read as text, which is no kind of "
                f"{mixture} here. Leave it out, or give text a share."
            )

    def _check_resuming(self) -> None:
        self.resume_from_checkpoint = _word_or_name(self.resume_from_checkpoint)
        named = self.named_checkpoint
        if named is not None and named.resolve().parent != Path(str(self.output_dir)).resolve():
            raise InvalidRequestError(
                f"{argument('resume_from_checkpoint')} {str(named)!r} is no checkpoint of the run in "
                f"{self.output_dir}. Give a folder checkpoint-STEP of that run, or True for its last one."
            )
        if named is not None and self.stages is not None:
            raise InvalidRequestError(
                "a run in stages finds its checkpoint itself: give resume_from_checkpoint=True, without a folder."
            )

    def _check_recipe(self) -> None:
        if self.recipe is None:
            return
        recipe, usual = get_recipe(self.recipe), self.defaults()
        decided = self.preset is not None or self.rope_scaling is not None
        rule = {"method", "options"} if decided else set()
        changed = [name for name, value in recipe.values.items() if value != usual[name] and name not in rule]
        if changed and all(getattr(self, name) == usual[name] for name in changed):
            raise InvalidRequestError(
                f"recipe {recipe.name!r} is named, but none of its values is set. FinetuneConfig.from_recipe("
                f"{recipe.name!r}, output_dir=...) sets them."
            )


def _word_or_name(given: str | bool | None) -> str | None:
    """Return the value of a field that takes True, False or a name: None for no, "true", or the name."""
    text = str(given).lower()  # a flag is a word
    if text in ("true", "false", "none"):
        return "true" if text == "true" else None
    return str(given)
