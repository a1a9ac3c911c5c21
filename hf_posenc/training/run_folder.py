"""The folder of a run: its settings, checkpoints that are whole or absent, and where a stopped run is resumed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_posenc.errors import InvalidRequestError
from hf_posenc.utils.files import write_whole

logger = logging.getLogger(__name__)

LOSS_LOG = "train_log.jsonl"
PARTIAL = "checkpoints.partial"  # the folder in which a checkpoint is being written
_SETTINGS = "finetune.json"
_TRAINER_STATE = "trainer_state.json"


def open_run(folder: Path, settings: dict[str, Any], *, resume: bool, named: Path | None = None) -> Path | None:
    """Claim a folder for a run, or check that it holds the beginning of this same run.

    A run that failed before its first step left nothing to continue, so its folder can be claimed again, also with
    other settings. Of several processes only the first may call this (see ``processes.from_main``).

    Args:
        folder: It is made if it does not exist.
        settings: JSON-able; all that decides what is trained: options, data, base weights.
        resume: Continue where the run in the folder stopped.
        named: The checkpoint to continue from; None for the last one.

    Returns:
        The checkpoint to resume from; None to start at the beginning.

    Raises:
        InvalidRequestError: There is a run in the folder and ``resume`` is off, it was started with other settings, or
            the named checkpoint does not exist.
    """
    file, checkpoints = folder / _SETTINGS, checkpoints_by_step(folder)
    if not file.is_file() and checkpoints:
        raise InvalidRequestError(f"{folder} holds checkpoints of another program. Choose an empty output_dir.")
    if not file.is_file() or (not checkpoints and not read_log(folder / LOSS_LOG)):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(settings, indent=2) + "\n")
        clear_partial(folder)
        return None
    if not resume:
        raise InvalidRequestError(
            f"{folder} holds a run already. Pass resume_from_checkpoint=True (--resume-from-checkpoint) to continue "
            "it, or another output_dir."
        )
    try:
        started: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{file}, the settings that the run was started with, is damaged ({error}), so it is not known whether "
            "this is the same run. Choose another output_dir."
        ) from error
    if differing := [name for name in {**started, **settings} if started.get(name) != settings.get(name)]:
        raise InvalidRequestError(
            f"the run in {folder} was started with other settings: "
            + "; ".join(f"{name} was {started.get(name)!r}, is now {settings.get(name)!r}" for name in differing)
            + ". Resume with the same ones, or choose another output_dir."
        )
    if named is not None and not is_whole(named):
        raise InvalidRequestError(f"resume_from_checkpoint: {named} is no checkpoint: it has no {_TRAINER_STATE}.")
    checkpoint = last_checkpoint(folder) if named is None else named
    clear_partial(folder)
    logger.info("resuming from %s", checkpoint if checkpoint is not None else "the beginning: no checkpoint yet")
    return checkpoint


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return the folders named as a checkpoint of Trainer, by their step, rising."""
    steps = {path.name.rpartition("-")[2]: path for path in folder.glob("checkpoint-*") if path.is_dir()}
    return {int(step): steps[step] for step in sorted((step for step in steps if step.isdecimal()), key=int)}


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end: Trainer writes its own state last."""
    return (checkpoint / _TRAINER_STATE).is_file()


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run; None if there is none."""
    return next((path for path in reversed(checkpoints_by_step(folder).values()) if is_whole(path)), None)


def move_into_place(folder: Path, step: int, kept: int | None) -> None:
    """Move the checkpoint in ``folder/checkpoints.partial`` into ``folder``, and delete those it replaces.

    Checkpoints of later steps belong to a continuation that is now another one.

    Args:
        folder: Folder of the run.
        step: Step of the checkpoint.
        kept: How many checkpoints up to this step are kept, the last ones; None keeps all.
    """
    written = folder / PARTIAL / f"checkpoint-{step}"
    checkpoint = folder / written.name
    shutil.rmtree(checkpoint, ignore_errors=True)
    os.replace(written, checkpoint)
    clear_partial(folder)
    checkpoints = checkpoints_by_step(folder)
    up_to_now = [path for number, path in checkpoints.items() if number <= step and is_whole(path)]
    for path in checkpoints.values():
        if path not in up_to_now[-(kept or len(up_to_now)) :]:
            shutil.rmtree(path, ignore_errors=True)


def clear_partial(folder: Path) -> None:
    """Remove what was written of a checkpoint by a process that was killed or found the disk full."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """While open, an error or Ctrl-C that ends the run is followed by the last checkpoint and how to resume from it."""
    try:
        yield
    except BaseException as error:
        numbered = [path for path in folder.glob("stage-*-*/") if path.name.split("-")[1].isdigit()]
        stages = sorted(numbered, key=lambda path: int(path.name.split("-")[1]), reverse=True)
        checkpoint = next(filter(None, map(last_checkpoint, (folder, *stages))), None)
        started = checkpoint is not None or (isinstance(error, KeyboardInterrupt) and folder.exists())
        if started and os.environ.get("RANK", "0") == "0":
            kept = "There is no checkpoint yet" if checkpoint is None else f"The last checkpoint is {checkpoint}"
            logger.warning(
                "the run stopped. %s. To resume, give the same command with --resume-from-checkpoint "
                "(resume_from_checkpoint=True).",
                kept,
            )
        raise


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a loss log, without a last line that a killed process left unfinished."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
