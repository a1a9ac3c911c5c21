"""The positions of the queries and keys of one forward, read once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hf_posenc.attention.inner import REAL, UNWRITTEN
from hf_posenc.attention.rotation import Tables
from hf_posenc.attention.spans import Spans
from hf_posenc.attention.staged import Stages
from hf_posenc.attention.tiles import Tile
from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Region


@dataclass(frozen=True)
class Layout:
    """Slots and positions of one forward.

    A key slot is its index in the cache (or in the input, without one); its position is what rotates it.

    Attributes:
        first_query: Slot of the first query.
        num_keys: Slots that hold a key; further ones of a static cache are free.
        positions: int64 ``(rows, num_keys)`` on the CPU; one row if all rows of the batch are alike.
        starts: Slot of the first real token, for each row of ``positions``.
        stops: One past the last real token.
        real: bool ``(rows, num_keys)``, False for padding; None if there is none.
    """

    first_query: int
    num_keys: int
    positions: torch.Tensor
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    real: torch.Tensor | None

    @cached_property
    def row_positions(self) -> torch.Tensor:
        """Positions counted from the row's first real token, int64 ``(rows, num_keys)``: tokens before each slot."""
        starts = torch.tensor(self.starts).clamp(max=self.num_keys - 1)  # a row may be nothing but padding
        first = self.positions.gather(1, starts[:, None])[:, 0]
        return (self.positions - first[:, None]).clamp(min=0)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row or document so far."""
        return int(self.row_positions.max()) + 1

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """The position of slot 0 of each row."""
        return tuple(int(position) for position in self.positions[:, 0])

    @cached_property
    def has_gaps(self) -> bool:
        """Whether padding lies between the real tokens of some row."""
        if self.real is None:
            return False
        spans = zip(self.real, self.starts, self.stops, strict=True)
        return not all(bool(row[start:stop].all()) for row, start, stop in spans)

    def has_documents(self) -> bool:
        """Return whether positions start anew somewhere between the real tokens of a row."""
        spans = zip(self.positions, self.starts, self.stops, strict=True)
        return any(bool((row[start:stop].diff() < 0).any()) for row, start, stop in spans)

    @cached_property
    def document_positions(self) -> torch.Tensor:
        """Positions counted from the document's first token, int64 ``(rows, num_keys)``: tokens before each slot."""
        positions = torch.arange(self.num_keys).repeat(len(self.positions), 1)
        for row in range(len(positions)):
            for start, stop in self.documents(row):
                positions[row, start:stop] -= start
        return positions

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Return (first slot, slot past the last) of each document of a row: where positions start anew.

        Raises:
            ValueError: Positions skip some tokens, so that distances in tokens are not those in positions.
        """
        start, stop = self.starts[row], self.stops[row]
        steps = self.positions[row, start + 1 : stop] - self.positions[row, start : stop - 1]
        if bool((steps > 1).any()) or bool((steps == 0).any()):
            raise InvalidRequestError(
                "this rule needs positions that count up by one inside a document; these skip or repeat some. A static "
                "rule such as 'yarn', or 'dynamic_yarn', takes them as they are."
            )
        begins = [start, *((steps < 0).nonzero()[:, 0] + start + 1).tolist()]
        return list(zip(begins, [*begins[1:], stop], strict=True))


def read_layout(position_ids: torch.Tensor, num_slots: int, states: torch.Tensor | None) -> Layout:
    """Read a forward's layout.

    Args:
        position_ids: int64 ``(batch or 1, num_queries)``, of the queries.
        num_slots: Key slots, written or not.
        states: What each holds, ``(batch or 1, num_slots)``; None if every one is a real token.

    Raises:
        ValueError: Positions that do not follow one another, with a KV cache: the positions of its keys are not known.
    """
    queries, num_queries = position_ids.cpu(), position_ids.shape[-1]
    known = None if states is None else states.cpu()
    written = num_slots if known is None else int((known[0] != UNWRITTEN).sum())
    first_query = written - num_queries
    rows = max(len(queries), 1 if known is None else len(known))
    queries = queries.expand(rows, -1)
    real = None if known is None else (known[:, :written] == REAL).expand(rows, -1)
    if real is not None and bool(real.all()):
        real = None
    starts, stops = _real_spans(real, rows, written)
    positions = queries if first_query == 0 else _positions_before(queries, starts, stops, real, written)
    if rows > 1 and real is None and bool((positions == positions[:1]).all()):
        positions, starts, stops = positions[:1], starts[:1], stops[:1]
    return Layout(first_query, written, positions, starts, stops, real)


def _real_spans(real: torch.Tensor | None, rows: int, written: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if real is None:
        return (0,) * rows, (written,) * rows
    slots = [row.nonzero()[:, 0] for row in real]
    return (
        tuple(int(slot[0]) if len(slot) else written for slot in slots),
        tuple(int(slot[-1]) + 1 if len(slot) else written for slot in slots),
    )


def _positions_before(
    queries: torch.Tensor,
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    real: torch.Tensor | None,
    written: int,
) -> torch.Tensor:
    """Return the positions of all slots of a cache: one less for each slot before the row's last real query."""
    first_query = written - queries.shape[-1]
    anchors = torch.tensor([max(stop - 1, first_query) for stop in stops])
    last = queries.gather(1, (anchors - first_query)[:, None])
    positions = last - (anchors[:, None] - torch.arange(written))
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        given = queries[row, max(start - first_query, 0) : max(stop - first_query, 0)]
        follows = torch.equal(given, positions[row, max(start, first_query) : max(stop, first_query)])
        if not follows or (real is not None and not bool(real[row, start:stop].all())):
            raise InvalidRequestError(
                "with a KV cache the tokens of a row must follow one another without gaps (padding belongs at the "
                f"left, position_ids count up by one): row {row} has "
                + ("position_ids " + str(given.tolist()[:8]) if not follows else "padding between its tokens")
                + ". Feed such a row without a cache."
            )
    return positions


