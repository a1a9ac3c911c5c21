"""The settings of a fine-tuning run: those of TrainingArguments, and ours. The defaults are the papers'."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from transformers.training_args import TrainingArguments

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.evaluation.lm_head import DEFAULT_ROWS_PER_CHUNK
from hf_posenc.families.sliding_window import check_window
from hf_posenc.methods.registry import DEFAULT_METHOD, get_method, make_method
from hf_posenc.patching.extension_config import ExtensionConfig
from hf_posenc.patching.presets import get_preset
from hf_posenc.patching.rope_scaling import read_rope_scaling
from hf_posenc.training.launch import Launch
from hf_posenc.training.mixtures import read_shares, words_of
from hf_posenc.training.positions import check_rule
from hf_posenc.training.recipes import get_recipe, recipe_values
from hf_posenc.training.setting_checks import (
    check_count,
    check_mixture,
    check_numbers,
    check_trackers,
    check_trainer_options,
    check_words,
    decided_options,
)
from hf_posenc.utils.units import ContextLength, TokenCount, length_name

# What may differ between a run and its continuation: none of it changes what is trained or held out.
# A step's blocks may be shared out otherwise, among other numbers of processes: their number is held fixed instead.
_FREE_ON_RESUME = frozenset({"output_dir", "resume_from_checkpoint", "report_to", "run_name", "project", "use_cpu"})
_FREE_ON_RESUME |= {"model_values", "check_first_loss", "per_device_train_batch_size", "gradient_accumulation_steps"}
_FREE_ON_RESUME |= {"disable_tqdm", "push_to_hub", "debug", "skip_memory_metrics", "enable_jit_checkpoint"}
_FREE_PREFIXES = ("save_", "log_", "logging_", "hub_", "trackio_", "dataloader_", "ddp_", "torch_empty_cache_")
_SECRET = frozenset({"hub_token"})  # never written to a file
# Transformers 5.23 has gradient_checkpointing under another name too; here it is kept under the first one.
_RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
_TRAINER_GROUP = "Other options of Transformers' Trainer (TrainingArguments)"


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
    """A fine-tuning run: every option of TrainingArguments under its own name, and ours.

    Each field's help text is its documentation (and the command line's). A config describes a run and touches no
    machine: it can be made where no GPU is, and before the processes of a run have met. ``training_arguments`` makes
    of it what Trainer takes, when the model is loaded.

    Raises:
        ValueError, TypeError: A value is out of range, unknown, contradicts another, or is one that hf_posenc decides.
    """

    # Headings of ``hf-posenc finetune --help``; every field is under one.
    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
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
            "model_values",
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
            "lora",
            "lora_rank",
            "lora_alpha",
            "lora_targets",
            "lora_embeddings",
            "gradient_checkpointing",
            "bf16",
            "logits_chunk",
        ),
        "What is measured and logged": ("eval_lengths", "eval_documents", "logging_steps", "report_to", "run_name"),
        "Publishing": ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_token", "hub_revision"),
    }
    # Shown by --help; --help-all shows all of them.
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
    # Not shown at all: what hf_posenc decides, and what has another name here.
    HELP_HIDDEN: ClassVar[frozenset[str]] = frozenset(decided_options()) | _RENAMED.keys() | {"local_rank"}

    output_dir: str = field(metadata={"help": "folder for the trained model, checkpoints, results and logs"})
    # Only the name: the values are put in by ``from_recipe``, and by the command line.
    recipe: str | None = field(
        default=None, metadata={"help": "a recipe from `hf-posenc list recipes`; flags override its values"}
    )
    method: str | None = field(
        default=None,
        metadata={"help": "a method from `hf-posenc list methods`; default: yarn, or the method that the model has"},
    )
    # Options of the method, such as {"beta_fast": 16}. Not shown as a flag: the command line has --option for them.
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": argparse.SUPPRESS})
    # What rope_scaling repeats of the model, such as its rope_theta: held against the model before it is extended.
    model_values: dict[str, Any] = field(default_factory=dict, metadata={"help": argparse.SUPPRESS})
    # YaRN (section 4.1) takes 400 steps of 64 blocks of 64k tokens, 1.7 B tokens; in PI (table 4) the whole window
    # is in use after 200 steps. 1M is a first try: hundreds of steps for a small model, and cheap to raise.
    token_budget: TokenCount = field(
        default=TokenCount("1M"),
        metadata={"help": "tokens to train on, at most (300k, 1M)"},
    )
    seq_len: ContextLength | None = field(
        default=None,
        metadata={
            "help": "tokens of a training block; default: the target length, as in YaRN and PI, or the original length "
            "if --position-schedule skips positions"
        },
    )
    packing: bool = field(
        default=True,
        metadata={
            "help": "put several documents into a block, kept apart by attention's mask; false: one document a block, "
            "cut or padded to its length, as models with recurrent or convolution layers need"
        },
    )
    # PoSE, section 3.2: two chunks of a short window, skipped apart at random, show every distance up to the target.
    position_schedule: Literal["full", "pose", "cream", "random"] = field(
        default="full",
        metadata={
            "help": "positions of a training block: full (consecutive); pose (PoSE: consecutive within --pose-chunks "
            "chunks, with random gaps between them, up to the target length); cream (CREAM: a head, a tail at the "
            "target's end, and a middle between them); random (a random rising subset of the target's positions)"
        },
    )
    pose_chunks: int = field(default=2, metadata={"help": "chunks of a block in --position-schedule pose (PoSE: 2)"})
    short_share: float = field(
        default=0.0,
        metadata={
            "help": "share of the blocks that is read in windows of the original length, to keep short texts; 0 to 1"
        },
    )
    length_upsampling: float = field(
        default=1.0,
        metadata={"help": "how many times as often documents longer than the original length are read as others"},
    )
    # Names and shares are checked by ``hf_posenc.training.mixtures.read_shares``.
    task_mix: list[str] | None = field(
        default=None,
        metadata={
            "help": "kinds of data with their shares of the tokens, each as KIND=SHARE: kv (dictionaries), needles "
            "(sentences hidden in the documents), knots (documents cut, shuffled and tied), text (the documents), "
            "short_text (the documents in windows of the original length)",
            "metavar": "KIND=SHARE",
        },
    )
    # Chen et al. 2024, LongRoPE and others grow in steps; each stage is a run of its own length and budget.
    stages: list[str] | None = field(
        default=None,
        metadata={"help": "several target lengths with token budgets, trained one after the other: 16k:500k 32k:500k"},
    )
    # LongLoRA, section 3.2: half of the heads see groups shifted by half a group; a quarter of the block each.
    shifted_sparse_attention: bool = field(
        default=False,
        metadata={"help": "LongLoRA: attend only within groups of a block in training; the saved model attends fully"},
    )
    group_share: float = field(
        default=0.25,
        metadata={"help": "size of a group of --shifted-sparse-attention as a share of the block (LongLoRA: 0.25)"},
    )
    # TRL's names and defaults.
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "only the assistant's turns of a chat count in the loss, not all tokens"}
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={
            "help": "only the answers to prompts count in the loss; default: true; false: all tokens count",
            "nargs": "?",  # the flag alone says True
            "const": True,
        },
    )
    per_device_train_batch_size: int = field(default=1, metadata={"help": "blocks in one forward pass, on each device"})
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "forward passes per step (YaRN, PI: 64 blocks)"}
    )
    # YaRN, section 4.1: rate 2e-5, no weight decay, linear warm-up over 20 steps, AdamW with 0.9 and 0.95.
    # PI, section 3.1: the same for 7B and 13B (1e-5 for larger ones), warming up from a tenth. Neither names a decay.
    learning_rate: float = field(default=2e-5, metadata={"help": "peak learning rate (YaRN, PI for 7B: 2e-5)"})
    lr_scheduler_type: str = field(
        default="constant_with_warmup", metadata={"help": "constant_with_warmup, linear, cosine, ..."}
    )
    warmup_steps: float = field(
        default=20,
        metadata={
            "help": "steps of linear warm-up (YaRN, PI: 20), at most a fifth of the run; below 1: share of the run"
        },
    )
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay of AdamW; YaRN and PI use none"})
    adam_beta1: float = field(default=0.9, metadata={"help": "first beta of AdamW (YaRN, PI: 0.9)"})
    adam_beta2: float = field(default=0.95, metadata={"help": "second beta of AdamW (YaRN, PI: 0.95)"})
    max_grad_norm: float = field(
        default=1.0, metadata={"help": "largest norm of the gradient, which is clipped to it; 0: no clipping"}
    )
    # LongLoRA, section 3.3: adapters alone fall well short of full fine-tuning at long contexts; training the
    # embedding and the norms as well, a small share of the parameters, closes the gap. Rank 8 on the attention.
    lora: bool = field(default=False, metadata={"help": "train adapters, the embedding and the norms, not all weights"})
    lora_rank: int = field(default=8, metadata={"help": "rank of the adapters (LongLoRA: 8)"})
    lora_alpha: int = field(
        default=16, metadata={"help": "alpha of the adapters, whose output is scaled by alpha / rank"}
    )
    lora_targets: Literal["attention", "all-linear"] = field(
        default="attention",
        metadata={"help": "layers that get adapters: the attention projections, or all linear layers"},
    )
    lora_embeddings: bool = field(
        default=True, metadata={"help": "with --lora, train the embedding and the norms too (LongLoRA's LoRA+)"}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "recompute each layer in the backward pass: less memory, about a third slower"}
    )
    bf16: bool | None = field(  # type: ignore[assignment]  # None leaves it to the model and the machine
        default=None,
        metadata={
            "help": "compute in bfloat16 (autocast); default: true if the checkpoint is in half precision and the "
            "hardware has instructions for bfloat16. In both cases weights are trained in float32, and saved in the "
            "checkpoint's dtype"
        },
    )
    seed: int = field(
        default=0, metadata={"help": "random seed of the order of documents and blocks, and of new weights"}
    )
    save_steps: float = field(default=100, metadata={"help": "steps between checkpoints"})
    save_total_limit: int | None = field(
        default=2, metadata={"help": "number of checkpoints that are kept; older ones are deleted"}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "continue from the last intact checkpoint, or from a named one",
            "nargs": "?",
            "const": "true",
        },
    )
    check_first_loss: bool = field(
        default=True,
        metadata={"help": "stop if the first loss differs from the loss of the same tokens outside of the trainer"},
    )
    logging_steps: float = field(
        default=1, metadata={"help": "steps between losses printed on the console; train_log.jsonl has every step"}
    )
    # Trainer's own default would drop position_ids where it does not see them in a model's forward.
    remove_unused_columns: bool = field(default=False, metadata={"help": argparse.SUPPRESS})
    # A name, "true", or None: ``repository`` says where the model goes.
    push_to_hub: str | None = field(  # type: ignore[assignment]  # TrainingArguments takes no name
        default=None,
        metadata={
            "help": "push the trained model to the Hugging Face Hub, to this repository; without a name: to "
            "--hub-model-id, or one that is called as --output-dir",
            "nargs": "?",
            "const": "true",
            "metavar": "NAME",
        },
    )
    hub_strategy: str = field(default="end", metadata={"help": argparse.SUPPRESS})
    eval_lengths: list[ContextLength] | None = field(
        default=None,
        metadata={
            "help": "lengths to measure perplexity at; default: half the original length, the original, the target"
        },
    )
    eval_documents: int = field(
        default=8,
        metadata={"help": "number of held-out texts, as long as the longest measured length; 0: measure nothing"},
    )
    logits_chunk: int = field(
        default=DEFAULT_ROWS_PER_CHUNK,
        metadata={"help": "positions whose logits are in memory at one time in the loss"},
    )

    def __post_init__(self) -> None:  # not that of TrainingArguments, which sets up devices and process groups
        self.output_dir = os.path.expanduser(str(self.output_dir))
        if not self.output_dir:
            raise InvalidRequestError(f"{argument('output_dir')} is empty: name the folder the trained model goes to.")
        lengths = ("context_length", "original_max_position_embeddings", "seq_len")
        for name, kind in (*((name, ContextLength) for name in lengths), ("token_budget", TokenCount)):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check_count(name, value, kind))
        if self.seq_len is not None and self.seq_len < 2:
            raise InvalidRequestError(f"{argument('seq_len')} must be at least 2 tokens, got {self.seq_len}.")
        if self.eval_lengths is not None:
            if not isinstance(self.eval_lengths, (list, tuple)):
                raise InvalidTypeError(
                    f"{argument('eval_lengths')} must be a list of lengths in tokens, got {self.eval_lengths!r}."
                )
            self.eval_lengths = [check_count("eval_lengths", n, ContextLength) for n in self.eval_lengths]  # type: ignore[misc]  # an int becomes a ContextLength
        if self.rope_scaling is not None:
            self._read_rope_scaling()
        self._check_method()
        self._take_first_names()
        vars(self).update(check_numbers(vars(self)))
        if self.task_mix is not None:
            shares = read_shares(self.task_mix)
            check_mixture(self, shares)
            self.task_mix = words_of(shares)
        vars(self).update(check_trainer_options(self))
        check_words(self)
        check_rule(self.position_schedule, self.method)
        check_trackers(self.report_to)
        self._check_publishing()
        self._check_resuming()
        self._check_recipe()
        if self.stages is not None:
            self.target_stages()
            decided = ("factor", "context_length", "preset")
            if given := [name for name in decided if getattr(self, name) is not None]:
                raise InvalidRequestError(f"stages say the target lengths: leave out {' and '.join(given)}.")
        if self.seq_len is not None:
            self.group(self.seq_len)

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
        found: dict[str, Any] = {}
        for one in dataclasses.fields(cls):
            value = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            if one.init and value is not dataclasses.MISSING:
                found[one.name] = value.value if isinstance(value, Enum) else value
        return found

    def settings(self) -> dict[str, Any]:
        """Return the run as plain values by name, for files: no tokens, and of TrainingArguments what is not usual."""
        usual, ours = self.defaults(), {*FinetuneConfig.__annotations__} - decided_options().keys()
        return {
            name: value
            for name, value in vars(self).items()
            if name not in _SECRET and (name in ours or (name in usual and value != usual[name]))
        }

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.resume_from_checkpoint is not None

    @property
    def named_checkpoint(self) -> Path | None:
        """The checkpoint to go on from; None for the last one, and where the run begins."""
        named = self.resume_from_checkpoint
        return None if named in (None, "true") else Path(str(named)).expanduser()

    @property
    def repository(self) -> str | None:
        """Name of the repository on the Hub that the trained model is pushed to; None where it is not pushed."""
        if self.push_to_hub != "true":
            return self.push_to_hub
        return self.hub_model_id or Path(str(self.output_dir)).absolute().name

    def _take_first_names(self) -> None:
        for newer, name in _RENAMED.items():
            if getattr(self, newer, None) is not None:
                setattr(self, name, getattr(self, newer))
                setattr(self, newer, None)

    def _check_publishing(self) -> None:
        self.push_to_hub = given = _word_or_name(self.push_to_hub)
        if given not in (None, "true") and self.hub_model_id not in (None, given):
            raise InvalidRequestError(
                f"{argument('push_to_hub')} says {given!r} and {argument('hub_model_id')} {self.hub_model_id!r}. "
                "Give one of them."
            )

    def _check_resuming(self) -> None:
        self.resume_from_checkpoint = given = _word_or_name(self.resume_from_checkpoint)
        named = self.named_checkpoint
        if named is not None and named.resolve().parent != Path(str(self.output_dir)).resolve():
            raise InvalidRequestError(
                f"{argument('resume_from_checkpoint')} {str(given)!r} is no checkpoint of the run in "
                f"{self.output_dir}. Give a folder checkpoint-STEP of that run, or True for its last one."
            )
        if named is not None and self.stages is not None:
            raise InvalidRequestError("stages go on by themselves: give resume_from_checkpoint=True, without a folder.")

    def _read_rope_scaling(self) -> None:
        request = read_rope_scaling(self.rope_scaling)  # type: ignore[arg-type]  # it is not None
        decided = ("method", "factor", "original_max_position_embeddings", "preset", "options")
        request.refuse_other(**{name: getattr(self, name) for name in decided})
        request.check_length_is_said(self.context_length, self.stages)
        for name, value in {**dataclasses.asdict(request), "rope_scaling": None}.items():
            setattr(self, name, value)

    def _check_method(self) -> None:
        factor = 1.0 if self.factor is None else self.factor
        if self.factor is not None and self.context_length is not None:
            raise InvalidRequestError(
                f"give factor or context_length, not both (got {self.factor} and {self.context_length}): "
                "factor is context_length / original length."
            )
        if not isinstance(self.options, dict):
            raise InvalidTypeError(f'options must be a dict such as {{"beta_fast": 16}}, got {self.options!r}.')
        if self.method is not None:
            self.method = get_method(self.method).name
        if self.preset is not None:
            decided = ("method", "factor", "context_length", "original_max_position_embeddings", "options")
            get_preset(self.preset).refuse_besides(**{name: getattr(self, name) for name in decided})
        self.sliding_window = str(check_window(self.sliding_window))
        # The options of a method that the model brings are checked against that model.
        method = make_method(self.method or DEFAULT_METHOD, factor, self.options if self.method is not None else {})
        if self.shifted_sparse_attention and method.needs_hf_posenc:
            raise InvalidRequestError(
                f"{argument('shifted_sparse_attention')} is for static methods, such as 'yarn' and 'linear': "
                f"{self.method!r} has an attention of its own."
            )

    def _check_recipe(self) -> None:
        if self.recipe is None:
            return
        recipe = get_recipe(self.recipe)
        self.recipe = recipe.name
        usual = self.defaults()
        rule = {"method", "options"} if self.preset is not None else set()  # which the preset decides
        changed = [name for name, value in recipe.values.items() if value != usual[name] and name not in rule]
        if changed and all(getattr(self, name) == usual[name] for name in changed):
            raise InvalidRequestError(
                f"recipe {recipe.name!r} is named, but none of its values is set. FinetuneConfig.from_recipe("
                f"{recipe.name!r}, output_dir=...) sets them."
            )

    def target_stages(self) -> list[Stage]:
        """Return what ``stages`` says: each word is ``LENGTH:BUDGET``, or ``LENGTH`` for equal shares of the budget.

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
        for number, word in enumerate(words, 1):
            length, colon, budget = word.partition(":")
            try:
                tokens = TokenCount(budget) if colon else self.token_budget // len(words)
                stages.append(Stage(number, ContextLength(length), tokens))
            except ValueError as error:
                raise InvalidRequestError(
                    f"stages: {word!r} is not LENGTH:BUDGET, such as 16k:500k ({error})."
                ) from None
        lengths = [stage.length for stage in stages]
        if lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise InvalidRequestError(f"stages: the lengths must rise, got {', '.join(map(str, lengths))} tokens.")
        return stages

    def blocks_per_step(self) -> int:
        """Return the blocks of one optimizer step, over all processes of this launch.

        Processes that share a sequence read the same blocks.
        """
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * Launch.from_environment().replicas

    @property
    def packs_documents(self) -> bool:
        """Whether a block may hold several documents; torch's context parallelism knows no mask that parts them."""
        return self.packing and Launch.from_environment().cp_size == 1

    def tokens_per_step(self, seq_len: int) -> int:
        """Return the tokens of one optimizer step, over all processes of this launch, in blocks of ``seq_len``."""
        return self.blocks_per_step() * seq_len

    def tokens_per_block(self, original: int, target: int) -> int:
        """Return ``seq_len``, or the target length, or with skipped positions the original length."""
        return self.seq_len or (target if self.position_schedule == "full" else original)

    def group(self, seq_len: int) -> int | None:
        """Return the tokens of a group of shifted sparse attention, for blocks of ``seq_len``; None for no groups.

        Raises:
            ValueError: A group would have fewer than 2 tokens.
        """
        if not self.shifted_sparse_attention:
            return None
        group = round(seq_len * self.group_share)
        if group < 2:
            raise InvalidRequestError(
                f"{argument('group_share')} {self.group_share} of a block of {seq_len} tokens gives groups of {group}, "
                "and they need 2 at least. LongLoRA takes a quarter of the block."
            )
        return group

    def fixed_settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the run it continues, JSON-able."""
        fixed = {
            name: value
            for name, value in self.settings().items()
            if name not in _FREE_ON_RESUME and not name.startswith(_FREE_PREFIXES)
        }
        plain: dict[str, Any] = json.loads(json.dumps(fixed))
        return plain


def _word_or_name(given: str | bool | None) -> str | None:
    """Return what a field holds that takes True, False or a name: None for no, "true", or the name."""
    word = str(given).lower()  # a flag is a word
    if word in ("true", "false", "none"):
        return "true" if word == "true" else None
    return str(given)


def _other_trainer_options() -> tuple[str, ...]:
    shown = {name for names in FinetuneConfig.HELP_GROUPS.values() for name in names} | FinetuneConfig.HELP_HIDDEN
    return tuple(one.name for one in dataclasses.fields(TrainingArguments) if one.init and one.name not in shown)


FinetuneConfig.HELP_GROUPS[_TRAINER_GROUP] = _other_trainer_options()
