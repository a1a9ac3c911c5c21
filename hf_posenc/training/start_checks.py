"""Checks at the start of a training: are packed documents isolated, do positions arrive, is the first loss right?"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]  # accelerate ships no types
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.attention.inner import inner_name
from hf_posenc.attention.shifted import shift_of
from hf_posenc.data.tokens import IGNORED
from hf_posenc.errors import RunStoppedError, argument
from hf_posenc.evaluation.lm_head import decoder_body, head_logits, token_losses
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import extension_of, verify_model
from hf_posenc.training.chunked_loss import chunked_lm_loss, divergence_from_likely
from hf_posenc.training.positions import FULL, PositionSchedule, document_arguments
from hf_posenc.utils.dtypes import is_half

logger = logging.getLogger(__name__)

_DOCUMENT = 24  # tokens of a document of the probe
# Tokens of a group of shifted sparse attention meanwhile, so that a block has several: the border between the documents
# (24) lies inside a group of either half of the heads (20 to 40, 10 to 30).
_GROUP = 20
_LEAK = 0.01  # of what is seen when the two are one document: rounding stays far below
_UNSEEN = 1e-4  # the same, where something must be seen, from however far
# How far two right computations can lie apart, as a share: rounding, kernels, and what dropout and jitter add.
_ROUNDING, _HALF_ROUNDING, _NOISE = 5e-4, 1e-2, 0.15
_LEAST = 0.2  # nats: of what is retained and not yet lost, all of the loss is rounding


@torch.no_grad()
def probe_isolation(
    rotary: RotaryModel, batch_size: int = 1, positions: PositionSchedule | None = None, *, packed: bool = True
) -> float:
    """See that what comes after a border of documents does not depend on what comes before it.

    The probe goes the way training goes (the training forward, wrappers and hooks included, and shifted sparse
    attention where that is on, in groups as short as the probe). It asks twice. The gradient of document 2's outputs
    with respect to document 1's embeddings is exactly 0 where a mask keeps them apart, however weak or strong the
    weights are. And document 1 is changed to see whether the logits of document 2 move, which also finds what has no
    gradient; that is measured against what the same change does when both documents are numbered as one. Where
    positions skip, the probe also changes what comes before a skip in one document and sees whether what comes after
    it moves, as it must.

    Args:
        rotary: The causal language model, PEFT-wrapped or not.
        batch_size: Blocks per forward in training; some attention implementations tell documents apart only
            when it is 1.
        positions: How positions run in training; None: one after the other.
        packed: Blocks hold several documents; otherwise only skips of positions are looked at.

    Returns:
        The largest movement of a logit of document 2, as a share of the movement without boundaries; 0 where blocks
        hold one document.

    Raises:
        RuntimeError: Document 2 depends on document 1, what comes after a skip does not depend on what comes before
            it, or the probe itself cannot tell.
    """
    model = rotary.wrapped
    skips = positions is not None and positions.kind != FULL
    if not packed and not skips:
        return 0.0
    attention = inner_name(str(rotary.model.config._attn_implementation))
    lengths = [_DOCUMENT, _second_length(rotary, positions)]
    one = torch.arange(sum(lengths)).repeat(batch_size, 1)
    was_training, shift = rotary.model.training, shift_of(rotary.model)
    apart = 0.0
    model.eval()
    try:
        with nullcontext() if shift is None else shift.dry_run(_GROUP):
            if (joined := _movement(rotary, one, _DOCUMENT)) == 0:
                raise RunStoppedError(
                    f"the document probe cannot tell: with attn_implementation {attention!r} no token sees an earlier "
                    "one."
                )
            if packed:
                several = _drawn(positions, lengths, batch_size)
                # Short, also where a rule changes past the original length: gradients need the memory of training.
                if _gradient(rotary, _drawn(positions, [_DOCUMENT, _DOCUMENT], batch_size)):
                    raise _see_each_other(rotary, attention, batch_size, "its outputs have a gradient there")
                apart = _movement(rotary, several, _DOCUMENT)
                if not apart <= _LEAK * joined:
                    what = f"changing one moved the logits of the next by {apart:.3g} ({joined:.3g} without a boundary)"
                    raise _see_each_other(rotary, attention, batch_size, what)
            if skips:
                _check_skip(rotary, attention, _drawn(positions, [sum(lengths)], 1).repeat(batch_size, 1), joined)
    finally:
        model.train(was_training)
    if packed:
        logger.info(
            "packed documents are isolated (attn_implementation %r, %d blocks per step): changing one moved the logits "
            "of the next by %.2g (%.2g without boundaries)",
            attention,
            batch_size,
            apart,
            joined,
        )
    return apart / joined


def _see_each_other(rotary: RotaryModel, attention: str, batch_size: int, what: str) -> RunStoppedError:
    """Return the error, with the ways out that are left."""
    others = [argument("packing", False)]
    if batch_size > 1:
        others.append(argument("per_device_train_batch_size", 1))
    if attention != "sdpa":
        others.append("attn_implementation='sdpa' when the model is loaded")
    return RunStoppedError(
        f"packed documents see each other with attn_implementation {attention!r} and {batch_size} blocks per step: "
        f"{what}. Something adds an attention mask or a cache, this implementation does not read position_ids, or a "
        f"layer of model_type {rotary.model_type!r} reads tokens without a mask. Try {', or '.join(others)}."
    )


def _gradient(rotary: RotaryModel, position_ids: torch.Tensor) -> float:
    """Return the largest gradient of outputs after the first document with respect to the embeddings in it.

    Of a random sum of these outputs, so that nothing cancels. ``position_ids`` is ``(batch, length)``.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(rotary.text_config.vocab_size, position_ids.shape, generator=generator)
    embedded: list[torch.Tensor] = []

    def cut(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = rotary.model.get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.enable_grad():
            rows = _training_rows(rotary, input_ids.to(rotary.device), position_ids.to(rotary.device), _DOCUMENT)
            weights = torch.randn(rows.shape, generator=generator).to(rows)
            (gradient,) = torch.autograd.grad((rows * weights).sum(), embedded[0])
    finally:
        hook.remove()
    return float(gradient[:, :_DOCUMENT].abs().max())


def _drawn(positions: PositionSchedule | None, lengths: list[int], batch_size: int) -> torch.Tensor:
    """Return positions of documents of these lengths, a row drawn as training draws it; ``(batch_size, length)``.

    Of some draws those that reach farthest: a rule may change something only past the original length.
    """
    if positions is None:
        return torch.cat([torch.arange(length) for length in lengths]).repeat(batch_size, 1)
    room = max(positions.target_length, sum(lengths) + _DOCUMENT)
    long = replace(positions, target_length=room)
    drawn = [long.of(index, lengths) for index in range(batch_size + 8)]
    return torch.stack(sorted(drawn, key=lambda row: -int(row.max()))[:batch_size])


def _check_skip(rotary: RotaryModel, attention: str, position_ids: torch.Tensor, joined: float) -> None:
    border = int((position_ids[0].diff() > 1).nonzero()[0]) + 1
    seen = _movement(rotary, position_ids, border)
    if not seen > _UNSEEN * joined:
        raise RunStoppedError(
            f"with attn_implementation {attention!r} a token does not see the tokens of its own document that come "
            f"before a skip of positions: changing them moved its logits by {seen:.3g} ({joined:.3g} without a skip). "
            "Nothing long would be learnt. Load the model with attn_implementation='sdpa', or take position_schedule "
            "'full'."
        )


def _movement(rotary: RotaryModel, position_ids: torch.Tensor, border: int) -> float:
    """Return the largest change of the logits from index ``border`` on when all tokens before it change.

    ``position_ids`` is ``(batch, length)``.
    """
    device, vocab_size = rotary.device, rotary.text_config.vocab_size
    batch_size, length = position_ids.shape
    generator = torch.Generator().manual_seed(0)
    first, other = torch.randint(vocab_size, (2, batch_size, border), generator=generator).to(device)
    second = torch.randint(vocab_size, (batch_size, length - border), generator=generator).to(device)
    other = torch.where(other == first, (other + 1) % vocab_size, other)
    positions = position_ids.to(device)
    logits = [_training_logits(rotary, torch.cat([ids, second], dim=1), positions, border) for ids in (first, other)]
    return float((logits[0] - logits[1]).abs().max())


def _second_length(rotary: RotaryModel, positions: PositionSchedule | None) -> int:
    """Return the tokens of document 2: where the attention changes past the original length, it goes past it."""
    if positions is not None and positions.kind != FULL:
        return _DOCUMENT  # its positions skip that far, and rules that count tokens are not trained so
    extension = extension_of(rotary.model)
    if extension is None or not extension.method.runs_in_attention:
        return _DOCUMENT  # an encoding is the same at every length, and a learned table ends
    return extension.spec.original_max_position_embeddings + _DOCUMENT


def _training_logits(
    rotary: RotaryModel, input_ids: torch.Tensor, position_ids: torch.Tensor, border: int
) -> torch.Tensor:
    """Return the logits behind the training loss of the first and last tokens after ``border``."""
    rows = _training_rows(rotary, input_ids, position_ids, border)
    return head_logits(rotary.model, torch.cat([rows[:, :_DOCUMENT], rows[:, -_DOCUMENT:]], dim=1))


def _training_rows(
    rotary: RotaryModel, input_ids: torch.Tensor, position_ids: torch.Tensor, border: int
) -> torch.Tensor:
    """Return the hidden states behind the training loss from ``border`` on, read by a hook."""
    hidden: list[torch.Tensor] = []
    hook = decoder_body(rotary.model).register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    try:
        with chunked_lm_loss(rotary.wrapped):
            rotary.wrapped(input_ids=input_ids, position_ids=position_ids, labels=input_ids)
    finally:
        hook.remove()
    return hidden[0][:, border:]


def shares_sequences(trainer: Trainer) -> bool:
    """Return whether each process has a part of every block (context or sequence parallelism)."""
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    return parallel is not None and (parallel.cp_enabled or parallel.sp_enabled)


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
    if shares_sequences(trainer):
        return  # one device may not hold a whole block
    block = {name: value[:1] for name, value in trainer._prepare_inputs(inputs).items()}
    positions = block["position_ids"]
    block["labels"] = block["input_ids"]  # all of them: where few count in the loss, these may see no other positions
    running_on = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    other = running_on % max(positions.shape[1] // 2, 1) if positions.equal(running_on) else running_on
    with evaluation_mode(RotaryModel(model).model):
        losses: list[Any] = [
            trainer.compute_loss(model, {**block, "position_ids": p.contiguous()}) for p in (positions, other)
        ]
    if losses[0].equal(losses[1]):
        raise RunStoppedError(
            f"position_ids do not reach the model: with others the loss is {losses[0].item():.6f} just the same. "
            "Something that wraps the model, or its forward, drops them, so packed documents would see each other. "
            "Train the model without that wrapper, or have it pass position_ids on."
        )


class RotaryCallback(TrainerCallback):
    """Stop a run whose positions are not what they should be.

    Positions that are wrong do not crash: a run goes on for hours from a loss that is somewhat too high. The live
    rotary modules are compared with their closed form at the start, after the first step and before each checkpoint;
    the loss of the first step, if an expected one is given, with that.

    Args:
        rotary: What is trained, wrapped or not.
        expected: Loss in nats per token that the first step must have; None does not compare it.
        tolerance: By which share the first loss may differ from ``expected``, and by which share of 0.2 nats where
            that is less.
    """

    def __init__(self, rotary: RotaryModel, expected: float | None = None, tolerance: float = 0.0) -> None:
        self.rotary, self.expected, self.tolerance = rotary, expected, tolerance
        self.is_first_step = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        verify_model(self.rotary.model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_first_step or control.should_save:
            verify_model(self.rotary.model)
        self.is_first_step = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.expected is None or state.global_step != 1 or logs is None or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if abs(loss - self.expected) > self.tolerance * max(self.expected, _LEAST):
            raise RunStoppedError(
                f"the first training loss is {loss:.4f} nats per token, but outside of the trainer the same tokens "
                f"give {self.expected:.4f}: positions were not applied, or labels or weights are not what they should "
                "be. Something between the data and the model drops or changes position_ids or labels, or weights "
                "were lost when the model was wrapped. No checkpoint was written. If the loss is right all the same, "
                f"leave {argument('check_first_loss')} out."
            )
        if state.is_world_process_zero:
            logger.info(
                "first loss %.4f nats per token; outside of the trainer the same tokens give %.4f", loss, self.expected
            )


def expected_first_loss(rotary: RotaryModel, blocks: Iterable[dict[str, torch.Tensor]], rows_per_chunk: int) -> float:
    """Return the mean loss of blocks over all processes: each document alone, by the model's own body, as measured.

    Neither packing nor the training forward takes part: a document is fed without its neighbours, and, where its
    positions count up from 0, without position_ids.

    Args:
        rotary: The model before it is wrapped for training, in the precision it is trained in.
        blocks: Items of the packed dataset, this process's share.
        rows_per_chunk: Rows whose logits exist at one time.
    """
    total, count = 0.0, 0
    with evaluation_mode(rotary.model):
        for block in blocks:
            for piece in documents_of(block):
                losses = _document_losses(rotary.model, piece, rows_per_chunk)
                total, count = total + float(losses.double().sum()), count + len(losses)
    shares = gather_object([(total, count)])
    return math.fsum(share for share, _ in shares) / float(max(sum(number for _, number in shares), 1))


def documents_of(block: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut a block where positions do not rise: a skip ahead within a document (PoSE) is none of its ends."""
    positions = block["position_ids"]
    starts = [0, *((positions.diff() <= 0).nonzero().flatten() + 1).tolist(), len(positions)]
    return [{name: values[a:b] for name, values in block.items()} for a, b in itertools.pairwise(starts)]


@torch.no_grad()
def _document_losses(model: PreTrainedModel, piece: dict[str, torch.Tensor], rows_per_chunk: int) -> torch.Tensor:
    """Return the loss of each label of one document, or of what is to be retained there."""
    ids, positions = piece["input_ids"], piece["position_ids"]
    scored = (piece["labels"][1:] != IGNORED).nonzero().flatten()
    if not len(scored):
        return torch.empty(0)
    fed = {name: value.to(model.device) for name, value in document_arguments(ids, positions).items()}
    hidden = decoder_body(model)(**fed, use_cache=False).last_hidden_state[0]
    if "likely_ids" in piece:
        logits = head_logits(model, hidden[scored.to(hidden.device)])
        return divergence_from_likely(logits, piece["likely_ids"][scored], piece["likely_log_probs"][scored]).cpu()
    return token_losses(model, hidden[scored.to(hidden.device)], piece["labels"][1:][scored], rows_per_chunk)


def tolerance_of(rotary: RotaryModel, *, autocast: bool) -> float:
    """Return by which share a right first loss may differ from the expected one."""
    noisy = any(
        isinstance(value, (int, float)) and value > 0
        for name, value in rotary.text_config.to_dict().items()
        if "drop" in name or "jitter" in name
    )
    if noisy or any(isinstance(module, nn.Dropout) and module.p > 0 for module in rotary.wrapped.modules()):
        return _NOISE
    return _HALF_ROUNDING if autocast or is_half(rotary.wrapped) else _ROUNDING
