"""``hf-posenc finetune`` of a tiny model, to be killed, damaged and resumed; as a script, a run that kills itself.

``python killed_runs.py POINT WHERE finetune ...`` dies by SIGKILL: ``step 7`` in the 7th step, ``saved 8`` right after
the checkpoint of step 8, ``writing checkpoint-8/optimizer.pt`` with half of that file on the disk,
``moving checkpoint-8`` when all files are written and the checkpoint is not yet under its final name.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, EVERY = 12, 4  # optimizer steps, and steps between checkpoints
BLOCK = 128


def command(base: Path, output: Path, *flags: str) -> list[str]:
    words = ["finetune", str(base), "--documents", str(base / "text.jsonl"), "--output-dir", str(output)]
    words += ["--factor", "2", "--token-budget", str(STEPS * 2 * BLOCK), "--per-device-train-batch-size", "2"]
    words += ["--learning-rate", "3e-3", "--warmup-steps", "2", "--save-steps", str(EVERY)]
    return [*words, "--eval-documents", "2", "--eval-lengths", "64", *flags]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(call: Callable[..., Any], end: str, *, before: bool = False) -> Callable[..., Any]:
    """Die in a call that is given a path with this ending: before it, or with half of the file written."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        paths = [str(one) for one in (*args, *kwargs.values()) if isinstance(one, (str, Path))]
        path = next((path for path in paths if path.endswith(end)), None)
        if path is not None and before:
            die()
        result = call(*args, **kwargs)
        if path is not None:
            os.truncate(path, os.path.getsize(path) // 2)
            die()
        return result

    return wrapped


def dying_at(call: Callable[..., Any], step: int) -> Callable[..., Any]:
    """Die when a method of Trainer is through and so many steps are done."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        if self.state.global_step == step:
            die()
        return result

    return wrapped


def arm(point: str, where: str) -> None:
    import torch
    import transformers
    from transformers import Trainer, TrainerState

    if point == "step":
        Trainer.training_step = dying_at(Trainer.training_step, int(where) - 1)  # type: ignore[method-assign]  # to die in it
    elif point == "saved":
        Trainer._maybe_log_save_evaluate = dying_at(Trainer._maybe_log_save_evaluate, int(where))
    elif point == "moving":
        os.replace = dying(os.replace, where, before=True)
    else:  # who writes what
        torch.save = dying(torch.save, where)
        transformers.modeling_utils.safe_save_file = dying(transformers.modeling_utils.safe_save_file, where)
        TrainerState.save_to_json = dying(TrainerState.save_to_json, where)  # type: ignore[method-assign]  # to die in it
        Path.write_text = dying(Path.write_text, where)  # type: ignore[method-assign]  # to die in it


if __name__ == "__main__":
    import torch

    from hf_posenc.cli.main import main

    torch.set_num_threads(2)  # as in the tests: the order in which numbers are added depends on it
    arm(sys.argv[1], sys.argv[2])
    sys.exit(main(sys.argv[3:]))
