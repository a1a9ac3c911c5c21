"""LongPPL: perplexity of the tokens that need a long context, found by how much they lose with a short one.

A token is a key token if its log-probability after the whole text before it is more than ``alpha`` above that after a
short context, and is more than ``beta`` in itself. Fang et al. 2024, arXiv:2410.23771; the numbers are those of their
code, PyPI longppl 0.3.0, ``longppl/longppl.py``: alpha 2 nats, beta -2, a short context of 4096 tokens that 1024 tokens
share.

Where ours differs: their evaluator may have another tokenizer and finds stretches of text; here both models read the
same tokens. Over several documents they average each one's perplexity, weighed by its key tokens; here it is one
exp(nats / tokens), as for every other protocol; of one document they are the same. LongCE, their training loss,
weighs all tokens by the gain instead of choosing some; it is not implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.config import KeyTokens, short_step
from hf_posenc.evaluation.documents import hash_tokenizer
from hf_posenc.evaluation.losses import lay_out
from hf_posenc.evaluation.model_facts import model_facts
from hf_posenc.evaluation.windows import Window, grouped

CHOSEN_BY_ITSELF = "the measured model itself"
LossesOf = Callable[..., torch.Tensor]


def short_windows(num_tokens: int, short_context: int) -> list[Window]:
    """Return the windows that give each token past two shares a short context: ``short_context`` tokens, or a bit more.

    A quarter as many tokens share one, as the authors do it. Their first window begins with the text, so its tokens
    gain nothing, and it is left out.
    """
    step = short_step(short_context)
    starts = range(step, num_tokens - short_context, step)
    return [Window(start, min(start + short_context + step, num_tokens), start + short_context) for start in starts]


@dataclass(frozen=True)
class KeyTokenFinder:
    """Losses of a text and its key tokens.

    ``losses_of`` and ``judge`` are ``window_losses`` of the measured and of the choosing model, named ``chosen_by``,
    which may be the same.
    """

    losses_of: LossesOf
    judge: LossesOf
    alpha: float
    beta: float
    short_context: int
    chosen_by: str

    @classmethod
    def of(
        cls, wanted: KeyTokens, losses_of: LossesOf, judges: Sequence[LossesOf], original_length: int | None
    ) -> Self:
        """Make one of what is wanted; ``judges`` has the losses of the choosing model, or is empty."""
        short, chosen_by = wanted.short_tokens(original_length), _describe(wanted.evaluator if judges else None)
        return cls(losses_of, judges[0] if judges else losses_of, wanted.alpha, wanted.beta, short, chosen_by)

    def facts(self, scored: str) -> dict[str, Any]:
        """Return the fields of a record that say how its tokens are chosen, ``scored`` completed by it in words."""
        step = short_step(self.short_context)
        words = (
            f"Key tokens were chosen by {self.chosen_by}: they gain more than {self.alpha:g} nats over a context of "
            f"{self.short_context} to {self.short_context + step - 1} tokens, to a log-probability above {self.beta:g}."
        )
        rule = {"alpha": self.alpha, "beta": self.beta, "short_context": self.short_context, "short_step": step}
        return {"scored": f"{scored} {words}", "key_tokens": {"chosen_by": self.chosen_by, **rule}}

    def find(self, text: torch.Tensor, num_tokens: int, advance: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses float32 ``(num_tokens,)`` of a text's first tokens, NaN where none is needed, and the keys.

        Keys are a bool ``(num_tokens,)``. A token's loss does not depend on what follows it, so the keys of a shorter
        text are the first ones of a longer.
        """
        text = text[:num_tokens]
        losses = self._long(self.losses_of, text, advance)
        long = losses if self.judge is self.losses_of else self._long(self.judge, text, None)
        short = torch.full_like(long, float("nan"))
        for windows in grouped(short_windows(num_tokens, self.short_context)):
            row, placed = lay_out(text, windows, None)
            needed = torch.ones(len(row), dtype=torch.bool)
            of_row = self.judge(row, placed, needed)
            for window, at in zip(windows, placed, strict=True):
                short[window.score_from : window.end] = of_row[at.score_from : at.end]
        return losses, (short - long > self.alpha) & (long < -self.beta)  # false where there is no short one

    def _long(self, losses_of: LossesOf, text: torch.Tensor, advance: Any) -> torch.Tensor:
        needed = torch.zeros(len(text), dtype=torch.bool)
        needed[self.short_context + short_step(self.short_context) :] = True
        return losses_of(text, [Window(0, len(text), 1)], needed, advance=advance)


def load_evaluator(evaluator: str, tokenizer: PreTrainedTokenizerBase, **loading: Any) -> PreTrainedModel:
    """Load the model that chooses key tokens.

    Args:
        evaluator: What ``load_model`` takes.
        tokenizer: Tokenizer of the measured model.
        **loading: As ``load_model`` takes them.

    Raises:
        ValueError: Its tokenizer is another one.
    """
    from hf_posenc.checkpoint.loading import load_model

    model, its_tokenizer = load_model(evaluator, **loading)
    if hash_tokenizer(its_tokenizer) != hash_tokenizer(tokenizer):
        raise InvalidRequestError(
            f"{evaluator!r} has another tokenizer than the measured model, so the tokens it chooses are others. Give "
            "an evaluator of the same family."
        )
    return model


def _describe(evaluator: PreTrainedModel | None) -> str:
    """Name the model that chooses the key tokens, with how it is extended."""
    if evaluator is None:
        return CHOSEN_BY_ITSELF
    facts = model_facts(evaluator, None, 0, "")
    extended = "" if facts["method"] == "none" else f" ({facts['method']} x{facts['factor']:g})"
    return f"{facts['model']}{extended}"