@dataclass
class Forward:
    """The data that the layers of one forward share.

    Attributes:
        position_ids: As the layers get them.
        num_slots: Key slots, written or not.
        states: What the key slots hold, as the layers get it.
        layout: All of them, read.
        version: PyTorch's version of ``position_ids``, which an operation in place raises.
        ahead: By the mask (its ``id``), whether it lets a query see a later key.
    """

    position_ids: torch.Tensor
    num_slots: int
    states: torch.Tensor | None
    layout: Layout = field(init=False)
    version: int | None = field(init=False)
    ahead: dict[int, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = read_layout(self.position_ids, self.num_slots, self.states)
        self.version = _version(self.position_ids)

    def is_of(self, position_ids: torch.Tensor, num_slots: int, states: torch.Tensor | None) -> bool:
        """Return whether a layer with these belongs to it."""
        same = self.position_ids is position_ids and self.num_slots == num_slots and self.states is states
        return same and self.version == _version(position_ids)

    def looks_ahead(self, mask: torch.Tensor) -> bool:
        """Return whether a mask lets a query see a later key, as those of images and of prefixes do.

        Args:
            mask: ``(batch or 1, 1, num_queries, num_keys)``, bool or added to the logits.
        """
        if id(mask) not in self.ahead:
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            self.ahead[id(mask)] = bool(seen.triu(self.layout.first_query + 1).any())
        return self.ahead[id(mask)]


@dataclass
class StagedForward(Forward):
    """The data that the layers of one forward share, if queries and keys are rotated further.

    Attributes:
        rule: In which stage a query is; None where the rule has no stages.
        runs: (first slot, slot past the last, stage) of each stretch of real queries in one stage, of each row; empty
            where the rule has no stages.
        tables: cos and sin made so far.
        factors: What multiplies queries, made so far.
        masks: Masks made so far.
        spans: Which keys the queries see of each region that has any, where the rule has regions.
        tiles: The same as tiles, by the first position and one past the last of a document's queries.
    """

    rule: Stages | None
    runs: list[list[tuple[int, int, int]]] = field(init=False)
    tables: dict[Any, Tables] = field(default_factory=dict)
    factors: dict[Any, torch.Tensor | None] = field(default_factory=dict)
    masks: dict[Any, Any] = field(default_factory=dict)
    spans: list[tuple[Region, Spans]] = field(default_factory=list)
    tiles: dict[tuple[int, int], list[list[Tile]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = () if self.rule is None else self.rule.of(self.layout.row_positions)
        self.runs = [_runs(self.layout, of_row, row) for row, of_row in enumerate(stages)]

    def real_on(self, device: torch.device) -> torch.Tensor | None:
        """Return a mask of the real key slots, bool ``(rows, num_keys)``, copied once; None if there is no padding."""
        if self.layout.real is not None and device not in self.masks:
            self.masks[device] = self.layout.real.to(device, non_blocking=True)
        return self.masks.get(device)

    @cached_property
    def row_stages(self) -> tuple[int, ...] | None:
        """The stage of each row's queries; None if those of some row are in more than one."""
        if any(len(runs) > 1 for runs in self.runs):
            return None
        return tuple(runs[0][2] if runs else 0 for runs in self.runs)


def _runs(layout: Layout, stages: torch.Tensor, row: int) -> list[tuple[int, int, int]]:
    begin = max(layout.starts[row], layout.first_query)
    values, counts = torch.unique_consecutive(stages[begin : layout.stops[row]], return_counts=True)
    runs = []
    for stage, count in zip(values.tolist(), counts.tolist(), strict=True):
        runs.append((begin, begin + count, stage))
        begin += count
    return runs


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the positions: one graph break a forward
def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions ``(batch, length)`` of ``(3, batch, length)`` (mrope), alike for a text."""
    if not bool((position_ids == position_ids[:1]).all()):
        raise InvalidRequestError(
            "this rule takes texts alone: positions here have three parts (mrope), which differ, as those of images "
            "do. A static rule such as 'yarn' takes them."
        )
    return position_ids[0]


def written_slots(key: torch.Tensor, value: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut the free slots of a static cache off: those that the last query of no row sees, at the end."""
    seen = dense[:, 0, -1]
    seen = seen if seen.dtype == torch.bool else seen == 0
    stop = int(seen.any(0).nonzero()[-1]) + 1
    return key[:, :, :stop], value[:, :, :stop], dense[..., :stop]
