"""``plan_run``: every choice and every refusal of a fine-tuning run, made once, before anything is trained.

It reads the config, the facts of the model and the launch, and returns plain values. What runs afterwards takes what it
needs from the plan, and does not see the config.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.training_args import TrainingArguments
from transformers.utils.import_utils import is_flash_attn_2_available, is_liger_kernel_available

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.sliding_window import choose_window, window_of_all_layers
from hf_posenc.methods.base import DistanceMethod, Extension
from hf_posenc.methods.registry import DEFAULT_METHOD, get_method, methods
from hf_posenc.mixtures import kinds_of_steps, read_shares
from hf_posenc.patching.extension import plain_spec
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.conflicts import Combination, refuse_conflicts
from hf_posenc.training.extending import choose_extension
from hf_posenc.training.launch import Launch
from hf_posenc.training.positions import FULL, POSE, PositionSchedule
from hf_posenc.training.recipes import Lengths, get_recipe
from hf_posenc.training.step_plan import StepPlan
from hf_posenc.utils.dtypes import computes_natively
from hf_posenc.utils.units import ContextLength, TokenCount

# What may differ between a run and its continuation: none of it changes what is trained or held out.
# A step's blocks may be shared out otherwise, among other numbers of processes: their number is held fixed instead.
_FREE_ON_RESUME = frozenset({"output_dir", "resume_from_checkpoint", "report_to", "run_name", "project", "use_cpu"})
_FREE_ON_RESUME |= {"keep", "check_first_loss", "per_device_train_batch_size", "gradient_accumulation_steps"}
_FREE_ON_RESUME |= {"disable_tqdm", "push_to_hub", "debug", "skip_memory_metrics", "enable_jit_checkpoint"}
_FREE_PREFIXES = ("save_", "log_", "logging_", "hub_", "trackio_", "dataloader_", "ddp_", "torch_empty_cache_")
# The kernels of liger-kernel that are used: the loss stays the one in chunks, and positions those that verify_model has
# seen. The names are those of liger_kernel.transformers.monkey_patch.
_LIGER = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
_LIGER |= {"rms_norm": True, "swiglu": True, "geglu": True}


@dataclass(frozen=True)
class DataPlan:
    """The making of blocks from documents, and the measurement.

    Attributes:
        assistant_only_loss, completion_only_loss: What of chats and prompts counts in the loss.
        one_document: Every block holds one document.
        length_upsampling: How many times as often documents longer than the original length are read as others.
        task_mix: The share of each kind of data in the tokens; None for the documents alone.
        original_length: Tokens the model was trained on.
        token_budget: Tokens to read of a stream.
        eval_documents: Number of held-out texts; 0 measures nothing.
        eval_lengths: Lengths to measure at, in tokens, rising.
        eval_tasks, eval_questions: The retrieval tasks, and how many questions are asked of each at each length.
        task_lengths: Those lengths, in tokens.
    """

    assistant_only_loss: bool
    completion_only_loss: bool | None
    one_document: bool
    length_upsampling: float
    task_mix: Mapping[str, float] | None
    original_length: int
    token_budget: int
    eval_documents: int
    eval_lengths: tuple[int, ...]
    eval_tasks: tuple[str, ...]
    eval_questions: int
    task_lengths: tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run; a run to one length has one.

    Attributes:
        folder: Gets the logs and checkpoints of the stage.
        saved_to: Gets the model as the stage leaves it.
        extension: What the model is extended by; None trains it as it is.
        positions: How positions run in a block.
        seq_len: Tokens of a block.
        blocks_per_step: Blocks of an optimizer step, over all processes.
        max_steps: Optimizer steps.
        seed: Seed of the order of documents and blocks, and of new weights.
        group: Tokens of a group of shifted sparse attention; None without it.
        wants_distances: The stage is to teach longer distances than the model knows.
        trainer: The keywords of TrainingArguments.
        fixed: What a resumed run must share with the run it continues; JSON-able.
        shown: What the model card says of the settings.
    """

    folder: Path
    saved_to: Path
    extension: Extension | None
    positions: PositionSchedule
    seq_len: int
    blocks_per_step: int
    max_steps: int
    seed: int
    group: int | None
    wants_distances: bool
    trainer: Mapping[str, Any]
    fixed: Mapping[str, Any]
    shown: Mapping[str, Any]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.blocks_per_step * self.seq_len

    @property
    def num_blocks(self) -> int:
        """Blocks that the stage reads."""
        return self.max_steps * self.blocks_per_step

    @property
    def num_tokens(self) -> int:
        """Tokens that the stage is trained on."""
        return self.max_steps * self.tokens_per_step


@dataclass(frozen=True)
class RunPlan:
    """A fine-tuning run as it will be done.

    Attributes:
        folder: Gets the trained model, its results and its settings.
        base_model: The name or path of the model; empty for one that was made in the program.
        stages: In order.
        data: How documents become blocks, and what is measured.
        keep: By how much perplexity on short texts may rise, 0.01 for 1 %; None where it is not measured.
        step: How an optimizer step computes; its ``bf16`` is decided.
        shards_weights: The launch asks for FSDP over several processes.
        flash: Attention is FlashAttention while the model is trained.
        logging_steps: Steps between losses on the console.
        checks_first_loss: Compare the first loss with that of the same tokens outside of the trainer.
        shorter: What would make the training shorter, in words.
        resumes: The run continues in its folder.
        checkpoint: The checkpoint to continue from; None for the last one.
        hub: Where the trained model is pushed; None for nowhere.
        settings: What ``run.toml`` says.
    """

    folder: Path
    base_model: str
    stages: tuple[StagePlan, ...]
    data: DataPlan
    keep: float | None
    step: StepPlan
    shards_weights: bool
    flash: bool
    logging_steps: int
    checks_first_loss: bool
    shorter: str
    resumes: bool
    checkpoint: Path | None
    hub: Mapping[str, Any] | None
    settings: Mapping[str, Any]


def plan_run(
    config: FinetuneConfig, model: ModelFacts, launch: Launch, source: Mapping[str, Any] | None = None
) -> RunPlan:
    """Decide everything about a run that its config, its model and its launch decide.

    Args:
        config: The run.
        model: The facts of the model, loaded or without weights.
        launch: How the processes of the run were started.
        source: Where the model and the documents were read from, for ``run.toml``.

    Raises:
        InvalidRequestError: The settings, the model and the launch do not go together; the message says why.
        AlreadyExtendedError, UnsupportedModelError: As ``patch_model``.
        MissingPackageError: The optimizer belongs to a package that is not installed.
    """
    folder = Path(str(config.output_dir))
    if model.name and Path(model.name).exists() and Path(model.name).resolve() == folder.resolve():
        raise InvalidRequestError(
            f"output_dir {str(folder)!r} is the folder the model was loaded from. Give another, so that the original "
            "is kept."
        )
    _check_trackers(config.report_to)
    settings = {**config.settings(), **(source or {})}
    config = with_recipe(config, model)
    bf16 = model.is_half and computes_natively(torch.bfloat16, model.device) if config.bf16 is None else config.bf16
    configs = list(_stage_configs(config, model))
    planned: list[StagePlan] = []
    for each in configs:
        saved_to = folder if each is configs[-1] else Path(str(each.output_dir))
        with naming_stage(each.context_length if config.stages is not None else None):
            planned.append(_plan_stage(each, model, launch, saved_to, bf16=bf16))
    stages = tuple(planned)
    default_lengths = {length for stage in stages for length in _default_lengths(stage.positions)}
    data = DataPlan(
        assistant_only_loss=config.assistant_only_loss,
        completion_only_loss=config.completion_only_loss,
        one_document=not config.packing or launch.cp_size > 1,
        length_upsampling=config.length_upsampling,
        task_mix=None if config.task_mix is None else read_shares(config.task_mix),
        original_length=stages[0].positions.original_length,
        token_budget=max(each.token_budget for each in configs),
        eval_documents=config.eval_documents,
        eval_lengths=tuple(sorted({*(config.eval_lengths or default_lengths)})),
        eval_tasks=tuple(config.eval_tasks or ()),
        eval_questions=config.eval_questions,
        task_lengths=tuple(sorted({stages[0].positions.original_length, stages[-1].positions.target_length})),
    )
    described, changes_attention = _as_trained(model, stages[0].extension)
    # FlashAttention tells packed documents apart by their positions, and only in a batch of one.
    flash = (
        (model.device, model.attention, model.supports_flash, bf16) == ("cuda", "sdpa", True, True)
        and (config.per_device_train_batch_size, config.position_schedule, launch.cp_size) == (1, FULL, 1)
        and not (changes_attention or config.shifted_sparse_attention)
        and is_flash_attn_2_available()
    )
    return RunPlan(
        folder=folder,
        base_model=model.name,
        stages=stages,
        data=data,
        keep=config.keep,
        step=dataclasses.replace(config.step, bf16=bf16),
        shards_weights=launch.fsdp > 0 and launch.processes > 1,
        flash=flash,
        logging_steps=int(config.logging_steps),
        # Shifted attention gives another loss, and so does noise that is added to the embedding.
        checks_first_loss=config.check_first_loss
        and not config.shifted_sparse_attention
        and config.neftune_noise_alpha is None,
        shorter=_shorter(config.position_schedule, described["method"], model.device, bf16),
        resumes=config.resumes,
        checkpoint=config.named_checkpoint,
        hub=config.hub,
        settings=settings,
    )


