"""Groups of a batch's tokens that see each other and no others, laid out as rows of another batch.

In that batch attention is causal and needs no mask: a row that is not full is filled up behind its last token, where
no token of its own looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Groups:
    """The index of each slot of a batch in the rows of its groups.

    Attributes:
        taken: int64 ``(places,)``, the slot each place takes its token from, counted through the batch.
        back: int64 ``(batch * length,)``, the place of each slot.
        shapes: (rows, width) of each batch of rows; their places follow one another.
    """

    taken: torch.Tensor
    back: torch.Tensor
    shapes: tuple[tuple[int, int], ...]

    def to(self, device: torch.device) -> Groups:
        """Return them on a device."""
        return Groups(self.taken.to(device), self.back.to(device), self.shapes)

    def rows(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Return states ``(batch, heads, length, dim)`` in rows: one ``(rows, heads, width, dim)`` for each shape."""
        placed = states.transpose(1, 2).flatten(0, 1).index_select(0, self.taken)
        parts = torch.split(placed, [rows * width for rows, width in self.shapes])
        shaped = [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]
        return [part.transpose(1, 2) for part in shaped]

    def slots(self, outputs: Sequence[torch.Tensor], batch: int) -> torch.Tensor:
        """Return outputs ``(rows, width, heads, dim)`` of all shapes where they belong: batch, length, heads, dim."""
        placed = torch.cat([output.flatten(0, 1) for output in outputs])
        return placed.index_select(0, self.back).view(batch, -1, *placed.shape[1:])


def make_groups(documents: torch.Tensor, group: int, first: int) -> Groups:
    """Cut a batch into groups: slots of one row, one document and one stretch of ``group`` slots.

    Rows of equal width are attended to in one call. Widths are halves of the longest group, halves of those and so on,
    so that however many lengths documents leave there are few calls, and no row is filled to more than twice its
    tokens.

    Args:
        documents: int64 ``(batch, length)`` on the CPU; a token sees those before it that have its number.
        group: Slots of a stretch.
        first: Slots of the first stretch, 1 to ``group``; the last has what remains.
    """
    batch, length = documents.shape
    stretch = torch.arange(length).add(group - first).div(group, rounding_mode="floor")
    row = torch.arange(batch)[:, None]
    labels = ((row * (length + 1) + stretch) * (int(documents.max()) + 1) + documents).flatten()
    order = labels.argsort(stable=True)
    begins = torch.cat([order.new_zeros(1), labels[order].diff().nonzero()[:, 0] + 1])
    counts = begins.diff(append=order.new_tensor([batch * length]))
    widths = _widths(int(counts.max()))
    sizes = torch.bucketize(counts, torch.tensor(widths))
    taken, shapes, back, done = [], [], torch.empty_like(order), 0
    for index, width in enumerate(widths):
        begin, count = begins[sizes == index], counts[sizes == index]
        if not len(begin):
            continue
        inside = torch.arange(width)
        is_token = inside < count[:, None]
        slots = order[begin[:, None] + torch.where(is_token, inside, 0)]
        back[slots[is_token]] = done + is_token.flatten().nonzero()[:, 0]
        taken.append(slots.flatten())
        shapes.append((len(begin), width))
        done += slots.numel()
    return Groups(torch.cat(taken), back, tuple(shapes))


def _widths(longest: int) -> list[int]:
    widths = [longest]
    while widths[0] > 1:
        widths.insert(0, -(-widths[0] // 2))
    return widths
