"""What a fine-tuning run is told, checked before any weights are touched. The defaults are the papers'."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from hf_posenc.evaluation.lm_head import DEFAULT_ROWS_PER_CHUNK
from hf_posenc.families.sliding_window import check_window
from hf_posenc.methods.registry import DEFAULT_METHOD, get_method, make_method
from hf_posenc.patching.presets import get_preset
from hf_posenc.patching.rope_scaling import read_rope_scaling
from hf_posenc.training.positions import check_rule
from hf_posenc.training.recipes import get_recipe, recipe_values
from hf_posenc.training.setting_checks import LR_SCHEDULES, OPTIMIZERS, check_count, check_numbers, check_words
from hf_posenc.training.stage_list import parse_stages
from hf_posenc.training.trackers import check_tracker
from hf_posenc.utils.units import ContextLength, TokenCount

# What may differ between a run and its continuation: none of it changes what is trained or held out.
# A step's blocks may be shared out otherwise, among other numbers of processes: their number is held fixed instead.
_FREE_ON_RESUME = frozenset({"output_dir", "resume", "save_steps", "report_to", "run_name", "logging_steps"})
_FREE_ON_RESUME |= {"model_values", "check_first_loss", "micro_batch_size", "gradient_accumulation_steps"}


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run. Each field's help text is its documentation (and the command line's).

    Raises:
        ValueError, TypeError: A value is out of range, unknown, or contradicts another.
    """

    # Headings of ``hf-posenc finetune --help``; every field stands under one.
    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The run": ("output_dir", "recipe", "seed", "resume", "save_steps", "check_first_loss"),
        "How the model is extended": (
            *("method", "preset", "rope_scaling", "factor", "context_length", "original_max_position_embeddings"),
            *("sliding_window", "on_scaled", "options", "model_values", "stages"),
        ),
        "Blocks of tokens and their positions": (
            *("token_budget", "seq_len", "position_schedule", "pose_chunks", "short_share", "length_upsampling"),
            *("shifted_sparse_attention", "group_share"),
        ),
        "What counts in the loss": ("assistant_only_loss", "completion_only_loss"),
        "Steps of the optimizer": (
            *("micro_batch_size", "gradient_accumulation_steps", "optim", "learning_rate", "lr_schedule"),
            *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm"),
        ),
        "Adapters": ("lora", "lora_rank", "lora_alpha", "lora_targets", "lora_embeddings"),
        "Memory and precision": ("gradient_checkpointing", "bf16", "logits_chunk"),
        "What is measured and logged": ("eval_lengths", "eval_documents", "logging_steps", "report_to", "run_name"),
    }

    output_dir: str = field(metadata={"help": "folder for checkpoints, logs, results and the trained model"})
    # Only the name: the values are put in by ``from_recipe``, and by the command line.
    recipe: str | None = field(
        default=None, metadata={"help": "a name from `hf-posenc recipes`; all other flags win over its values"}
    )
    method: str | None = field(
        default=None,
        metadata={"help": "extension method (see `methods`); default: yarn, unless the model is extended already"},
    )
    preset: str | None = field(
        default=None, metadata={"help": "a name from `hf-posenc presets`, instead of method, factor and options"}
    )
    # Put into method, factor, original length, options and model_values when the run is made; None from then on.
    rope_scaling: str | None = field(
        default=None,
        metadata={
            "help": "a dictionary as vLLM, LLaMA-Factory and Transformers take it, instead of method, factor and "
            """options: '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'"""
        },
    )
    factor: float | None = field(
        default=None, metadata={"help": "target length / original length; 4, 4x further, if no length is given either"}
    )
    context_length: ContextLength | None = field(
        default=None, metadata={"help": "target length in tokens (32k = 32768), instead of --factor"}
    )
    original_max_position_embeddings: ContextLength | None = field(
        default=None, metadata={"help": "tokens the model was trained on; default: what its config says"}
    )
    # A number of tokens is taken too, and kept as its digits.
    sliding_window: str = field(
        default="keep", metadata={"help": "what becomes of a window that every layer has: keep, off or tokens (16k)"}
    )
    on_scaled: Literal["refuse", "replace"] = field(
        default="refuse",
        metadata={"help": "replace: put the method in place of the scaling that the checkpoint came with"},
    )
    # Options of the method, such as {"beta_fast": 16}. Not shown as a flag: the command line has --option for them.
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": argparse.SUPPRESS})
    # What rope_scaling repeats of the model, such as its rope_theta: held against the model before it is extended.
    model_values: dict[str, Any] = field(default_factory=dict, metadata={"help": argparse.SUPPRESS})
    # YaRN (section 4.1) takes 400 steps of 64 blocks of 64k tokens, 1.7 B tokens; in PI (table 4) the whole window
    # is in use after 200 steps. 1M is a first try: hundreds of steps for a small model, and cheap to raise.
    token_budget: TokenCount = field(
        default=TokenCount("1M"),
        metadata={"help": "tokens to train on (300k, 1M) at most, in whole steps, one at least"},
    )
    seq_len: ContextLength | None = field(
        default=None,
        metadata={
            "help": "tokens of a training block; default: the target length, as in YaRN and PI, or the original "
            "length where positions skip"
        },
    )
    # PoSE, section 3.2: two chunks of a short window, skipped apart at random, show every distance up to the target.
    position_schedule: Literal["full", "pose", "random"] = field(
        default="full",
        metadata={
            "help": "positions of a training block: full (one after the other); pose (two chunks of a block of the "
            "original length, skipped apart by up to the target); random (as many of the target's, in order)"
        },
    )
    pose_chunks: int = field(default=2, metadata={"help": "chunks of a block for --position-schedule pose (PoSE: 2)"})
    short_share: float = field(
        default=0.0,
        metadata={"help": "share of the blocks read as windows of the original length, to keep short texts; 0 to 1"},
    )
    length_upsampling: float = field(
        default=1.0,
        metadata={"help": "documents longer than the original length are read this many times as often as others"},
    )
    # Chen et al. 2024, LongRoPE and others grow in steps; each stage is a run of its own length and budget.
    stages: list[str] | None = field(
        default=None,
        metadata={"help": "target lengths and budgets one after the other, such as 16k:500k 32k:500k, instead of one"},
    )
    # LongLoRA, section 3.2: half of the heads see groups shifted by half a group; a quarter of the block each.
    shifted_sparse_attention: bool = field(
        default=False, metadata={"help": "attend within groups of a block while training (LongLoRA); full afterwards"}
    )
    group_share: float = field(
        default=0.25, metadata={"help": "group of --shifted-sparse-attention as a share of the block (LongLoRA: 1/4)"}
    )
    # TRL's names and defaults.
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "of chats only the assistant's turns count in the loss, not all tokens"}
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={
            "help": "of prompts with answers only the answers count in the loss; default: yes; false: all tokens",
            "nargs": "?",  # the flag alone says True
            "const": True,
        },
    )
    micro_batch_size: int = field(default=1, metadata={"help": "blocks per forward and device"})
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "forwards per optimizer step; YaRN and PI step on 64 blocks"}
    )
    optim: str | None = field(
        default=None,
        metadata={
            "help": f"{' | '.join(OPTIMIZERS)}; default: the Trainer's AdamW. The last holds its states in 8 bits "
            "(bitsandbytes), but those of the embedding and of small weights: 2 bytes a weight in the place of 8"
        },
    )
    # YaRN, section 4.1: rate 2e-5, no weight decay, linear warm-up over 20 steps, AdamW with 0.9 and 0.95.
    # PI, section 3.1: the same for 7B and 13B (1e-5 for larger ones), warming up from a tenth. Neither names a decay.
    learning_rate: float = field(default=2e-5, metadata={"help": "peak rate; 2e-5 is YaRN's and PI's for 7B models"})
    lr_schedule: str = field(default="constant_with_warmup", metadata={"help": " | ".join(LR_SCHEDULES)})
    warmup_steps: int = field(
        default=20, metadata={"help": "steps of linear warm-up (YaRN, PI: 20); at most a fifth of a short run"}
    )
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's; YaRN and PI use none"})
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW's first beta (YaRN, PI)"})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second beta (YaRN, PI)"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "clip the gradient's norm; 0 does not clip"})
    # LongLoRA, section 3.3: adapters alone fall well short of full fine-tuning at long contexts; training the
    # embedding and the norms as well, a small share of the parameters, closes the gap. Rank 8 on the attention.
    lora: bool = field(default=False, metadata={"help": "train adapters, the embedding and the norms, not all weights"})
    lora_rank: int = field(default=8, metadata={"help": "rank of the adapters (LongLoRA: 8)"})
    lora_alpha: int = field(default=16, metadata={"help": "the adapters' output is scaled by alpha / rank"})
    lora_targets: Literal["attention", "all-linear"] = field(
        default="attention", metadata={"help": "layers that get adapters: those of the attention, or all linear ones"}
    )
    lora_embeddings: bool = field(
        default=True, metadata={"help": "train the embedding and the norms too (LongLoRA's LoRA+)"}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "recompute each layer in the backward pass: less memory, about a third slower"}
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "compute in bfloat16 (autocast); default: if the checkpoint is in half precision and the hardware "
            "has instructions for bfloat16. Trained weights are float32 either way, and saved as they came"
        },
    )
    seed: int = field(default=0, metadata={"help": "of the order of the documents and blocks, and of new weights"})
    save_steps: int = field(default=100, metadata={"help": "steps between checkpoints; the last two are kept"})
    resume: bool = field(default=False, metadata={"help": "go on from the last checkpoint in the output folder"})
    check_first_loss: bool = field(
        default=True,
        metadata={"help": "stop if the first loss is not what the same tokens give outside of the trainer"},
    )
    logging_steps: int = field(
        default=1, metadata={"help": "steps between losses shown on the console; train_log.jsonl has every step"}
    )
    report_to: str = field(
        default="none", metadata={"help": "none | tensorboard | wandb | trackio | ... | all (that are installed)"}
    )
    run_name: str | None = field(default=None, metadata={"help": "name of the run, for the tracker"})
    eval_lengths: list[ContextLength] | None = field(
        default=None,
        metadata={
            "help": "lengths perplexity is measured at; default: half the original length, the original, the target"
        },
    )
    eval_documents: int = field(
        default=8, metadata={"help": "held-out texts of the longest measured length; 0 measures nothing"}
    )
    logits_chunk: int = field(
        default=DEFAULT_ROWS_PER_CHUNK, metadata={"help": "rows whose logits exist at one time in the loss"}
    )

    def __post_init__(self) -> None:
        self._set("output_dir", str(self.output_dir))
        if not self.output_dir:
            raise ValueError("output_dir is empty: name the folder the trained model goes to.")
        lengths = ("context_length", "original_max_position_embeddings", "seq_len")
        for name, kind in (*((name, ContextLength) for name in lengths), ("token_budget", TokenCount)):
            if (value := getattr(self, name)) is not None:
                self._set(name, check_count(name, value, kind))
        if self.seq_len is not None and self.seq_len < 2:
            raise ValueError(f"seq_len must be at least 2 tokens, got {self.seq_len}.")
        if self.eval_lengths is not None:
            if not isinstance(self.eval_lengths, (list, tuple)):
                raise TypeError(f"eval_lengths must be a list of lengths in tokens, got {self.eval_lengths!r}.")
            self._set("eval_lengths", [check_count("eval_lengths", n, ContextLength) for n in self.eval_lengths])
        if self.rope_scaling is not None:
            self._read_rope_scaling()
        self._check_method()
        for name, value in check_numbers(vars(self)).items():
            self._set(name, value)
        check_words(vars(self))
        check_rule(self.position_schedule, self.method)
        check_tracker(self.report_to)
        self._check_recipe()
        self._check_stages()
        if self.seq_len is not None:
            self.group(self.seq_len)

    @classmethod
    def from_recipe(cls, name: str, **overrides: Any) -> Self:
        """Make a run with the values of a recipe (see ``hf_posenc.training.recipes``); ``overrides`` win over them.

        Raises:
            ValueError, TypeError: The recipe is unknown, or as for any run.
        """
        return cls(**recipe_values(name, overrides))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _read_rope_scaling(self) -> None:
        asked = read_rope_scaling(self.rope_scaling)  # type: ignore[arg-type]  # it is there
        decided = ("method", "factor", "original_max_position_embeddings", "preset", "options")
        asked.refuse_other(**{name: getattr(self, name) for name in decided})
        asked.check_length_is_said(self.context_length, self.stages)
        for name, value in {**dataclasses.asdict(asked), "rope_scaling": None}.items():
            self._set(name, value)

    def _check_method(self) -> None:
        factor = 1.0 if self.factor is None else self.factor
        if self.factor is not None and self.context_length is not None:
            raise ValueError(
                f"give factor or context_length, not both (got {self.factor} and {self.context_length}): "
                "factor is context_length / original length."
            )
        if not isinstance(self.options, dict):
            raise TypeError(f'options must be a dict such as {{"beta_fast": 16}}, got {self.options!r}.')
        if self.method is not None:
            self._set("method", get_method(self.method).name)
        if self.preset is not None:
            decided = ("method", "factor", "context_length", "original_max_position_embeddings", "options")
            get_preset(self.preset).refuse_besides(**{name: getattr(self, name) for name in decided})
        self._set("sliding_window", str(check_window(self.sliding_window)))
        # The options of a method that the model brings are checked against that model.
        method = make_method(self.method or DEFAULT_METHOD, factor, self.options if self.method is not None else {})
        if self.shifted_sparse_attention and method.runs_in_attention:
            raise ValueError(
                f"shifted_sparse_attention is for static methods, such as 'yarn' and 'linear': {self.method!r} has an "
                "attention of its own."
            )

    def _check_recipe(self) -> None:
        if self.recipe is None:
            return
        recipe = get_recipe(self.recipe)
        self._set("recipe", recipe.name)
        usual = {one.name: one.default for one in dataclasses.fields(self)} | {"options": {}}
        rule = {"method", "options"} if self.preset is not None else set()  # which the preset decides
        changed = [name for name, value in recipe.values.items() if value != usual[name] and name not in rule]
        if changed and all(getattr(self, name) == usual[name] for name in changed):
            raise ValueError(
                f"recipe {recipe.name!r} is named, but none of its values is set. FinetuneConfig.from_recipe("
                f"{recipe.name!r}, output_dir=...) sets them."
            )

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        parse_stages(self.stages, self.token_budget)
        decided = ("factor", "context_length", "preset")
        if given := [name for name in decided if getattr(self, name) is not None]:
            raise ValueError(f"stages say the target lengths: leave out {' and '.join(given)}.")

    def group(self, seq_len: int) -> int | None:
        """Return the tokens of a group of shifted sparse attention, for blocks of ``seq_len``; None for no groups.

        Raises:
            ValueError: A group would have fewer than 2 tokens.
        """
        if not self.shifted_sparse_attention:
            return None
        group = round(seq_len * self.group_share)
        if group < 2:
            raise ValueError(
                f"group_share {self.group_share} of a block of {seq_len} tokens gives groups of {group}, and they need "
                "2 at least. LongLoRA takes a quarter of the block."
            )
        return group

    def fixed_settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the run it continues, JSON-able."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _FREE_ON_RESUME}
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain
