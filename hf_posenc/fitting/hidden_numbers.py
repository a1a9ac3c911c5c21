"""Numbers hidden in a text of tokens, and the questions that ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError
from hf_posenc.retrieving.tasks.base import vocabulary

_DIGITS = 5
# Sentences that numbers are hidden in: what is fitted, and another for what is measured.
FITTED_ON = "The registration number of {name} is {number}"
MEASURED_BY = "To open the box of the {name}, dial {number}"


@dataclass(frozen=True)
class HiddenNumber:
    """A number in a text.

    Attributes:
        end: Position behind its sentence.
        question: Token ids up to the number.
        answer: Those of the number.
    """

    end: int
    question: list[int]
    answer: list[int]


def hide_numbers(
    tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, count: int, rng: Random, sentence: str = FITTED_ON
) -> tuple[torch.Tensor, list[HiddenNumber]]:
    """Hide numbers at random places of a text, whose length stays the same: as many of its last tokens are dropped.

    Args:
        tokenizer: The model's.
        ids: int64 ``(num_tokens,)``.
        count: How many, with a name each.
        rng: Generator of the numbers, the names and the places.
        sentence: Holds ``{name}``, and ends with ``{number}``.

    Raises:
        ValueError: The text has no room for them.

    Returns:
        The text, int64 ``(num_tokens,)``, and the numbers by rising position.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    words = vocabulary()
    if count > len(words):
        raise InvalidRequestError(f"{count} numbers need as many names, and there are {len(words)}: hide fewer.")
    names = rng.sample(words, count)
    numbers = [str(rng.randint(10 ** (_DIGITS - 1), 10**_DIGITS - 1)) for _ in names]
    sentences = [f"\n{sentence.format(name=name, number=number)}" for name, number in zip(names, numbers, strict=True)]
    written = [tokens(f"{one}.\n") for one in sentences]
    kept = len(ids) - sum(map(len, written))
    if kept < 1:
        raise InvalidRequestError(
            f"{count} numbers take {len(ids) - kept} tokens, and the text has {len(ids)}: hide fewer."
        )
    places = sorted(rng.randrange(kept) for _ in names)
    parts: list[int] = []
    done, hidden = 0, []
    for place, one, ids_of_one, number in zip(places, sentences, written, numbers, strict=True):
        parts += ids[done:place].tolist() + ids_of_one
        done = place
        whole, question = tokens(one), tokens(one.removesuffix(f" {number}"))
        hidden.append(HiddenNumber(len(parts), question, whole[len(question) :]))
    parts += ids[done:kept].tolist()
    return torch.tensor(parts), hidden
