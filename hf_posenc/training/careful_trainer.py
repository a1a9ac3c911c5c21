"""Transformers' Trainer with two cares: that positions reach the model, and that checkpoints are whole and sound."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]  # accelerate ships no types
from torch import nn
from transformers import Trainer

from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.training.checkpoints import PARTIAL, clear_partial, move_into_place
from hf_posenc.training.train_log import ADVICE_NOT_FINITE
from hf_posenc.training.writing import checkpoint_bytes, how_to_go_on, writing
from hf_posenc.utils.processes import from_main


class CarefulTrainer(Trainer):
    """Trainer that checks what it feeds, and moves a checkpoint into place when all processes are through with it.

    Trainer itself writes in place, its state last, and finds a checkpoint by its name: one that is being written when
    the process is killed, or the disk is full, is taken for whole by ``resume_from_checkpoint=True``.

    Attributes:
        checks_positions: Before the first step, see that positions reach the model.
    """

    checks_positions = True
    _aside = False

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.checks_positions:
            check_positions_arrive(self, model, inputs)
            self.checks_positions = False
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def _get_output_dir(self, trial: Any) -> str:
        folder: str = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._aside else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, step = Path(str(self.args.output_dir)), self.state.global_step
        refuse_not_finite(model, folder, step)
        from_main(lambda: clear_partial(folder))
        self._aside = True
        try:
            with writing(f"the checkpoint of step {step}", folder, checkpoint_bytes(model), leftovers=folder / PARTIAL):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                from_main(lambda: move_into_place(folder, step, self.args.save_total_limit))
        finally:
            self._aside = False


@torch.no_grad()
def check_positions_arrive(trainer: Trainer, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise if position_ids make no difference to the loss: something around the model drops them.

    ``probe_isolation`` asks the bare model; here it has every wrapper that Trainer and accelerate put around it.
    Other positions give another loss, by however little; dropped ones give the same, to the bit.

    Args:
        trainer: In training.
        model: As its ``training_step`` gets it.
        inputs: The first batch; its first block is fed twice.

    Raises:
        RuntimeError: They do not arrive.
    """
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        return  # one device may not hold a whole block
    block = {name: value[:1] for name, value in trainer._prepare_inputs(inputs).items()}
    positions = block["position_ids"]
    block["labels"] = block["input_ids"]  # all of them: where few count in the loss, these may see no other positions
    running_on = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    other = running_on % max(positions.shape[1] // 2, 1) if positions.equal(running_on) else running_on
    with evaluation_mode(model):  # type: ignore[arg-type]  # what it unwraps is one
        losses: list[Any] = [
            trainer.compute_loss(model, {**block, "position_ids": p.contiguous()}) for p in (positions, other)
        ]
    if losses[0].equal(losses[1]):
        raise RuntimeError(
            f"position_ids do not reach the model: with others the loss is {losses[0].item():.6f} just the same. "
            "Something that wraps the model, or its forward, drops them, so packed documents would see each other. "
            "Train the model without that wrapper, or have it pass position_ids on."
        )


@torch.no_grad()
def refuse_not_finite(model: nn.Module, folder: Path, step: int) -> None:
    """Refuse to save weights that can only give NaN: the loss of a step says what they were before it, not after.

    Args:
        model: Sharded or not; each process looks at what it holds.
        folder: Of the run, for the message.
        step: That was just done.

    Raises:
        RuntimeError: A trained weight is NaN or infinite, in every process.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    bad = next((name for name, p in trained if not _local(p).isfinite().all()), None)
    found = [name for name in gather_object([bad]) if name is not None]
    if found:
        raise RuntimeError(
            f"weights are not finite after step {step}, {found[0]} first, so no checkpoint of it was written. "
            + ADVICE_NOT_FINITE.format(how_to_go_on(folder, "If the cause is mended otherwise, run"))
        )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process holds."""
    shard: Any = getattr(parameter, "to_local", None)
    return parameter if shard is None else shard()
