"""The folder of a run: what it was started with, and where it can go on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hf_posenc.errors import InvalidRequestError
from hf_posenc.training.checkpoints import by_step, clear_partial, last_checkpoint, problem_of
from hf_posenc.training.train_log import LOSS_LOG, read_log
from hf_posenc.utils.files import write_whole

logger = logging.getLogger(__name__)

_SETTINGS = "finetune.json"


def check_not_the_models_own(folder: Path, base_model: str) -> None:
    """Refuse to write the trained model over the one it is trained from.

    Args:
        folder: Where the run writes.
        base_model: Name or path the model was loaded from; a name on the Hub is no folder.

    Raises:
        ValueError: They are the same folder.
    """
    if base_model and Path(base_model).exists() and Path(base_model).resolve() == folder.resolve():
        raise InvalidRequestError(
            f"output_dir {str(folder)!r} is the folder the model was loaded from. Give another, so that the original "
            "is kept."
        )


def open_run(folder: Path, settings: dict[str, Any], *, resume: bool, named: Path | None = None) -> Path | None:
    """Claim a folder for a run, or check that it holds the beginning of this same run.

    A start that failed before its first step left nothing to go on with: its folder can be claimed again, with other
    settings too. Of several processes only the first may call this (see ``processes.from_main``).

    Args:
        folder: Made if it is not there.
        settings: JSON-able; all that decides what is trained: options, data, base weights.
        resume: Go on where the run in the folder stopped.
        named: The checkpoint to go on from; None for the last one.

    Returns:
        The last whole checkpoint to resume from, damaged ones after it named in a warning; None to start at the
        beginning.

    Raises:
        ValueError: There is a run in the folder and ``resume`` is off, it was started with other settings, none of its
            checkpoints is whole, or the named one is not.
    """
    file, found = folder / _SETTINGS, by_step(folder)
    if not file.is_file() and found:
        raise InvalidRequestError(f"{folder} holds checkpoints of another program. Choose an empty output_dir.")
    if not file.is_file() or (not found and not read_log(folder / LOSS_LOG)):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(settings, indent=2) + "\n")
        clear_partial(folder)
        return None
    if not resume:
        raise InvalidRequestError(
            f"{folder} holds a run already. Pass resume_from_checkpoint=True (--resume-from-checkpoint) to go on with "
            "it, or another output_dir."
        )
    _check_same(_read_settings(file), settings, folder)
    if named is not None and (problem := problem_of(named)) is not None:
        raise InvalidRequestError(f"resume_from_checkpoint: {named} cannot be gone on from: {problem}.")
    checkpoint, damaged = last_checkpoint(folder) if named is None else (named, [])
    _tell_damaged(folder, checkpoint, damaged)
    clear_partial(folder)
    logger.info("resuming from %s", checkpoint if checkpoint is not None else "the beginning: no checkpoint yet")
    return checkpoint


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{file}, the settings the run was started with, is damaged ({error}): whether this is the same run cannot "
            "be told. Choose another output_dir."
        ) from error
    return settings


def _check_same(there: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    differing = [name for name in {**there, **settings} if there.get(name) != settings.get(name)]
    if differing:
        raise InvalidRequestError(
            f"the run in {folder} was started with other settings: "
            + "; ".join(f"{name} was {there.get(name)!r}, is now {settings.get(name)!r}" for name in differing)
            + ". Resume with the same ones, or choose another output_dir."
        )


def _tell_damaged(folder: Path, checkpoint: Path | None, damaged: list[str]) -> None:
    if damaged and checkpoint is None:
        raise InvalidRequestError(
            f"no checkpoint in {folder} is whole: {'; '.join(damaged)}. Delete them to train from the beginning with "
            "--resume-from-checkpoint (resume_from_checkpoint=True), or choose another output_dir."
        )
    for one in damaged:
        logger.warning("damaged and not used: %s. Going on from %s instead", one, checkpoint)