@contextmanager
def naming_stage(target_length: int | None) -> Iterator[None]:
    """While open, an error names the stage it belongs to; None for a run to one length."""
    try:
        yield
    except InvalidRequestError as error:
        if target_length is None:
            raise
        raise InvalidRequestError(f"stages: the stage of {target_length} tokens cannot be trained: {error}") from error


def with_recipe(config: FinetuneConfig, model: ModelFacts) -> FinetuneConfig:
    """Return a run with what its recipe chooses by the model and the target; what was given stays.

    Raises:
        InvalidRequestError: No published base suits (``abf``).
    """
    described = model.description
    original = config.original_max_position_embeddings or described["original_max_position_embeddings"]
    if config.recipe is None or original is None:  # extending refuses a model that does not say it
        return config
    recipe, is_kept = get_recipe(config.recipe), described["method"] != "none" and config.on_scaled == "refuse"
    if config.seq_len is None and (block := recipe.block(config.position_schedule, int(original))) is not None:
        config = dataclasses.replace(config, seq_len=ContextLength(block))
    request = config.request()
    if recipe.fit is None or request.preset is not None:
        return config
    if is_kept:
        target = described["context_length"]
    elif request.context_length is not None:
        target = request.context_length
    else:
        method = get_method(request.method or DEFAULT_METHOD)
        factor = method.default_factor_with(request.options) if request.factor is None else request.factor
        target = round(factor * original)
    spec = plain_spec(model.config) if model.extension is None else model.extension.spec
    lengths = Lengths(int(original), int(target), spec.rope_theta, is_kept)
    return dataclasses.replace(config, **recipe.fit(vars(config), lengths))


def _stage_configs(config: FinetuneConfig, model: ModelFacts) -> Iterator[FinetuneConfig]:
    """Yield the settings of each stage of a run, in order.

    Every stage extends the model anew, by the same method, with the factor counted from the original length, and reads
    the documents in an order of its own.

    Raises:
        InvalidRequestError: The model is extended already, or a length is not beyond the original.
    """
    if config.stages is None:
        yield config
        return
    described = model.description
    if described["method"] != "none" and config.on_scaled != "replace":
        raise InvalidRequestError(
            f"stages: the model is extended already ({described['method']}, factor {described['factor']:g}), and "
            "every stage extends it anew. Call unpatch_model(model) first, or give "
            f"{argument('on_scaled', 'replace')}."
        )
    original = config.original_max_position_embeddings or described["original_max_position_embeddings"]
    if original is None:
        raise InvalidRequestError(
            "stages: the model does not say what it was trained on: give "
            f"{argument('original_max_position_embeddings')}."
        )
    stages = config.target_stages()
    if stages[0].length <= original:
        raise InvalidRequestError(
            f"stages: the model was trained on {original} tokens, and {stages[0].length} are not beyond them. Begin "
            "with a longer one."
        )
    for stage in stages:
        yield dataclasses.replace(
            config,
            stages=None,
            output_dir=str(Path(config.output_dir) / stage.name),
            context_length=ContextLength(stage.length),
            token_budget=TokenCount(stage.token_budget),
            seed=config.seed + stage.number - 1,
        )


