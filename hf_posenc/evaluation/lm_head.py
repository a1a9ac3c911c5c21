"""The last step of a causal language model, taken in row chunks, so that [length, vocabulary] is never built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import InvalidRequestError

DEFAULT_ROWS_PER_CHUNK = 1024
_FEW_TOKENS = 16  # on which body and head are compared with the whole model


def head_logits(model: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
    """Map hidden states ``(..., hidden_size)`` to float32 logits ``(..., vocab_size)`` by the model's own forward.

    Families differ in what they do before and after the matrix product: Gemma 2 caps, Cohere and Falcon-H1 multiply,
    Granite divides, ModernBERT has one more layer. Instead of a list of them, the forward runs with a module in the
    place of the body that returns the hidden states.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    device = next(head.parameters()).device
    if device.type != "meta":  # the head is offloaded, and its hook moves what it is given
        hidden_states = hidden_states.to(device)
    rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
    with _body_that_returns(model, rows):
        # The class's own: what wraps the instance's forward (hooks, autocast, the training loss) is around this call.
        logits: torch.Tensor = type(model).forward(model, inputs_embeds=rows, use_cache=False).logits
    return logits.float().reshape(*hidden_states.shape[:-1], -1)


@contextmanager
def _body_that_returns(base: PreTrainedModel, hidden_states: torch.Tensor) -> Iterator[None]:
    """While open, the body of a model is a module that returns these hidden states, and no hook of the body runs."""
    body = decoder_body(base)
    name = next(name for name, child in base.named_children() if child is body)
    base._modules[name] = _Returning(body, hidden_states)
    try:
        yield
    finally:
        base._modules[name] = body


class _Returning(nn.Module):
    """A module in the place of a body that returns hidden states, whatever it is given."""

    def __init__(self, body: nn.Module, hidden_states: torch.Tensor) -> None:
        super().__init__()
        vars(self).update(body=body, hidden_states=hidden_states)  # the body is no part of it

    def forward(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self.hidden_states)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["body"], name)  # Falcon-H1 keeps the multiplier of its logits in the body


class _BodyOutput:
    """An output of which all but the hidden states (caches, attentions, router logits, ...) is None."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def head_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return all parameters that ``head_logits`` may use: the head's own, and others that are not in the body."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    own, in_body = list(head.parameters()), {id(weight) for weight in decoder_body(model).parameters()}
    known = in_body | {id(weight) for weight in own}
    return own + [weight for weight in model.parameters() if id(weight) not in known]


def decoder_body(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal language model that makes hidden states: everything but its head."""
    parts = [model.base_model, *(child for child in model.children() if isinstance(child, PreTrainedModel))]
    # In Mllama's text model the prefix of the checkpoint's names is no name of a part, so that base_model is itself.
    body = next((part for part in parts if part is not model), None)
    if body is None or model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        raise InvalidRequestError(
            f"{type(model).__name__} has no separate language-model head. Load the checkpoint with "
            "AutoModelForCausalLM."
        )
    return body


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise unless body + head give the logits of the model's own forward on a few tokens.

    Raises:
        ValueError: The logits are not finite, or something outside the model's forward, such as a hook, changes them.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    input_ids = (torch.arange(_FEW_TOKENS, device=model.device) * 7919 % vocab_size).unsqueeze(0)
    # accelerate wraps the forward of what it prepares in autocast, but not the body's: Trainer(bf16=True), say.
    forward: Any = vars(model).get("_original_forward", model)
    expected = forward(input_ids=input_ids, use_cache=False).logits.float()
    if not expected.isfinite().all():
        raise InvalidRequestError(
            f"the model gives logits that are not finite, in {str(model.dtype).removeprefix('torch.')}. "
            "Check its weights; float16 overflows in many models where bfloat16 and float32 do not."
        )
    hidden = decoder_body(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    actual = head_logits(model, hidden).to(expected.device)
    # Both run the same kernels, but a head in bf16 may round before or after the cap: allow that rounding.
    tolerance = 4 * torch.finfo(model.dtype).eps * expected.abs().max().item() + 1e-5
    if not (actual - expected).abs().max().item() <= tolerance:  # not a number is not equal either
        raise InvalidRequestError(
            f"{type(model).__name__} gives other logits than its forward computes from the hidden states of its "
            f"{type(decoder_body(model)).__name__}, so losses computed in chunks would be wrong. Remove the hook or "
            "the wrapper that changes them; without one, please report this model_type: " + str(model.config.model_type)
        )


def row_chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Yield slices that cover ``num_rows`` rows, each of at most ``rows_per_chunk``."""
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))


@torch.no_grad()
def token_losses(
    model: PreTrainedModel,
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK,
) -> torch.Tensor:
    """Return the loss of each target, in nats, without gradients.

    Args:
        model: The causal language model whose head is used.
        hidden_states: ``(rows, hidden_size)``; row i is what the model knows before target i.
        targets: ``(rows,)``, token ids.
        rows_per_chunk: Rows whose logits exist at one time; memory is this x vocabulary x 4 bytes.

    Returns:
        float32 ``(rows,)`` on the CPU.
    """
    losses = torch.empty(len(targets), dtype=torch.float32)
    for rows in row_chunks(len(targets), rows_per_chunk):
        logits = head_logits(model, hidden_states[rows])
        losses[rows] = nn.functional.cross_entropy(logits, targets[rows].to(logits.device), reduction="none").cpu()
        del logits  # before the next chunk's are made: a half-precision head holds them twice for a moment
    return losses
