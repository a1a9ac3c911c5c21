"""A short run of Transformers' Trainer for the tests of PerplexityCallback, in one process or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from tiny_llama import make_tiny_llama
from tiny_runs import make_documents

LENGTHS = [32, 128]
HELD_OUT = make_documents()[20:]


def make_trainer(folder: Path, model: Any = None, callbacks: Any = (), eval_dataset: Any = None, **changes: Any):
    rows = [{"input_ids": row[:48], "labels": row[:48]} for row in make_documents()]
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Trainer(
        model=make_tiny_llama(attention_dropout=0.1) if model is None else model,
        args=TrainingArguments(**{**settings, **changes}),
        train_dataset=rows[:20],
        eval_dataset=rows[20:22] if eval_dataset is None else eval_dataset,
        callbacks=list(callbacks),
    )
