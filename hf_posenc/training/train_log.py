"""The loss log: one JSON line for every step, without repeats however often a run is resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import RunStoppedError
from hf_posenc.training.run_folder import read_log
from hf_posenc.utils.console import Progress
from hf_posenc.utils.files import write_whole

ADVICE_NOT_FINITE = "Start again in another output_dir with a lower learning_rate, a longer warm-up, or bf16=False."


class LossLog(TrainerCallback):
    """Append ``step, loss, learning_rate, grad_norm, tokens_trained, seconds`` to a JSON-lines file.

    Trainer must log every step: it forgets the losses since its last log when it resumes. On resume, lines past the
    checkpoint belong to steps that are done again and are removed first.

    Args:
        path: The file.
        tokens_per_step: Tokens one optimizer step is trained on, over all devices.
        tokens_before: Tokens of earlier runs, counted on from.
        kinds: For a mixture, the kind of data of each step; the line of a step has it, and the tokens in its loss.
    """

    def __init__(
        self, path: Path, tokens_per_step: int, tokens_before: int = 0, kinds: Sequence[str] | None = None
    ) -> None:
        self.path, self.kinds = path, kinds
        self.tokens_before = tokens_before
        self.tokens_per_step = tokens_per_step
        self.seconds_before = 0.0
        self.began = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began = time.perf_counter()
        state.save_steps = int(args.save_steps)  # on resume Trainer would keep the interval the run was started with
        if state.is_world_process_zero:
            kept = [line for line in read_log(self.path) if line["step"] <= state.global_step]
            self.seconds_before = kept[-1]["seconds"] if kept else 0.0
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        loss, norm = float(logs["loss"]), float(logs.get("grad_norm", 0.0))
        for what, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):  # in every process: it is that of all, and one alone would leave them waiting
                raise RunStoppedError(
                    f"the {what} of step {state.global_step} is {value}, so no checkpoint of it is written. "
                    + ADVICE_NOT_FINITE
                )
        if state.is_world_process_zero:
            self._write(loss, logs, state.global_step)

    def _write(self, loss: float, logs: dict[str, Any], step: int) -> None:
        line: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "learning_rate": float(logs["learning_rate"]),
            "grad_norm": float(logs["grad_norm"]) if "grad_norm" in logs else None,
            "tokens_trained": self.tokens_before + step * self.tokens_per_step,
            "seconds": round(self.seconds_before + time.perf_counter() - self.began, 3),
        }
        if self.kinds is not None:
            line |= {"kind": self.kinds[step - 1], "tokens_in_loss": int(logs["tokens_in_loss"])}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Console(ProgressCallback):
    """The progress of the training, and the losses of some steps; without Trainer's final summary.

    That one's mean loss covers only the steps since the last resume.

    Args:
        every: Steps between the losses shown.
        shorter: What would make the training shorter.
    """

    def __init__(self, every: int, shorter: str = "") -> None:
        super().__init__()
        self.every, self.shorter = every, shorter
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.progress = Progress(
                "training", state.max_steps, unit="steps", done=state.global_step, shorter=self.shorter
            )
            self.training_bar = self.progress.bar  # through which the losses are written

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.update(state.global_step - self.current_step)
        self.current_step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs and (state.global_step == 1 or state.global_step % self.every == 0):
            super().on_log(args, state, control, logs=logs, **kwargs)  # type: ignore[no-untyped-call]  # Transformers leaves it untyped

    def close(self) -> None:
        """End the line of a bar that an error or Ctrl-C left open, so that the message begins a line."""
        if self.progress is not None:
            self.progress.close()
