"""Training loss of a causal language model whose logits [tokens, vocabulary] are never built whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_posenc.data.tokens import IGNORED
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.lm_head import DEFAULT_ROWS_PER_CHUNK, decoder_body, head_logits, head_parameters, row_chunks
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training.masks import documents_start_at_zero, finished_masks

Rows = slice | torch.Tensor  # of a matrix: some of its rows, by their numbers
Chunks = Callable[[torch.Tensor, int], Iterable[Rows]]  # by what each row is to predict; each of at most so many rows


def counted_rows(targets: torch.Tensor, rows_per_chunk: int) -> Iterator[Rows]:
    """Yield the rows that count in the loss: in a dialogue these are few, and logits cost more than a layer does.

    Where none counts, one is yielded, so that the head's weights have a gradient, of zeros: other processes add theirs.
    """
    counted = (targets != IGNORED).nonzero().flatten().cpu()  # the rows can be on another device than what they predict
    if 0 < len(counted) < len(targets):
        yield from torch.split(counted, rows_per_chunk)
    else:
        yield from row_chunks(len(targets) if len(counted) else 1, rows_per_chunk)


def chunked_causal_lm_loss(
    model: PreTrainedModel,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None = None,
    rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK,
    shift_labels: torch.Tensor | None = None,
    likely_ids: torch.Tensor | None = None,
    likely_log_probs: torch.Tensor | None = None,
    *,
    chunks: Chunks = counted_rows,
) -> torch.Tensor:
    """Return the mean loss in nats, with gradients, holding the logits of one chunk of rows at a time.

    Each chunk's gradient is taken as soon as its logits are there, so they are made once (as the Triton kernels of Hsu
    et al. 2024, Liger Kernel, arXiv:2410.10989, section 3.2). That suits every head, soft-capped ones too,
    which torch's fused ``linear_cross_entropy`` does not. A head whose weights are whole only while it runs
    (FSDP2, ZeRO-3) has its logits made again in the backward pass instead, by activation checkpointing, and those of
    rows that do not count too: each process has to gather the weights as often.

    Args:
        model: The causal language model whose head is used.
        hidden_states: ``(batch, seq_len, hidden_size)``; row t predicts token t + 1.
        labels: ``(batch, seq_len)``, not shifted; ``-100`` is left out.
        num_items: Divide the sum by this many (the labels of the global batch); None: by those given here.
        rows_per_chunk: Rows whose logits exist at one time; memory is this x vocabulary x about 8 bytes.
        shift_labels: ``(batch, seq_len)``, what each row predicts, instead of ``labels``: where processes share a
            sequence, the label of a shard's last row is in another shard.
        likely_ids: The tokens that another model takes for the likeliest after each token, int64 ``(batch, seq_len,
            number)``; with them, the loss of a row is ``divergence_from_likely`` and not the cross-entropy.
        likely_log_probs: Their log-probabilities there.
        chunks: Which rows are computed together, by ``shift_labels`` and ``rows_per_chunk``. A memory prediction, which
            needs no right loss, computes fewer than all.
    """
    if shift_labels is None:
        hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    targets = shift_labels.reshape(-1)
    likely: list[torch.Tensor] = []
    if likely_ids is not None and likely_log_probs is not None:
        likely = [of_rows[:, : hidden_states.shape[1]].flatten(0, 1) for of_rows in (likely_ids, likely_log_probs)]

    items = torch.as_tensor((targets != IGNORED).sum() if num_items is None else num_items).clamp(min=1)

    def chunk_loss(rows: torch.Tensor, targets: torch.Tensor, *likely: torch.Tensor) -> torch.Tensor:
        logits = head_logits(model, rows)
        targets = targets.to(logits.device)
        if likely:
            nll = (divergence_from_likely(logits, *likely) * (targets != IGNORED)).sum()
        else:
            nll = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return nll / items.to(nll.device)  # here, so that gradients are rounded as those of a mean are

    if torch.is_grad_enabled() and not _gathers_weights_when_called(model):
        trained = [weight for weight in head_parameters(model) if weight.requires_grad]
        return _GradientsAtOnce.apply(  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped
            chunk_loss, chunks(targets, rows_per_chunk), (targets, *likely), rows, *trained
        )
    losses: list[torch.Tensor] = [
        checkpoint(
            chunk_loss,
            rows[chunk],
            *(each[chunk] for each in (targets, *likely)),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for chunk in row_chunks(len(targets), rows_per_chunk)
    ]
    return torch.stack(losses).sum()


def divergence_from_likely(
    logits: torch.Tensor, likely_ids: torch.Tensor, likely_log_probs: torch.Tensor
) -> torch.Tensor:
    """Return the Kullback-Leibler divergence from a distribution of which the likeliest tokens are known, in nats.

    All other tokens are taken together as one, so that it is at most the divergence over the whole vocabulary.

    Args:
        logits: Of the model that is trained, ``(rows, vocabulary)``.
        likely_ids: int64 ``(rows, number)``.
        likely_log_probs: ``(rows, number)``.

    Returns:
        float32 ``(rows,)``.
    """
    wanted = likely_log_probs.to(logits.device).float()
    found = logits.float().log_softmax(-1).gather(-1, likely_ids.to(logits.device))
    others = [(1 - known.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log() for known in (wanted, found)]
    wanted, found = (torch.cat(pair, dim=-1) for pair in zip((wanted, found), others, strict=True))
    return (wanted.exp() * (wanted - found)).sum(-1)


class _GradientsAtOnce(torch.autograd.Function):
    """The sum of the losses of all chunks, whose gradients are taken in the forward pass and kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[..., torch.Tensor],
        chunks: Iterable[Rows],
        targets: Sequence[torch.Tensor],
        rows: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), device=rows.device)
        of_rows, of_weights = torch.zeros_like(rows), [torch.zeros_like(weight) for weight in weights]
        used: set[int] = set()
        for chunk in chunks:
            given = [each[chunk] for each in targets]
            of_rows[chunk], loss, here = _add_gradients(loss_of, rows[chunk], given, weights, of_weights)
            total += loss
            used |= here
        # A weight that no logits depend on has no gradient, as without chunks: weight decay would move it.
        ctx.save_for_backward(of_rows, *(kept if at in used else None for at, kept in enumerate(of_weights)))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        found = (kept if kept is None else kept * gradient.to(kept.device) for kept in ctx.saved_tensors)
        return None, None, None, *found


