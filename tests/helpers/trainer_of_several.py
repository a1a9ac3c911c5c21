"""Run by each of several processes: train a patched model with Transformers' own Trainer, and save it by Trainer.

    python -m torch.distributed.run --nproc_per_node 2 trainer_of_several.py BASE METHOD OUT [STAGE]

It is sharded by FSDP2; with STAGE, by that stage of DeepSpeed ZeRO. ``OUT/model`` is what ``save_model`` wrote, and
``OUT/weights.safetensors`` what the processes hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_posenc import patch_model
from one_of_several import shard_on_the_cpu


def main(base: str, method: str, out: str, stage: str | None = None) -> None:
    deepspeed = None
    if stage is None:
        shard_on_the_cpu()
    else:
        zero = {"stage": int(stage), "stage3_gather_16bit_weights_on_model_save": True}
        deepspeed = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    rows = [[(row * 7 + column * 11) % 90 + 2 for column in range(200)] for row in range(24)]
    args = TrainingArguments(
        output_dir=str(Path(out) / "run"),
        max_steps=5,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=stage is not None,
        deepspeed=deepspeed,
    )
    model = patch_model(AutoModelForCausalLM.from_pretrained(base), method, 4)  # ZeRO-3 shares it out as it is loaded
    rows_and_labels = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = Trainer(model, args, train_dataset=rows_and_labels)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine" if stage else isinstance(model, FSDPModule)
    trainer.save_model(str(Path(out) / "model"))
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    if trainer.is_world_process_zero():
        save_file(weights, Path(out) / "weights.safetensors")


def whole(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
