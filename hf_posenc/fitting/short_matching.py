"""Low-rank changes of all layers trained together, so that short texts are read as the unextended model reads them.

The loss is the Kullback-Leibler divergence of the next-token distributions under the rule, with the changes, from those
of the unextended model without them. No token of the text is a target, so that nothing of its style is learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import kl_div
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.lm_head import decoder_body, head_logits
from hf_posenc.evaluation.memory import return_free_memory
from hf_posenc.fitting.adapter import low_rank_weights
from hf_posenc.fitting.budget import Seconds
from hf_posenc.fitting.forwards import replaced_forwards
from hf_posenc.fitting.run import FitRun
from hf_posenc.utils.console import Progress
from hf_posenc.utils.files import write_tensors

_SAVE_EVERY = 5
# Of Adam, in fewer steps than its usual second moment remembers.
BETAS = (0.9, 0.95)
_PARTS = (16, 4, 1)  # of the original length, in turn
TOKENS_IN_STRETCHES = 2048  # of a step, where a stretch is no longer
ROWS_OF_LOGITS = 256  # in memory at a time
_WARMUP = 5  # steps in which the rate rises
LAST_RATE = 0.1  # of the learning rate, at the end


def match_short_texts(run: FitRun, changed: Any, texts: Sequence[torch.Tensor], seed: int, folder: Path) -> int:
    """Train the low-rank changes of a model in place; return in how many steps.

    Args:
        run: The fit.
        changed: The PEFT model, not extended.
        texts: int64 ``(num_tokens,)`` each, of at least the original length.
        seed: Of what is drawn.
        folder: Where the state is kept, so that a stopped run goes on.

    Raises:
        ValueError: The loss is not finite.
    """
    config, original = run.config.adapt, run.original
    assert config is not None
    model = changed.get_base_model()
    body, device = decoder_body(model), model.device
    weights, row = list(low_rank_weights(changed).values()), run.config.rule_request()
    optimizer = torch.optim.Adam(weights, config.short_rate, BETAS)

    def states(ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)

    def gradients(step: int) -> float:
        ids = _draw(texts, original, seed, step).to(device)
        optimizer.zero_grad()
        with torch.no_grad(), changed.disable_adapter():
            wanted = states(ids)
        with run.extended(row), torch.enable_grad(), recomputed_layers(model):
            loss = divergence(model, states(ids), wanted)
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        return float(loss.detach())

    def cost() -> Seconds:
        gradients(0)  # warms up
        lengths, of_tokens = [], []  # of the two shorter stretches, and the seconds of one of their tokens
        for step in (0, 1):
            began = time.perf_counter()
            gradients(step)
            drawn = _draw(texts, original, seed, step)
            lengths.append(drawn.shape[1])
            of_tokens.append((time.perf_counter() - began) / drawn.numel())
        # Attention to each token before makes a token of a longer stretch cost more.
        more = max(0.0, of_tokens[1] - of_tokens[0]) / max(1, lengths[1] - lengths[0])
        shapes = [_draw(texts, original, seed, step).shape for step in range(len(_PARTS))]
        steps = [shape.numel() * (of_tokens[0] + more * (shape[1] - lengths[0])) for shape in shapes]
        return 0.0, sum(steps) / len(steps)

    kept = folder / f"short_steps-{config.short_steps}.json"
    steps = run.budget.steps(config.short_steps, kept, cost, share=run.share_of(seed), fewest=0)
    file = folder / f"short-texts-{steps}-{config.short_rate}.safetensors"
    done = _load(file, weights, optimizer)
    with Progress("short texts", steps, unit="steps", done=done, shown=not run.config.hide_progress) as bar:
        for step in range(done, steps):
            for group in optimizer.param_groups:
                group["lr"] = config.short_rate * _rate(step, steps)
            if not math.isfinite(value := gradients(step)):
                raise InvalidRequestError(
                    f"step {step + 1} on short texts gave a loss of {value}: the model overflows in its dtype, or "
                    "short_rate is too large. Load it in bfloat16 or float32, or lower short_rate."
                )
            optimizer.step()
            return_free_memory()
            bar.update()
            if (step + 1) % _SAVE_EVERY == 0 or step + 1 == steps:
                _save(file, weights, optimizer, step + 1)
    return steps


def divergence(model: Any, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean Kullback-Leibler divergence of next-token distributions, in nats, with gradients.

    Args:
        model: Its head is used.
        hidden: The body's last hidden states ``(num_tokens, hidden_size)``.
        wanted: Those of the model whose distributions are wanted, as many.
    """

    def of_rows(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = head_logits(model, right).log_softmax(-1)
        return kl_div(head_logits(model, found).log_softmax(-1), target, log_target=True, reduction="sum")

    parts = zip(torch.split(hidden, ROWS_OF_LOGITS), torch.split(wanted, ROWS_OF_LOGITS), strict=True)
    sums = [checkpoint(of_rows, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / len(hidden)


def _rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: it rises over a few steps, then falls along a cosine."""
    falling = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / _WARMUP) * falling


def _draw(texts: Sequence[torch.Tensor], original: int, seed: int, step: int) -> torch.Tensor:
    """Return stretches of the texts in turn, ``(number, length)``: of so many tokens, or one where it is longer.

    They are a sixteenth of the original length long, or a fourth; every third step takes whole ones. A step draws the
    same whenever it is taken.
    """
    length = max(2, original // _PARTS[step % len(_PARTS)])
    generator = torch.Generator().manual_seed(seed + 1_000_003 * (step + 1))
    drawn = []
    for at in range(max(1, TOKENS_IN_STRETCHES // length)):
        ids = texts[(step + at) % len(texts)]
        start = int(torch.randint(len(ids) - length + 1, (), generator=generator))
        drawn.append(ids[start : start + length])
    return torch.stack(drawn)


def recomputed_layers(model: Any) -> AbstractContextManager[None]:
    """Let decoder layers keep only their inputs, while the context manager is open: gradients compute them again."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return replaced_forwards({layer: partial(checkpoint, layer.forward, use_reentrant=False) for layer in layers})


def _save(file: Path, weights: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, done: int) -> None:
    state = {"done": torch.tensor(done)}
    for at, weight in enumerate(weights):
        state |= {f"weight {at}": weight, **{f"{name} {at}": kept for name, kept in optimizer.state[weight].items()}}
    write_tensors(state, file)


@torch.no_grad()
def _load(file: Path, weights: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Put a kept state into place; return how many steps were done."""
    if not file.is_file():
        return 0
    state = load_file(file)
    for at, weight in enumerate(weights):
        weight.copy_(state[f"weight {at}"])
        optimizer.state[weight] = {
            name: state[f"{name} {at}"].to("cpu" if name == "step" else weight.device)
            for name in ("step", "exp_avg", "exp_avg_sq")
        }
    return int(state["done"])
