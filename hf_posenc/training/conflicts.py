"""The settings of a run that do not go together with each other, with its launch or with its model, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hf_posenc.errors import InvalidRequestError, MissingPackageError
from hf_posenc.families.unmasked_layers import in_words
from hf_posenc.methods.registry import method_names
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_folder import last_checkpoint

EIGHT_BIT_ADAMW = "adamw_bnb_8bit"
_BITSANDBYTES = ("bnb", "paged", "lion", "ademamix")  # in the names of its optimizers; and adamw_8bit


def is_of_bitsandbytes(optim: str) -> bool:
    """Say whether an optimizer is one of bitsandbytes, which keep their states in blocks of whole weights."""
    return optim == "adamw_8bit" or any(part in optim for part in _BITSANDBYTES)


_FLASH = ("flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Combination:
    """A run as far as it is known: its settings, its launch and its model.

    Attributes:
        config: The settings.
        launch: How the processes of the run were started.
        attention: The attention implementation; None if that is left to Transformers, which takes SDPA.
        is_quantised: The model's weights are quantised; None if that is not known yet.
        unmasked: The layers in which no mask keeps packed documents apart; empty if that is not known yet.
        seq_len: Tokens of a block; None if that is not known yet.
        changes_attention: The model's method is computed in its attention.
        method: The name of the method; None if that is not known yet.
    """

    config: FinetuneConfig
    launch: Launch
    attention: str | None = None
    is_quantised: bool | None = None
    unmasked: Mapping[str, int] = field(default_factory=dict)
    seq_len: int | None = None
    changes_attention: bool = False
    method: str | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the run resumes from; None if it begins."""
        if not self.config.resumes:
            return None
        named = self.config.named_checkpoint
        return named or last_checkpoint(Path(str(self.config.output_dir)))

    def checkpoint_has(self, pattern: str) -> bool:
        """Return whether the run resumes from a checkpoint with such a file or folder."""
        return self.checkpoint is not None and any(self.checkpoint.glob(pattern))


class Conflict(NamedTuple):
    """Settings that do not go together: a limit of PyTorch, accelerate, DeepSpeed or this package.

    Found late it costs a loaded model, and some would never be found: the run would train on wrong positions or masks.

    Attributes:
        holds: Whether a run has it.
        message: What does not go together and what to do; formatted with ``config``, ``launch``, ``attention``,
            ``seq_len`` and ``method``.
    """

    holds: Callable[[Combination], bool]
    message: str


