"""What the first loss must be, computed without Trainer, wrappers and packing, and a stop where it is not."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]  # accelerate ships no types
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import RunStoppedError
from hf_posenc.evaluation.lm_head import decoder_body, token_losses
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.families.discovery import unwrap
from hf_posenc.patching.api import verify_model
from hf_posenc.training.packing import IGNORED
from hf_posenc.training.precision import is_half

logger = logging.getLogger(__name__)

_GUESSING = 0.8  # of the loss of guessing: what a model that has lost its weights or positions starts near
# How far two right computations can lie apart, as a share: rounding, kernels, and what dropout and jitter add.
_ROUNDING, _HALF_ROUNDING, _NOISE = 5e-4, 1e-2, 0.15


class FirstLossCheck(TrainerCallback):
    """Stop a run whose first loss says that positions, labels or weights are not what they should be.

    Positions that are wrong do not crash: a run goes on for hours from a loss that is somewhat too high. Held against
    each other are the live rotary modules and their closed form, at the start, after the first step and before each
    checkpoint; and the loss of the first step and that of the same tokens outside of Trainer.

    Args:
        model: What is trained, wrapped or not.
        expected: Loss in nats per token that the first step must have; None if it is not known: a resumed run, or an
            attention that is another one while training.
        known: Loss of the same model on other texts, measured before; None if it was not.
        tolerance: By which share the first loss may differ from ``expected``.
        judges: Whether the first loss is looked at; the rotary modules always are.
    """

    def __init__(
        self, model: nn.Module, expected: float | None, known: float | None, tolerance: float, *, judges: bool = True
    ) -> None:
        self.model = model
        self.expected = expected
        self.known = known
        self.tolerance = tolerance
        self.judges = judges
        self.fresh = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        verify_model(self.model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.fresh or control.should_save:
            verify_model(self.model)
        self.fresh = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.judges and state.global_step == 1 and logs is not None and "loss" in logs:
            loss, vocab_size = float(logs["loss"]), unwrap(self.model).config.get_text_config().vocab_size
            check_first_loss(loss, self.expected, self.known, self.tolerance, vocab_size)
            if state.is_world_process_zero:
                tell_first_loss(loss, self.expected, vocab_size)


def check_first_loss(
    loss: float, expected: float | None, known: float | None, tolerance: float, vocab_size: int
) -> None:
    """Raise if the first loss cannot be right; all losses in nats per token.

    Raises:
        RuntimeError: It differs from the expected one; or, where none is known, it is about that of guessing and the
            model was far better before training.
    """
    guessing = math.log(vocab_size)
    near_guessing = f", about that of guessing ({guessing:.2f})" if loss >= _GUESSING * guessing else ""
    if expected is not None and abs(loss - expected) > tolerance * expected:
        raise RunStoppedError(
            f"the first training loss is {loss:.4f} nats per token{near_guessing}, but outside of the trainer the "
            f"same tokens give {expected:.4f}: positions were not applied, or labels or weights are not what they "
            "should be. Something between the data and the model drops or changes position_ids or labels, or "
            f"weights were lost when the model was wrapped. {_ADVICE}"
        )
    if expected is None and near_guessing and known is not None and known < 0.5 * loss:
        raise RunStoppedError(
            f"the first training loss is {loss:.2f} nats per token{near_guessing}, but before training the same model "
            f"read held-out text at {known:.2f}: positions were not applied, weights were lost when the model was "
            f"wrapped, or the training texts are none. {_ADVICE}"
        )


def tell_first_loss(loss: float, expected: float | None, vocab_size: int) -> None:
    """Log a first loss that was not refused; one of guessing can be right, by what the model was given."""
    guessing = math.log(vocab_size)
    if expected is not None:
        logger.info("first loss %.4f nats per token; outside of the trainer the same tokens give %.4f", loss, expected)
    if loss >= _GUESSING * guessing:
        logger.warning(
            "the first loss is %.2f nats per token, about that of guessing (%.2f). A pretrained model starts far "
            "lower: check that the checkpoint and the tokenizer belong together, and that the positions were applied "
            "(verify_model(model) raises if not).",
            loss,
            guessing,
        )
    elif expected is None:
        logger.info("first loss %.4f nats per token; guessing would give %.4f", loss, guessing)


_ADVICE = (
    "No checkpoint of it was written. If it is right all the same, pass check_first_loss=False "
    "(--check-first-loss false)."
)


def expected_first_loss(model: nn.Module, blocks: Iterable[dict[str, torch.Tensor]], rows_per_chunk: int) -> float:
    """Return the mean loss of blocks over all processes: each document alone, by the model's own body, as measured.

    Neither packing nor the training forward takes part: a document is fed without its neighbours, and, where its
    positions count up from 0, without position_ids.

    Args:
        model: Before it is wrapped for training, in the precision it is trained in.
        blocks: Items of the packed dataset, this process's share.
        rows_per_chunk: Rows whose logits exist at one time.
    """
    total, count = 0.0, 0
    with evaluation_mode(model):  # type: ignore[arg-type]  # what it unwraps is one
        for block in blocks:
            for piece in documents_of(block):
                losses = _document_losses(model, piece, rows_per_chunk)
                total, count = total + float(losses.double().sum()), count + len(losses)
    shares = gather_object([(total, count)])
    return math.fsum(share for share, _ in shares) / float(max(sum(number for _, number in shares), 1))


def documents_of(block: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut a block where positions do not rise: a skip ahead within a document (PoSE) is none of its ends."""
    positions = block["position_ids"]
    starts = [0, *((positions.diff() <= 0).nonzero().flatten() + 1).tolist(), len(positions)]
    names = ("input_ids", "position_ids", "labels")
    return [{name: block[name][a:b] for name in names} for a, b in itertools.pairwise(starts)]


@torch.no_grad()
def _document_losses(model: nn.Module, piece: dict[str, torch.Tensor], rows_per_chunk: int) -> torch.Tensor:
    """Return the loss of each label of one document."""
    base = unwrap(model)
    ids, positions = piece["input_ids"], piece["position_ids"]
    scored = (piece["labels"][1:] != IGNORED).nonzero().flatten()
    if not len(scored):
        return torch.empty(0)
    given: dict[str, torch.Tensor] = {}
    if not torch.equal(positions, torch.arange(len(ids))):
        # With a mask Transformers does not take a skip in the positions for a new document.
        given = {"position_ids": positions[None], "attention_mask": torch.ones_like(ids)[None]}
    fed = {name: value.to(base.device) for name, value in {"input_ids": ids[None], **given}.items()}
    hidden = decoder_body(base)(**fed, use_cache=False).last_hidden_state[0]
    return token_losses(base, hidden[scored.to(hidden.device)], piece["labels"][1:][scored], rows_per_chunk)


def tolerance_of(model: nn.Module, *, autocast: bool) -> float:
    """Return by which share a right first loss may differ from the expected one."""
    config = unwrap(model).config.get_text_config().to_dict()
    noisy = any(
        isinstance(value, (int, float)) and value > 0
        for name, value in config.items()
        if "drop" in name or "jitter" in name
    )
    if noisy or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return _NOISE
    return _HALF_ROUNDING if autocast or is_half(model) else _ROUNDING