def _plan_stage(config: FinetuneConfig, model: ModelFacts, launch: Launch, saved_to: Path, *, bf16: bool) -> StagePlan:
    """Return the plan of a stage whose settings ``_stage_configs`` made; ``saved_to`` is the folder of its model."""
    extension = choose_extension(config.request(), model)
    described, changes_attention = _as_trained(model, extension)
    positions = _plan_positions(config, described, _window(model, extension))
    seq_len = config.seq_len or _usual_block(positions)
    refuse_conflicts(
        Combination(
            config,
            launch,
            model.attention,
            model.is_quantised,
            model.unmasked,
            seq_len,
            changes_attention,
            described["method"],
        )
    )
    blocks_per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * launch.replicas
    per_step = blocks_per_step * seq_len
    max_steps = config.token_budget // per_step
    if max_steps == 0:
        raise InvalidRequestError(
            f"{argument('token_budget')} {config.token_budget} is less than one step, {per_step} tokens. Give it more, "
            f"or lower {argument('gradient_accumulation_steps')}, {argument('per_device_train_batch_size')} or "
            f"{argument('seq_len')}."
        )
    if config.task_mix is not None:
        _check_mixture_budget(read_shares(config.task_mix), max_steps, per_step)
    group = _group(config.group_share, seq_len) if config.shifted_sparse_attention else None
    warmup_steps = (
        min(config.warmup_steps, max_steps // 5)
        if config.warmup_steps >= 1
        else math.ceil(max_steps * config.warmup_steps)
    )
    return StagePlan(
        folder=Path(str(config.output_dir)),
        saved_to=saved_to,
        extension=extension,
        positions=positions,
        seq_len=seq_len,
        blocks_per_step=blocks_per_step,
        max_steps=max_steps,
        seed=config.seed,
        group=group,
        # nope has no positions, and is trained on short texts first; an encoding may be trained for the length it has.
        wants_distances=described["method"] != "nope" and positions.target_length > positions.original_length,
        trainer=_trainer_options(config, model, max_steps, warmup_steps, bf16),
        fixed=_fixed_settings(config.settings()),
        shown=_shown_settings(config, seq_len, max_steps, per_step, group, warmup_steps, bf16),
    )


def _as_trained(model: ModelFacts, extension: Extension | None) -> tuple[Mapping[str, Any], bool]:
    """Return the description of a model with the extension of a stage, and whether its rule is in its attention."""
    if extension is None:
        return model.description, model.needs_hf_posenc
    return extension.describe(), extension.method.needs_hf_posenc


def _window(model: ModelFacts, extension: Extension | None) -> int | None:
    """Return the sliding window that every layer of the model will have; None if some layer reads everything."""
    if extension is None:
        return window_of_all_layers(model.config)
    return choose_window(model.plain_config, extension.sliding_window, extension.context_length)


def _plan_positions(config: FinetuneConfig, described: Mapping[str, Any], window: int | None) -> PositionSchedule:
    """Return the schedule of positions in the blocks of a run.

    Raises:
        InvalidRequestError: The schedule does not suit the model's method, its window, its lengths or a block's length.
    """
    kind, method = config.position_schedule, described["method"]
    original, target = described["original_max_position_embeddings"], described["context_length"]
    if kind != FULL and method in methods() and issubclass(methods()[method], DistanceMethod):
        raise InvalidRequestError(
            f"position_schedule {kind!r} skips positions, and {method!r} counts distances in tokens: the two cannot be "
            "trained together. Take position_schedule 'full', or a method that reads positions as they are, such as "
            "'yarn' or 'dynamic_yarn'."
        )
    if kind != FULL and window is not None and window < target:
        raise InvalidRequestError(
            f"position_schedule {kind!r} skips positions, and every layer has a sliding window of {window} tokens: "
            "what comes before a longer skip would never be seen. Take position_schedule 'full', or sliding_window "
            "'off'."
        )
    positions = PositionSchedule(kind, original, target, config.pose_chunks, config.short_share, config.seed)
    seq_len = config.seq_len or _usual_block(positions)
    if seq_len > target:
        raise InvalidRequestError(
            f"{argument('seq_len')} {seq_len} is longer than the target length, {target} tokens: the model would be "
            "trained past what it is extended to. Give at most the target, or raise factor or context_length."
        )
    if kind != FULL and seq_len == target:
        raise InvalidRequestError(
            f"position_schedule {kind!r} has nothing to skip in blocks of seq_len {seq_len}, the target length. Leave "
            f"seq_len out for the original length, {original} tokens, or take position_schedule 'full'."
        )
    if kind == POSE and config.pose_chunks > seq_len:
        raise InvalidRequestError(f"pose_chunks must be at most seq_len, {seq_len} tokens, got {config.pose_chunks}.")
    return positions


def _usual_block(positions: PositionSchedule) -> int:
    """Return the tokens of a block: the target length, or with skipped positions the original length."""
    return positions.target_length if positions.kind == FULL else positions.original_length


def _group(share: float, seq_len: int) -> int:
    """Return the tokens of a group of shifted sparse attention."""
    group = round(seq_len * share)
    if group < 2:
        raise InvalidRequestError(
            f"{argument('group_share')} {share} of a block of {seq_len} tokens gives groups of {group}, and they need "
            "2 at least. LongLoRA takes a quarter of the block."
        )
    return group


def _default_lengths(positions: PositionSchedule) -> set[int]:
    """Return the lengths that are measured by default: half the original length, the original, the target."""
    return {max(2, positions.original_length // 2), positions.original_length, positions.target_length}


def _check_mixture_budget(shares: Mapping[str, float], num_steps: int, tokens_per_step: int) -> None:
    """Refuse a run that is too short to have a step of each kind of data.

    Raises:
        InvalidRequestError: It says how large a budget has one.
    """
    order = kinds_of_steps(shares, math.ceil(1 / min(shares.values())))
    last = max(shares, key=order.index)
    needed = order.index(last) + 1
    if num_steps < needed:
        raise InvalidRequestError(
            f"{argument('task_mix')}: every step is of one kind, and no step of {num_steps} is left for "
            f"{last}={shares[last]}: give a {argument('token_budget')} of {needed * tokens_per_step} tokens or more, "
            "fewer blocks in a step, or fewer kinds."
        )


def _check_trackers(report_to: str | list[str] | None) -> None:
    """Let Transformers refuse a tracker that it does not know or that is not installed, before anything is trained."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    try:
        for callback in get_reporting_integration_callbacks(  # type: ignore[no-untyped-call]
            [name for name in names if name not in ("none", "all")]
        ):
            callback()
    except (ValueError, RuntimeError, ImportError) as error:
        raise InvalidRequestError(f"{argument('report_to')} {report_to!r}: {error}") from error


def _trainer_options(
    config: FinetuneConfig, model: ModelFacts, max_steps: int, warmup_steps: float, bf16: bool
) -> dict[str, Any]:
    """Return the keywords of TrainingArguments."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(TrainingArguments) if each.init}
    if "activation_checkpointing" in values:  # Transformers 5.23 warns of the older name
        for ending in ("", "_kwargs"):
            values[f"activation_checkpointing{ending}"] = values.pop(f"gradient_checkpointing{ending}")
    on_cpu = model.device == "cpu"
    values |= {
        "max_steps": max_steps,
        "warmup_steps": warmup_steps,
        "bf16": bf16,
        "logging_steps": 1,  # LossLog needs every step
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": config.dataloader_pin_memory and not on_cpu,
        # The run pushes the trained model itself; Trainer's options are saved with each checkpoint, and hold no token.
        "push_to_hub": False,
        "hub_token": None,
        "resume_from_checkpoint": None,
    }
    if model.device == "cuda" and is_liger_kernel_available():
        values |= {"use_liger_kernel": True, "liger_kernel_config": dict(_LIGER)}
    return values


def _fixed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the run it continues, JSON-able."""
    fixed = {
        name: value
        for name, value in settings.items()
        if name not in _FREE_ON_RESUME and not name.startswith(_FREE_PREFIXES)
    }
    plain: dict[str, Any] = json.loads(json.dumps(fixed))
    return plain


def _shown_settings(
    config: FinetuneConfig,
    seq_len: int,
    max_steps: int,
    tokens_per_step: int,
    group: int | None,
    warmup_steps: float,
    bf16: bool,
) -> dict[str, Any]:
    """Return the settings that the model card shows."""
    usual = config.defaults()
    rarely_set = ["position_schedule", "pose_chunks", "short_share", "length_upsampling"]
    rarely_set += ["assistant_only_loss", "completion_only_loss", "trainable"]
    names = [name for name in rarely_set if getattr(config, name) != usual[name]]
    names += ["lora", "learning_rate", "lr_scheduler_type", "weight_decay", "seed"]
    if config.lora:
        names += ["lora_rank", "lora_alpha", "lora_embeddings"]
    return {
        **({} if config.recipe is None else {"recipe": config.recipe}),
        "seq_len": seq_len,
        "steps": max_steps,
        "tokens_per_step": tokens_per_step,
        **{name: getattr(config, name) for name in names},
        **({} if group is None else {"shifted sparse attention while training, tokens of a group": group}),
        "warmup_steps": warmup_steps,
        "computed in": "bfloat16, float32 weights" if bf16 else "float32",
    }


def _shorter(kind: str, method: str, device: str, bf16: bool) -> str:
    """Return the flags that would make a training shorter."""
    ways = ["a smaller --token-budget"]
    if kind == FULL and method != "nope":
        ways.insert(0, "--position-schedule pose, whose blocks have the original length")
    if bf16 and not computes_natively(torch.bfloat16, device):
        ways.insert(0, "--bf16 false (bfloat16 is emulated here)")
    return ", ".join(ways)