_FSDP_SHARDS, _DEEPSPEED_FILES = "pytorch_model_fsdp_*", "global_step*"  # in a checkpoint
CONFLICTS = (
    Conflict(
        lambda s: s.launch.fsdp == 1,
        "FSDP version 1 casts buffers under mixed precision, so it rounds the rotary frequencies. Use FSDP2: "
        "--accelerate-config fsdp2 (fsdp_version: 2).",
    ),
    Conflict(
        lambda s: s.launch.fsdp > 0 and s.launch.wraps_layers,
        "fsdp_activation_checkpointing wraps the layers, whose names then fit no checkpoint. Set it to false and pass "
        "gradient_checkpointing=True (--gradient-checkpointing).",
    ),
    Conflict(
        lambda s: s.launch.tp_size > 1,
        "tensor parallelism (parallelism_config_tp_size {launch.tp_size}) is not supported: the loss in chunks needs "
        "the whole head. Share out the weights by --accelerate-config fsdp2.",
    ),
    Conflict(
        lambda s: s.launch.processes % (s.launch.cp_size * s.launch.sp_size) != 0,
        "{launch.processes} processes cannot form groups of {launch.cp_size} x {launch.sp_size} (cp_size x sp_size). "
        "Start a multiple of that (--num-processes).",
    ),
    Conflict(
        lambda s: s.launch.cp_size > 1 and s.launch.sp_size > 1,
        "context parallelism (cp_size {launch.cp_size}) and Ulysses (sp_size {launch.sp_size}) both cut sequences. "
        "Set one of the sizes to 1.",
    ),
    Conflict(
        lambda s: s.launch.cp_size > 1 and s.launch.fsdp != 2,
        "context parallelism (cp_size {launch.cp_size}) needs FSDP2: --accelerate-config context_parallel_2gpu, or "
        "fsdp_version: 2 in a file of your own.",
    ),
    Conflict(
        lambda s: s.launch.cp_size > 1 and s.attention not in (None, "sdpa"),
        "context parallelism passes keys around in SDPA only, and attn_implementation is {attention!r}. Leave it out, "
        "or give sdpa.",
    ),
    Conflict(
        lambda s: s.launch.cp_size > 1 and s.seq_len is not None and s.seq_len % (2 * s.launch.cp_size) != 0,
        "context parallelism cuts a block into 2 x cp_size = 2 x {launch.cp_size} chunks, and seq_len {seq_len} is "
        "not divisible by that. Choose another seq_len (--seq-len).",
    ),
    Conflict(
        lambda s: s.launch.sp_size > 1 and s.launch.zero is None,
        "Ulysses (sp_size {launch.sp_size}) needs DeepSpeed: --accelerate-config alst_ulysses_4gpu, or "
        "distributed_type: DEEPSPEED in a file of your own.",
    ),
    Conflict(
        lambda s: s.launch.sp_size > 1 and (s.attention or s.launch.sp_attention) not in _FLASH,
        "Ulysses keeps packed documents apart with FlashAttention only (SDPA takes a block for one text): give "
        "attn_implementation flash_attention_2, and parallelism_config_sp_attn_implementation the same.",
    ),
    Conflict(
        lambda s: s.launch.sp_size > 1 and s.seq_len is not None and s.seq_len % s.launch.sp_size != 0,
        "Ulysses cuts a block into sp_size = {launch.sp_size} parts, and seq_len {seq_len} is not divisible by that. "
        "Choose another seq_len (--seq-len).",
    ),
    Conflict(
        lambda s: s.launch.cp_size > 1 and s.config.short_share > 0,
        "context parallelism knows no mask but the causal one, and short_share {config.short_share} reads blocks as "
        "several windows, which would see each other. Leave it out, or launch with --accelerate-config fsdp2.",
    ),
    Conflict(
        lambda s: s.launch.cp_size > 1 and s.config.task_mix is not None,
        "context parallelism cannot keep the pieces of a block apart, and those of task_mix may have several. Launch "
        "with --accelerate-config fsdp2.",
    ),
    Conflict(
        lambda s: bool(s.unmasked) and s.config.task_mix is not None,
        "the model cannot be trained on a task_mix, whose blocks hold several pieces: {layers} let a token see others "
        "whatever the attention mask says. Leave it out, and give packing=False (--packing false).",
    ),
    Conflict(
        lambda s: bool(s.unmasked) and s.config.short_share > 0,
        "the model cannot be trained with short_share {config.short_share}, which reads blocks as several windows: "
        "{layers} let a token see others whatever the attention mask says. Leave it out, and give packing=False "
        "(--packing false).",
    ),
    Conflict(
        lambda s: bool(s.unmasked) and s.launch.shares_sequences,
        "the model cannot be trained with context or sequence parallelism, which shows each process a part of a "
        "sequence: {layers} need all of it. Launch with --accelerate-config fsdp2, and give packing=False (--packing "
        "false).",
    ),
    Conflict(
        lambda s: bool(s.unmasked) and s.config.packing,
        "the model cannot keep several documents of a block apart: {layers} let a token see others whatever the "
        "attention mask says. Give packing=False (--packing false): a block is then one document, cut or padded to "
        "its length.",
    ),
    Conflict(
        lambda s: s.launch.shares_sequences and s.changes_attention,
        "{method} changes the attention itself, which then sees one process' part of a sequence only. Train it "
        "without context or sequence parallelism: --accelerate-config fsdp2.",
    ),
    Conflict(
        lambda s: s.launch.shares_sequences and s.config.shifted_sparse_attention,
        "shifted_sparse_attention groups the tokens of a whole block, and context or sequence parallelism shows each "
        "process a part of it. Use one of the two.",
    ),
    Conflict(
        lambda s: s.config.shifted_sparse_attention and (s.attention or "sdpa") not in ("sdpa", "eager"),
        "shifted_sparse_attention computes its groups with SDPA, and attn_implementation is {attention!r}. Leave it "
        "out, or give sdpa.",
    ),
    Conflict(
        lambda s: s.config.lora and s.method in method_names("has_parameters"),
        "{method} has parameters, which an adapter does not hold: PEFT saves its own alone. Train without LoRA.",
    ),
    Conflict(
        lambda s: s.config.trainable == "attention" and s.method in method_names("has_parameters"),
        "{method} has parameters outside the attention, which trainable 'attention' leaves as they begin. "
        "Train all weights.",
    ),
    Conflict(
        lambda s: bool(s.is_quantised) and (s.launch.fsdp > 0 or s.launch.zero == 3),
        "quantised weights cannot be shared out by FSDP2 or ZeRO-3 and put together again. Launch with "
        "--accelerate-config multi_gpu, which keeps the small model whole on each GPU.",
    ),
    Conflict(
        lambda s: is_of_bitsandbytes(str(s.config.optim)) and (s.launch.fsdp > 0 or s.launch.zero is not None),
        "optim {config.optim} keeps its states in blocks of whole weights, which FSDP2 and DeepSpeed share out. Launch "
        "with --accelerate-config multi_gpu, or leave optim out.",
    ),
    Conflict(
        lambda s: s.checkpoint_has(_FSDP_SHARDS) and (s.launch.fsdp != 2 or "SHARDED" not in s.launch.state_dict),
        "the checkpoint in {config.output_dir} is FSDP2's SHARDED_STATE_DICT, which only the same kind of launch "
        "reads. Resume with it (fsdp_state_dict_type: SHARDED_STATE_DICT), or begin in another output_dir.",
    ),
    Conflict(
        lambda s: s.checkpoint_has(_DEEPSPEED_FILES) and s.launch.zero is None,
        "the checkpoint in {config.output_dir} is DeepSpeed's, which no other launch reads. Resume with the "
        "configuration it was begun with, or begin in another output_dir.",
    ),
    Conflict(
        lambda s: s.launch.zero is not None and s.checkpoint is not None and not s.checkpoint_has(_DEEPSPEED_FILES),
        "the checkpoint in {config.output_dir} was not written by DeepSpeed, which reads its own only. Resume without "
        "DeepSpeed, or begin in another output_dir.",
    ),
)


def refuse_conflicts(run: Combination) -> None:
    """Refuse a run whose settings, launch and model do not go together.

    Raises:
        InvalidRequestError: With the message of the first conflict.
        MissingPackageError: The optimizer belongs to a package that is not installed.
    """
    if is_of_bitsandbytes(str(run.config.optim)) and find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            f"--optim {run.config.optim} needs a package that is not installed: pip install bitsandbytes"
        )
    words = {**vars(run), "layers": in_words(run.unmasked)}
    for conflict in CONFLICTS:
        if conflict.holds(run):
            raise InvalidRequestError(conflict.message.format(**words))