def _add_gradients(
    loss_of: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    targets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, set[int]]:
    """Return the gradient of the rows of a chunk, its loss, and which weights have gradients; add these to ``sums``."""
    with torch.enable_grad():
        part = rows.detach().requires_grad_()
        loss = loss_of(part.view_as(part), *targets)  # no leaf: on one, the hooks of module trackers would fail here
    of_rows, *of_weights = torch.autograd.grad(loss, (part, *weights), allow_unused=True)
    used = {at for at, new in enumerate(of_weights) if new is not None}
    for at in used:
        sums[at].add_(of_weights[at])
    return of_rows, loss.detach().to(rows.device), used


def _gathers_weights_when_called(model: PreTrainedModel) -> bool:
    """Say whether FSDP2 or ZeRO-3 gathers weights only while their module runs, and autograd in between would fail."""
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return sharded or any(hasattr(weight, "ds_id") for weight in model.parameters())


@contextmanager
def chunked_lm_loss(
    model: Any,
    rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK,
    *,
    chunks: Chunks = counted_rows,
    one_document: bool = False,
) -> Iterator[None]:
    """While open, the causal language model inside ``model`` returns only the loss, computed in chunks.

    The loss belongs inside the model's forward: there DistributedDataParallel, PEFT and mixed precision see
    it. Only this instance changes, and only until the block ends.

    Args:
        model: Wrapped by PEFT or not.
        rows_per_chunk, chunks: As for ``chunked_causal_lm_loss``.
        one_document: As for ``documents_start_at_zero``.

    Raises:
        ValueError: The head is not separable, or the model is set to add a router loss, which would be lost.
    """
    rotary = RotaryModel(model)
    base, config = rotary.model, rotary.text_config
    body = decoder_body(base)
    if getattr(config, "output_router_logits", False):
        raise InvalidRequestError(
            "config.output_router_logits is on, but the loss in chunks has no router loss. Set it to False to train."
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def compute_loss(*args: Any) -> CausalLMOutputWithPast:  # whose gradients, taken here, torch.compile cannot trace
        return CausalLMOutputWithPast(loss=chunked_causal_lm_loss(base, *args, chunks=chunks))

    def forward(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        likely_ids: torch.Tensor | None = None,
        likely_log_probs: torch.Tensor | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast:
        if labels is None:
            raise InvalidRequestError("the training forward needs labels; it returns the loss and no logits.")
        if attention_mask is not None:
            raise InvalidRequestError(
                "an attention mask came with packed documents: Transformers would let them see each other. "
                "Pass position_ids only."
            )
        with documents_start_at_zero(config, one_document=one_document):
            shape = torch.empty(*input_ids.shape, 0, dtype=base.dtype, device=input_ids.device)
            masks = finished_masks(config, shape, position_ids)
            given = {} if masks is None else {"attention_mask": masks}
            hidden = body(input_ids=input_ids, position_ids=position_ids, use_cache=False, **given).last_hidden_state
        output: CausalLMOutputWithPast = compute_loss(
            hidden, labels, num_items_in_batch, rows_per_chunk, shift_labels, likely_ids, likely_log_probs
        )
        return output

    with _attributes_kept(base), _attributes_kept(model):
        vars(base)["forward"] = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        vars(base)["accepts_loss_kwargs"] = True  # Trainer then hands over num_items_in_batch
        yield


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Put back what this loss, and accelerate's mixed precision around it, set on the instance.

    accelerate wraps ``forward`` of the outermost module and has no undo that works for a plain function.
    """
    names = ("forward", "_original_forward", "accepts_loss_kwargs")
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        vars(module).update(before)
