"""The folder of a run: its settings, checkpoints that are intact or absent, and where a stopped run goes on."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hf_posenc.errors import InvalidRequestError, RotaryMismatchError
from hf_posenc.publishing.repository import Repository, make_repository
from hf_posenc.utils.files import write_whole

if TYPE_CHECKING:
    from torch import nn

    from hf_posenc.training.config import FinetuneConfig

logger = logging.getLogger(__name__)

LOSS_LOG = "train_log.jsonl"
SEAL = "checkpoint.json"  # written last; without it a folder is no checkpoint
PARTIAL = "checkpoints.partial"  # where one is being written
_SETTINGS = "finetune.json"
_PART = 2**24  # bytes of a file that are read at once
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_ADAM_BYTES = 8  # a trained weight's two moments, float32
# Checkpoints and stages of the run, intact or not, and names that begin with "_", as Trainer leaves them out.
_NOT_PUSHED = ["checkpoint-*", "checkpoints.partial/*", "stage-*", "_*"]

P = ParamSpec("P")
R = TypeVar("R")


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

    If a run failed before its first step, there is nothing to continue, so that its folder can be claimed again, also
    with other settings. Of several processes only the first may call this (see ``processes.from_main``).

    Args:
        folder: Made if it is not there.
        settings: JSON-able; all that decides what is trained: options, data, base weights.
        resume: Go on where the run in the folder stopped.
        named: The checkpoint to go on from; None for the last one.

    Returns:
        The last intact checkpoint to resume from, or None to start at the beginning. A warning names damaged
        checkpoints that are newer.

    Raises:
        ValueError: There is a run in the folder and ``resume`` is off, it was started with other settings, none of its
            checkpoints is intact, or the named one is not.
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
    try:
        started: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{file}, the settings the run was started with, is damaged ({error}): nothing says whether this is the "
            "same run. Choose another output_dir."
        ) from error
    if differing := [name for name in {**started, **settings} if started.get(name) != settings.get(name)]:
        raise InvalidRequestError(
            f"the run in {folder} was started with other settings: "
            + "; ".join(f"{name} was {started.get(name)!r}, is now {settings.get(name)!r}" for name in differing)
            + ". Resume with the same ones, or choose another output_dir."
        )
    if named is not None and (problem := problem_of(named)) is not None:
        raise InvalidRequestError(f"resume_from_checkpoint: {named} cannot be gone on from: {problem}.")
    checkpoint, damaged = last_checkpoint(folder) if named is None else (named, [])
    if damaged and checkpoint is None:
        raise InvalidRequestError(
            f"no checkpoint in {folder} is intact: {'; '.join(damaged)}. Delete them to train from the beginning with "
            "--resume-from-checkpoint (resume_from_checkpoint=True), or choose another output_dir."
        )
    for one in damaged:
        logger.warning("damaged and not used: %s. Going on from %s instead", one, checkpoint)
    clear_partial(folder)
    logger.info("resuming from %s", checkpoint if checkpoint is not None else "the beginning: no checkpoint yet")
    return checkpoint


def by_step(folder: Path) -> dict[int, Path]:
    """Return what looks like a checkpoint of Trainer, intact or not, by its step, rising."""
    found = {path.name.rpartition("-")[2]: path for path in folder.glob("checkpoint-*") if path.is_dir()}
    return {int(step): found[step] for step in sorted((step for step in found if step.isdecimal()), key=int)}


def last_checkpoint(folder: Path, *, contents: bool = True) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that can be gone on from, None if there is none, and what is wrong with newer ones.

    Of those newer, each is named with its problem, newest first. ``contents`` as for ``problem_of``.
    """
    damaged: list[str] = []
    for path in reversed(by_step(folder).values()):
        problem = problem_of(path, contents=contents)
        if problem is None:
            return path, damaged
        damaged.append(f"{path} ({problem})")
    return None, damaged


