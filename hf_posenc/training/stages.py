"""Progressive training: a model extended and trained to one length after the other, each stage a run of its own."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.checkpoint.pretrained import load_weights
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation import Record
from hf_posenc.patching.api import describe, is_patched, unpatch_model
from hf_posenc.training.card import TrainedStage
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.launch import Launch
from hf_posenc.training.lora import is_adapted
from hf_posenc.training.measure import default_lengths
from hf_posenc.training.stage_list import Stage, check_stages, parse_stages
from hf_posenc.training.train_log import LOSS_LOG, read_log
from hf_posenc.utils.units import ContextLength, TokenCount

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a run, which may be one stage of several, puts what it makes, and what is there before it.

    Attributes:
        root: Gets ``results.jsonl`` and ``run.toml``.
        model: Gets the trained model and its card.
        told: What ``run.toml`` says.
        before: The measurements before the first stage; None to measure now.
        unextended: Those of the model without its extension.
        earlier: The stages that trained the model before.
    """

    root: Path
    model: Path
    told: dict[str, Any] = field(default_factory=dict)
    before: list[Record] | None = None
    unextended: list[Record] = field(default_factory=list)
    earlier: tuple[TrainedStage, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether an earlier stage trained the model."""
        return self.before is not None

    def is_finished(self, run: Path, total: int) -> bool:
        """Return whether the run in a folder is over and its model saved, with ``total`` tokens of training."""
        manifest = read_manifest(self.model)
        return manifest is not None and manifest["tokens_trained"] == total and bool(read_log(run / LOSS_LOG))


@dataclass(frozen=True)
class StageResult:
    """What a stage gave, as ``FinetuneResult``; ``unextended``, ``before`` and ``after`` are its records."""

    model: Any
    tokens_trained: int
    steps: int
    train_loss: float
    unextended: list[Record]
    before: list[Record]
    after: list[Record]
    seconds: float


Train = Callable[[Any, FinetuneConfig, Place, int], StageResult]
Check = Callable[[PreTrainedModel, FinetuneConfig], None]


def train_stages(
    train: Train,
    check: Check,
    model: PreTrainedModel,
    config: FinetuneConfig,
    *,
    told: dict[str, Any],
    tokens_trained: int,
) -> StageResult:
    """Take a model through the stages of a run; a stage that is finished already is not trained again.

    Every stage extends the model anew, by the same method, with the factor counted from the original length.

    Args:
        train: Trains one stage: model, its settings, its place, tokens trained before.
        check: Raises what would keep a stage from beginning. Later stages are checked before the first one trains.
        model: Not extended, or ``config.on_scaled`` is ``"replace"``.
        config: The run.
        told: For ``run.toml``.
        tokens_trained: Before the first stage.

    Raises:
        ValueError: The model is extended already, stages that cannot be, or the folder holds another run.
    """
    folder = Path(config.output_dir)
    stages, settings = settings_of_stages(model, config)
    _refuse_single_run(folder)
    for stage, one in zip(stages[1:], settings[1:], strict=True):
        logger.info("checking stage %d of %d: %d tokens", stage.number, len(stages), stage.length)
        try:
            check(model, one)
        except ValueError as error:
            raise InvalidRequestError(
                f"stages: the stage of {stage.length} tokens cannot be trained: {error}"
            ) from error
    results: list[StageResult] = []
    done: list[TrainedStage] = []
    trained: Any = model
    for stage, one in zip(stages, settings, strict=True):
        last = stage is stages[-1]
        logger.info(
            "stage %d of %d: %d tokens, trained on %d", stage.number, len(stages), stage.length, stage.token_budget
        )
        if results and is_patched(trained):
            unpatch_model(trained)
        place = Place(folder, folder if last else Path(one.output_dir), told, earlier=tuple(done))
        if results:
            place = dataclasses.replace(place, before=results[0].before, unextended=results[0].unextended)
        so_far = results[-1].tokens_trained if results else tokens_trained
        results.append(train(trained, one, place, so_far))
        done.append(TrainedStage(stage.length, results[-1].steps, results[-1].tokens_trained - so_far))
        trained = results[-1].model
    steps = sum(result.steps for result in results)
    return dataclasses.replace(
        results[-1],
        steps=steps,
        train_loss=math.fsum(result.train_loss * result.steps for result in results) / steps,
        before=results[0].before,
        after=[record for result in results for record in result.after],
        seconds=sum(result.seconds for result in results),
    )


def settings_of_stages(model: PreTrainedModel, config: FinetuneConfig) -> tuple[list[Stage], list[FinetuneConfig]]:
    """Return the stages of a run, and the settings of each.

    Raises:
        ValueError: The model is extended already, or stages that cannot be.
    """
    stages = parse_stages(config.stages or (), config.token_budget)
    original = original_length(model, config)
    check_stages(stages, original, [_tokens_per_step(stage, config, original) for stage in stages])
    return stages, [_settings(stage, config, original, [one.length for one in stages]) for stage in stages]


def original_length(model: PreTrainedModel, config: FinetuneConfig) -> int:
    """Return the tokens a model was trained on before any stage.

    Raises:
        ValueError: It is extended already, or does not say.
    """
    there = describe(model)
    if there["method"] != "none" and config.on_scaled != "replace":
        raise InvalidRequestError(
            f"stages: the model is extended already ({there['method']}, factor {there['factor']:g}), and every stage "
            f"extends it anew. Call unpatch_model(model) first, or give {argument('on_scaled', 'replace')}."
        )
    original = config.original_max_position_embeddings or there["original_max_position_embeddings"]
    if original is None:
        raise InvalidRequestError(
            "stages: the model does not say what it was trained on: give "
            f"{argument('original_max_position_embeddings')}."
        )
    return int(original)


def _tokens_per_step(stage: Stage, config: FinetuneConfig, original: int) -> int:
    usual = stage.length if config.position_schedule == "full" else original
    blocks = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * Launch.from_environment().replicas
    )
    return (config.seq_len or usual) * blocks


def _settings(stage: Stage, config: FinetuneConfig, original: int, lengths: list[int]) -> FinetuneConfig:
    """Return the settings of one stage; all are measured at the same lengths, and each reads in an order of its own."""
    measured = {ContextLength(length) for target in lengths for length in default_lengths(original, target)}
    return dataclasses.replace(
        config,
        stages=None,
        output_dir=str(Path(config.output_dir) / stage.name),
        context_length=ContextLength(stage.length),
        token_budget=TokenCount(stage.token_budget),
        eval_lengths=config.eval_lengths or sorted(measured),
        seed=config.seed + stage.number - 1,
    )


def _refuse_single_run(folder: Path) -> None:
    if read_log(folder / LOSS_LOG):
        raise InvalidRequestError(f"{folder} holds a run without stages. Choose another output_dir.")


def refuse_staged_run(folder: Path) -> None:
    """Refuse to put a run without stages into the folder of one with stages.

    Raises:
        ValueError: There is one.
    """
    if found := sorted(folder.glob(f"stage-*/{LOSS_LOG}")):
        raise InvalidRequestError(
            f"{folder} holds a run in stages ({found[0].parent.name}, ...). Give the same stages and "
            "resume_from_checkpoint=True (--resume-from-checkpoint) to go on with it, or another output_dir."
        )


def load_finished(model: Any, folder: Path) -> None:
    """Put the weights that a finished stage saved into a model, in place.

    Args:
        model: As it was before that stage; PEFT-wrapped if the stage trained adapters.
        folder: What ``save_extended`` wrote.
    """
    if is_adapted(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    else:
        model.load_state_dict(load_weights(folder, dtype="auto").state_dict())
    logger.info("%s holds this stage, finished: it is not trained again", folder)
