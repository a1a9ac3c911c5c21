"""The texts on which a rule is fitted, and those that are kept apart to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_posenc.data.tokens import spread, whole_pieces
from hf_posenc.errors import InvalidRequestError, argument


@dataclass(frozen=True)
class Texts:
    """Token ids int64 ``(target,)`` of each text.

    Attributes:
        fitted: What the rule is fitted on.
        held_out: What it is measured on, from other documents, or from behind the fitted part of the only one.
    """

    fitted: list[torch.Tensor]
    held_out: list[torch.Tensor]


def split_texts(ids: Sequence[torch.Tensor], target: int, max_texts: int, held_out: int) -> Texts:
    """Split documents into what is fitted and what is held out.

    Documents are cut into consecutive texts of the target length. Held out are the first texts of the last documents;
    of a single document its last texts.

    Args:
        ids: Token ids of each document.
        target: Tokens of a text.
        max_texts: At most so many are fitted, evenly spread over all that are not held out.
        held_out: How many are held out.

    Raises:
        ValueError: There are not enough of that length, and it says how many tokens are missing; or a text would be
            both.
    """
    texts = _split(ids, target, max_texts, held_out)
    if any(torch.equal(one, other) for one in texts.held_out for other in texts.fitted):
        raise InvalidRequestError(
            "a text that is held out is the same as one that is fitted on, so that the measurement would say nothing "
            "about other texts: a document is given twice. Take it out."
        )
    return texts


def _split(ids: Sequence[torch.Tensor], target: int, max_texts: int, held_out: int) -> Texts:
    documents = [texts for row in ids if (texts := whole_pieces([row], target))]
    if not documents:
        longest = max(len(row) for row in ids)
        raise InvalidRequestError(
            f"a fit for {target} tokens needs documents that have as many, and the longest of the {len(ids)} "
            f"given has {longest}: {target - longest} tokens are missing. Give longer documents, or a shorter "
            f"{argument('context_length')}."
        )
    if not held_out:
        return Texts(spread([text for texts in documents for text in texts], max_texts), [])
    if len(documents) > held_out:
        others = [text for texts in documents[:-held_out] for text in texts]
        return Texts(spread(others, max_texts), [texts[0] for texts in documents[-held_out:]])
    if len(documents) == 1 and len(documents[0]) > held_out:
        [texts] = documents
        return Texts(spread(texts[:-held_out], max_texts), texts[-held_out:])
    have = len(documents)
    raise InvalidRequestError(
        f"{held_out + 1} documents of {target} tokens are needed, one to fit on and {held_out} to measure on, and "
        f"{have} of the {len(ids)} given {'has' if have == 1 else 'have'} as many: "
        f"{_missing(ids, target, held_out)} tokens are missing. Give more, or one document of "
        f"{(1 + held_out) * target} tokens, or {argument('held_out')} 0 to measure none."
    )


def _missing(ids: Sequence[torch.Tensor], target: int, held_out: int) -> int:
    """Return the number of tokens that the documents nearest to the target length lack, all together."""
    lengths = sorted((min(len(row), target) for row in ids), reverse=True)[: held_out + 1]
    return (held_out + 1) * target - sum(lengths)
