"""Settings that do not go together, refused by one message each before any weights are loaded.

Each rule is a limit of PyTorch, accelerate, DeepSpeed or this package. Found late it costs a loaded model, and some
would never be found: the run would train on wrong positions or masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from hf_posenc.attention.masks import inner_name
from hf_posenc.errors import InvalidRequestError, MissingPackageError
from hf_posenc.methods.registry import make_method, method_names
from hf_posenc.training.checkpoints import last_checkpoint
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.launch import Launch
from hf_posenc.training.setting_checks import is_of_bitsandbytes

_FLASH = ("flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Levers:
    """What the rules look at.

    Attributes:
        config: The run.
        launch: How its processes were started.
        attention: ``attn_implementation``; None if that is left to Transformers, which takes SDPA.
        quantised: The model's weights are; None if that is not known yet.
        seq_len: Tokens of a block; None if that is not known before the model's config is read.
        runs_in_attention: The rule of the model, as it came, is in its attention.
    """

    config: FinetuneConfig
    launch: Launch
    attention: str | None = None
    quantised: bool | None = None
    seq_len: int | None = None
    runs_in_attention: bool = False

    @property
    def door(self) -> bool:
        """Whether the method changes the attention itself, as ``dynamic`` and ``self_extend`` do."""
        method = self.config.method
        return self.runs_in_attention or (method is not None and make_method(method, 2.0, {}).runs_in_attention)

    @cached_property  # several rules ask, and every file of a checkpoint is looked at
    def checkpoint(self) -> Path | None:
        """Where the run goes on; None if it begins."""
        if not self.config.resumes:
            return None
        named = self.config.named_checkpoint
        return named or last_checkpoint(Path(str(self.config.output_dir)), contents=False)[0]


@dataclass(frozen=True)
class Rule:
    """One thing that does not go.

    Attributes:
        name: Short, for the tests.
        holds: Whether the settings break on it.
        message: What does not go and what to do; formatted with ``config``, ``launch``, ``attention``, ``seq_len`` and
            ``method``.
    """

    name: str
    holds: Callable[[Levers], bool]
    message: str


def _sharded_files(levers: Levers) -> bool:
    checkpoint = levers.checkpoint
    return checkpoint is not None and any(checkpoint.glob("pytorch_model_fsdp_*"))


def _deepspeed_files(levers: Levers) -> bool:
    checkpoint = levers.checkpoint
    return checkpoint is not None and any(checkpoint.glob("global_step*"))


RULES = (
    Rule(
        "fsdp1",
        lambda s: s.launch.fsdp == 1,
        "FSDP version 1 casts buffers under mixed precision, so it rounds the rotary frequencies. Use FSDP2: "
        "--accelerate-config fsdp2 (fsdp_version: 2).",
    ),
    Rule(
        "fsdp and its own activation checkpointing",
        lambda s: s.launch.fsdp > 0 and s.launch.wraps_layers,
        "fsdp_activation_checkpointing wraps the layers, whose names then fit no checkpoint. Set it to false and pass "
        "gradient_checkpointing=True (--gradient-checkpointing).",
    ),
    Rule(
        "tensor parallelism",
        lambda s: s.launch.tp_size > 1,
        "tensor parallelism (parallelism_config_tp_size {launch.tp_size}) is not supported: the loss in chunks needs "
        "the whole head. Share out the weights by --accelerate-config fsdp2.",
    ),
    Rule(
        "groups and processes",
        lambda s: s.launch.processes % (s.launch.cp_size * s.launch.sp_size) != 0,
        "{launch.processes} processes cannot form groups of {launch.cp_size} x {launch.sp_size} (cp_size x sp_size). "
        "Start a multiple of that (--num-processes).",
    ),
    Rule(
        "cp and sp",
        lambda s: s.launch.cp_size > 1 and s.launch.sp_size > 1,
        "context parallelism (cp_size {launch.cp_size}) and Ulysses (sp_size {launch.sp_size}) both cut sequences. "
        "Set one of the sizes to 1.",
    ),
    Rule(
        "cp without fsdp2",
        lambda s: s.launch.cp_size > 1 and s.launch.fsdp != 2,
        "context parallelism (cp_size {launch.cp_size}) needs FSDP2: --accelerate-config context_parallel_2gpu, or "
        "fsdp_version: 2 in a file of your own.",
    ),
    Rule(
        "cp and attention",
        lambda s: s.launch.cp_size > 1 and s.attention not in (None, "sdpa"),
        "context parallelism passes keys around in SDPA only, and attn_implementation is {attention!r}. Leave it out, "
        "or give sdpa.",
    ),
    Rule(
        "cp and seq_len",
        lambda s: s.launch.cp_size > 1 and s.seq_len is not None and s.seq_len % (2 * s.launch.cp_size) != 0,
        "context parallelism cuts a block into 2 x cp_size = 2 x {launch.cp_size} chunks, and seq_len {seq_len} is "
        "not divisible by that. Choose another seq_len (--seq-len).",
    ),
    Rule(
        "sp without deepspeed",
        lambda s: s.launch.sp_size > 1 and s.launch.zero is None,
        "Ulysses (sp_size {launch.sp_size}) needs DeepSpeed: --accelerate-config alst_ulysses_4gpu, or "
        "distributed_type: DEEPSPEED in a file of your own.",
    ),
    Rule(
        "sp and attention",
        lambda s: s.launch.sp_size > 1 and (s.attention or s.launch.sp_attention) not in _FLASH,
        "Ulysses keeps packed documents apart with FlashAttention only (SDPA takes a block for one text): give "
        "attn_implementation flash_attention_2, and parallelism_config_sp_attn_implementation the same.",
    ),
    Rule(
        "sp and seq_len",
        lambda s: s.launch.sp_size > 1 and s.seq_len is not None and s.seq_len % s.launch.sp_size != 0,
        "Ulysses cuts a block into sp_size = {launch.sp_size} parts, and seq_len {seq_len} is not divisible by that. "
        "Choose another seq_len (--seq-len).",
    ),
    Rule(
        "cp and short windows",
        lambda s: s.launch.cp_size > 1 and s.config.short_share > 0,
        "context parallelism knows no mask but the causal one, and short_share {config.short_share} reads blocks as "
        "several windows, which would see each other. Leave it out, or launch with --accelerate-config fsdp2.",
    ),
    Rule(
        "shared sequences and the attention door",
        lambda s: s.launch.shares_sequences and s.door,
        "{method} changes the attention itself, which then sees one process' part of a sequence only. Train it "
        "without context or sequence parallelism: --accelerate-config fsdp2.",
    ),
    Rule(
        "shifted attention and shared sequences",
        lambda s: s.launch.shares_sequences and s.config.shifted_sparse_attention,
        "shifted_sparse_attention groups the tokens of a whole block, and context or sequence parallelism shows each "
        "process a part of it. Use one of the two.",
    ),
    Rule(
        "shifted attention and flash",
        lambda s: s.config.shifted_sparse_attention and inner_name(s.attention or "sdpa") not in ("sdpa", "eager"),
        "shifted_sparse_attention computes its groups with SDPA, and attn_implementation is {attention!r}. Leave it "
        "out, or give sdpa.",
    ),
    Rule(
        "lora and the parameters of an encoding",
        lambda s: s.config.lora and s.config.method in method_names("has_parameters"),
        "{config.method} has parameters, which an adapter does not hold: PEFT saves its own alone. Train without LoRA.",
    ),
    Rule(
        "quantised and shared out",
        lambda s: bool(s.quantised) and (s.launch.fsdp > 0 or s.launch.zero == 3),
        "quantised weights cannot be shared out by FSDP2 or ZeRO-3 and put together again. Launch with "
        "--accelerate-config multi_gpu, which keeps the small model whole on each GPU.",
    ),
    Rule(
        "8-bit states shared out",
        lambda s: is_of_bitsandbytes(str(s.config.optim)) and (s.launch.fsdp > 0 or s.launch.zero is not None),
        "optim {config.optim} keeps its states in blocks of whole weights, which FSDP2 and DeepSpeed share out. Launch "
        "with --accelerate-config multi_gpu, or leave optim out.",
    ),
    Rule(
        "a sharded checkpoint elsewhere",
        lambda s: _sharded_files(s) and (s.launch.fsdp != 2 or "SHARDED" not in s.launch.state_dict),
        "the checkpoint in {config.output_dir} is FSDP2's SHARDED_STATE_DICT, which only the same kind of launch "
        "reads. Resume with it (fsdp_state_dict_type: SHARDED_STATE_DICT), or begin in another output_dir.",
    ),
    Rule(
        "a deepspeed checkpoint elsewhere",
        lambda s: _deepspeed_files(s) and s.launch.zero is None,
        "the checkpoint in {config.output_dir} is DeepSpeed's, which no other launch reads. Resume with the "
        "configuration it was begun with, or begin in another output_dir.",
    ),
    Rule(
        "another checkpoint under deepspeed",
        lambda s: s.launch.zero is not None and s.checkpoint is not None and not _deepspeed_files(s),
        "the checkpoint in {config.output_dir} was not written by DeepSpeed, which reads its own only. Resume without "
        "DeepSpeed, or begin in another output_dir.",
    ),
)


def check_levers(
    config: FinetuneConfig,
    launch: Launch | None = None,
    *,
    attention: str | None = None,
    quantised: bool | None = None,
    seq_len: int | None = None,
    runs_in_attention: bool = False,
) -> None:
    """Refuse a run whose settings do not go together.

    Args:
        config: The run.
        launch: How its processes were started; None reads the environment.
        attention: ``attn_implementation``, if one was asked for or the model has one.
        quantised: Whether the model's weights are, once that is known.
        seq_len: Tokens of a block, once they are known; None takes those of ``config``.
        runs_in_attention: The model's rule is in its attention, whatever ``config`` asks for.

    Raises:
        ValueError: The message of the first rule that is broken.
        ImportError: The optimizer is of a package that is not installed.
    """
    if is_of_bitsandbytes(str(config.optim)) and find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            f"--optim {config.optim} needs a package that is not installed: pip install bitsandbytes"
        )
    known = seq_len or config.seq_len or config.context_length
    levers = Levers(config, launch or Launch.from_environment(), attention, quantised, known, runs_in_attention)
    words = {"config": config, "launch": levers.launch, "attention": attention, "seq_len": known}
    words["method"] = config.method or "the model's rule"
    for rule in RULES:
        if rule.holds(levers):
            raise InvalidRequestError(rule.message.format(**words))
