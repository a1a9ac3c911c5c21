"""What to say when a run cannot write, or is stopped: what is missing, what is kept, how to go on."""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import RotaryMismatchError
from hf_posenc.training.checkpoints import by_step, last_checkpoint

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_ADAM_BYTES = 8  # a trained weight's two moments, float32


class NotWrittenError(OSError):
    """A file of a run could not be written; the message says how to go on."""


@contextmanager
def writing(what: str, folder: Path, needed: int, leftovers: Path) -> Iterator[None]:
    """Turn any failure to write ``what`` into a message that helps.

    Libraries say it in many ways: safetensors by an exception of its own, torch by a riddle about positions, tokenizers
    by a bare Exception.

    Args:
        what: The checkpoint, or the model.
        folder: Of the run.
        needed: Bytes it takes, about.
        leftovers: Folder with what was written of it, removed to make room.

    Raises:
        NotWrittenError: Anything was raised inside but what says itself that this cannot be saved.
    """
    try:
        yield
    except (NotWrittenError, ValueError, TypeError, RotaryMismatchError):
        raise
    except Exception as error:
        shutil.rmtree(leftovers, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        raise NotWrittenError(
            f"{what} could not be written to {folder}: {_first_line(error)}. It takes about {in_words(needed)}, "
            f"{in_words(free)} are free there. {how_to_go_on(folder, 'Make room, then run')}"
        ) from error


def says_how_to_go_on(run: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``finetune``: of a run that is stopped by Ctrl-C, or cannot write its logs and results, say how to go on."""

    @functools.wraps(run)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        given = inspect.signature(run).bind(*args, **kwargs).arguments
        folder = Path(given["config"].output_dir)
        try:
            return run(*args, **kwargs)
        except KeyboardInterrupt:
            if folder.exists() and os.environ.get("RANK", "0") == "0":
                logger.warning("\nstopped. %s", how_to_go_on(folder, "To go on, run"))
            raise
        except NotWrittenError:
            raise
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise NotWrittenError(
                f"logs or results could not be written to {folder}: {_first_line(error)}; "
                f"{in_words(shutil.disk_usage(folder).free)} are free there. "
                + how_to_go_on(folder, "Make room, then run")
            ) from error

    return told


def how_to_go_on(folder: Path, lead: str) -> str:
    """Name the last good checkpoint, and what to type; ``lead`` is what to do first."""
    stages = sorted(folder.glob("stage-*/"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    whole = next(filter(None, (last_checkpoint(place, contents=False)[0] for place in (folder, *stages))), None)
    kept = f"The last good checkpoint, {whole}, is kept" if whole is not None else "There is no checkpoint yet"
    return f"{kept}. {lead} the same command with --resume-from-checkpoint (resume_from_checkpoint=True)."


def checkpoint_bytes(model: nn.Module) -> int:
    """Return about what a checkpoint takes: the weights that are saved, and AdamW's state of those that are trained."""
    return saved_bytes(model) + _ADAM_BYTES * sum(p.numel() for p in model.parameters() if p.requires_grad)


def saved_bytes(model: nn.Module) -> int:
    """Return about what saving a model takes; of an adapted one, what is trained."""
    whole = isinstance(model, PreTrainedModel)
    return sum(p.numel() * p.element_size() for p in model.parameters() if whole or p.requires_grad)


def warn_if_too_small(folder: Path, model: nn.Module, kept: int | None) -> None:
    """Warn before hours of training if the disk cannot take the checkpoints: those kept and the one being written.

    Args:
        folder: Of the run.
        model: What is trained.
        kept: Checkpoints that are kept; None where their number is not known, and one is counted.
    """
    kept = 1 if kept is None else kept
    each, free = checkpoint_bytes(model), shutil.disk_usage(folder).free
    if free < max(kept + 1 - len(by_step(folder)), 1) * each:
        logger.warning(
            "a checkpoint takes about %s, and there are %d while one is being written; only %s are free in %s",
            in_words(each),
            kept + 1,
            in_words(free),
            folder,
        )


def in_words(size: int) -> str:
    """Return a number of bytes as text, such as "1.6 GB"."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def _first_line(error: BaseException) -> str:
    text = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).strip()
    if "inline_container" in text:  # "unexpected pos 640 vs 598"
        return "torch could not write all of a file, as on a full disk"
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
