"""Run by each of several processes: train a patched model with Transformers' own Trainer, and save it by Trainer.

    python -m torch.distributed.run --nproc_per_node 2 trainer_of_several.py BASE METHOD OUT

``OUT/model`` is what ``save_model`` wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset
from one_of_several import shard_on_the_cpu
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_posenc import patch_model


def main(base: str, method: str, out: str) -> None:
    shard_on_the_cpu()
    model = patch_model(AutoModelForCausalLM.from_pretrained(base), method, 4)
    rows = [[(row * 7 + place * 11) % 90 + 2 for place in range(200)] for row in range(24)]
    args = TrainingArguments(
        output_dir=str(Path(out) / "run"),
        max_steps=5,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows_and_labels = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = Trainer(model, args, train_dataset=rows_and_labels)
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule)
    trainer.save_model(str(Path(out) / "model"))


if __name__ == "__main__":
    main(*sys.argv[1:])
