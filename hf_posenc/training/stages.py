"""Progressive training: a model extended and trained to one length after the other, each stage a run of its own."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.pretrained import load_weights
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import describe
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import is_adapted
from hf_posenc.training.run_folder import LOSS_LOG, read_log
from hf_posenc.training.texts import default_lengths
from hf_posenc.utils.units import ContextLength, TokenCount

logger = logging.getLogger(__name__)


def settings_of_stages(rotary: RotaryModel, config: FinetuneConfig) -> list[FinetuneConfig]:
    """Return the settings of each stage of a run, in order.

    Every stage extends the model anew, by the same method, with the factor counted from the original length. All are
    measured at the same lengths, and each reads the documents in an order of its own.

    Raises:
        ValueError: The model is extended already, a length is not beyond the original, or a budget is below one step.
    """
    stages, original = config.target_stages(), original_length(rotary, config)
    if stages[0].length <= original:
        raise InvalidRequestError(
            f"stages: the model was trained on {original} tokens, and {stages[0].length} are not beyond them. Begin "
            "with a longer one."
        )
    for stage in stages:
        step = config.tokens_per_step(config.tokens_per_block(original, stage.length))
        if stage.token_budget < step:
            raise InvalidRequestError(
                f"stages: {stage.token_budget} tokens for the stage of {stage.length} are less than one step, {step} "
                "tokens. Give it more, or lower gradient_accumulation_steps, per_device_train_batch_size or seq_len."
            )
    measured = {ContextLength(length) for stage in stages for length in default_lengths(original, stage.length)}
    return [
        dataclasses.replace(
            config,
            stages=None,
            output_dir=str(Path(config.output_dir) / stage.name),
            context_length=ContextLength(stage.length),
            token_budget=TokenCount(stage.token_budget),
            eval_lengths=config.eval_lengths or sorted(measured),
            seed=config.seed + stage.number - 1,
        )
        for stage in stages
    ]


def original_length(rotary: RotaryModel, config: FinetuneConfig) -> int:
    """Return the tokens a model was trained on before any stage.

    Raises:
        ValueError: It is extended already, or does not say.
    """
    description = describe(rotary.model)
    if description["method"] != "none" and config.on_scaled != "replace":
        raise InvalidRequestError(
            f"stages: the model is extended already ({description['method']}, factor {description['factor']:g}), and "
            "every stage extends it anew. Call unpatch_model(model) first, or give "
            f"{argument('on_scaled', 'replace')}."
        )
    original = config.original_max_position_embeddings or description["original_max_position_embeddings"]
    if original is None:
        raise InvalidRequestError(
            "stages: the model does not say what it was trained on: give "
            f"{argument('original_max_position_embeddings')}."
        )
    return int(original)


def refuse_other_kind(folder: Path, *, staged: bool) -> None:
    """Refuse to put a run in stages into the folder of one without, and the other way round.

    Raises:
        ValueError: The folder holds a run of the other kind.
    """
    if staged and read_log(folder / LOSS_LOG):
        raise InvalidRequestError(f"{folder} holds a run without stages. Choose another output_dir.")
    if not staged and (found := sorted(folder.glob(f"stage-*/{LOSS_LOG}"))):
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
