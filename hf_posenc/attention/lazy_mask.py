"""A mask that is made when a layer asks: whole for the inner attention, or read as what document each token is of."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_posenc.attention.groups import Groups, make_groups
from hf_posenc.errors import InvalidRequestError


class LazyMask:
    """What Transformers requested of a mask function; the layers of one forward share it.

    Args:
        request: The arguments of a mask function.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.made: dict[Any, Any] = {}

    def whole(self, inner: str) -> Any:
        """Return the mask as an attention implementation wants it."""
        if inner not in self.made:
            self.made[inner] = ALL_MASK_ATTENTION_FUNCTIONS[inner](**self.request)
        return self.made[inner]

    def groups(self, group: int, first: int, device: torch.device) -> Groups:
        """Return the groups of ``group`` slots, the first one of ``first``."""
        key = (group, first, device)
        if key not in self.made:
            self.made[key] = make_groups(self.documents, group, first).to(device)
        return self.made[key]  # type: ignore[no-any-return]  # Transformers leaves masks untyped

    @cached_property
    def documents(self) -> torch.Tensor:
        """A number for each token, int64 ``(batch, length)`` on the CPU: it sees those before it with the same number.

        Padding has numbers of its own. Read from the pattern itself, at a few places of each row: who sees the token
        before it, and whether what lies between two such borders is seen as a whole.

        Raises:
            ValueError: The pattern is another than that of documents.
        """
        request = self.request
        batch, length = request["batch_size"], request["kv_length"]
        if request.get("use_vmap"):
            raise InvalidRequestError(
                "the model adds a pattern of its own to its mask, which groups of tokens would lose."
            )
        of_queries = request.get("cache_position")  # Transformers 5.0
        slots = torch.arange(length, device=request["device"] if of_queries is None else of_queries.device)
        starts_one = torch.ones(batch, length, dtype=torch.bool, device=slots.device)
        starts_one[:, 1:] = ~self._seen(slots[1:], slots[:-1])
        starts = torch.where(starts_one, slots, 0).cummax(1).values
        if not bool(self._seen(slots, starts).all()) or bool(self._seen(slots[:-1], slots[1:]).any()):
            raise InvalidRequestError(
                "the mask of a layer that attends to the whole text has a window, or looks ahead."
            )
        numbers = starts_one.cumsum(1) - 1
        if (real := request.get("attention_mask")) is not None:
            numbers = 2 * numbers + (~real.to(slots.device, torch.bool)).long()
        return numbers.cpu()

    def _seen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether queries see keys, bool ``(batch, pairs)``; slots ``(pairs,)`` or ``(batch, pairs)``."""
        rows = torch.arange(self.request["batch_size"], device=queries.device)[:, None]
        head = torch.zeros((), dtype=torch.long, device=queries.device)
        seen = self.request["mask_function"](rows, head, queries.expand(len(rows), -1), keys.expand(len(rows), -1))
        return torch.as_tensor(seen, device=queries.device).expand(len(rows), queries.shape[-1])


def lazy_mask(*positional: Any, **request: Any) -> LazyMask:
    """Return a mask to be made later; the arguments are Transformers' for a mask function, by name."""
    if positional:
        raise TypeError("a mask function is called with arguments by name.")
    return LazyMask(request)