def problem_of(checkpoint: Path, *, contents: bool = True) -> str | None:
    """Say what keeps a checkpoint from being intact; None if nothing does.

    Args:
        checkpoint: Its folder.
        contents: Read every file, about a second for a gigabyte: a byte that changed in the middle of the weights is
            trained on without a word. Otherwise only files that are missing or cut off are found.
    """
    try:
        sealed = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it was not written to its end, or by an older hf_posenc: it has no {SEAL}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{SEAL} cannot be read ({error})"
    for name, (size, checksum) in sealed.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if (found := file.stat().st_size) != size:
            return f"{name} has {found:,} of {size:,} bytes"
        if contents and _checksum(file) != checksum:
            return f"{name} is not what was written"
    return None


def seal(checkpoint: Path) -> None:
    """Write down what a finished checkpoint holds, once all of it is on the disk, not only in memory."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    for file in files:
        _to_disk(file)
    held = {file.relative_to(checkpoint).as_posix(): (file.stat().st_size, _checksum(file)) for file in files}
    (checkpoint / SEAL).write_text(json.dumps({"files": held}, indent=2) + "\n", encoding="utf-8")
    _to_disk(checkpoint / SEAL)


def move_into_place(folder: Path, step: int, kept: int | None) -> Path:
    """Seal the checkpoint in ``folder/checkpoints.partial``, move it into ``folder``, and drop what it makes needless.

    What is newer than this step is of a future that is now another one.

    Args:
        folder: Of the run.
        step: Of the checkpoint.
        kept: How many intact ones up to this step are kept, the last ones; None keeps all.
    """
    written = folder / PARTIAL / f"checkpoint-{step}"
    seal(written)
    checkpoint = folder / written.name
    shutil.rmtree(checkpoint, ignore_errors=True)  # a damaged one
    os.replace(written, checkpoint)
    clear_partial(folder)
    intact = [path for at, path in by_step(folder).items() if at <= step and problem_of(path, contents=False) is None]
    for path in by_step(folder).values():
        if path not in intact[-(kept or len(intact)) :]:
            shutil.rmtree(path, ignore_errors=True)
    return checkpoint


def clear_partial(folder: Path) -> None:
    """Remove what a writer that was killed, or that found the disk full, left behind."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _to_disk(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


class NotWrittenError(OSError):
    """A file of a run could not be written; the message says how to go on."""


@contextmanager
def writing(what: str, folder: Path, needed: int, leftovers: Path) -> Iterator[None]:
    """Raise any failure to write ``what`` with a message that helps.

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
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
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

    return wrapped


def how_to_go_on(folder: Path, lead: str) -> str:
    """Name the last good checkpoint, and what to type; ``lead`` is what to do first."""
    stages = sorted(folder.glob("stage-*/"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    intact = next(filter(None, (last_checkpoint(one, contents=False)[0] for one in (folder, *stages))), None)
    kept = f"The last good checkpoint, {intact}, is kept" if intact is not None else "There is no checkpoint yet"
    return f"{kept}. {lead} the same command with --resume-from-checkpoint (resume_from_checkpoint=True)."


def checkpoint_bytes(model: nn.Module) -> int:
    """Return about what a checkpoint takes: the weights that are saved, and AdamW's state of those that are trained."""
    return saved_bytes(model) + _ADAM_BYTES * sum(p.numel() for p in model.parameters() if p.requires_grad)


def saved_bytes(model: nn.Module) -> int:
    """Return about what saving a model takes; of an adapted one, what is trained."""
    inside = getattr(model, "module", model)  # of DistributedDataParallel
    all_saved = not hasattr(inside, "get_base_model")  # which a model wrapped by PEFT has
    return sum(p.numel() * p.element_size() for p in model.parameters() if all_saved or p.requires_grad)


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


def make_repo(config: FinetuneConfig) -> Repository | None:
    """Make the repository that a run is pushed to, so that a token that may not is found before the training.

    Returns:
        The repository; None where nothing is to be pushed.

    Raises:
        HubAccessError, HubUnreachableError: It cannot be made or written to.
    """
    if (name := config.repository) is None:
        return None
    return make_repository(name, private=config.hub_private_repo, token=config.hub_token, revision=config.hub_revision)


def push(config: FinetuneConfig, repository: Repository) -> None:
    """Upload the trained model with its card, results and logs; checkpoints stay here."""
    repository.upload(Path(str(config.output_dir)), "Model trained by hf_posenc", leave_out=_NOT_PUSHED)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a loss log; one that a kill cut off in the middle is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
