"""Masks of shifted sparse attention made by hand, [length, length] for each head, and batches of packed documents."""

from __future__ import annotations

import torch

from attention_models import IDS


def seen_by_hand(rows: list[list[int]], group: int, heads: int) -> torch.Tensor:
    """Who sees whom, bool ``(rows, heads, length, length)``: from lists of where stretches and documents begin."""
    length, half = sum(rows[0]), group // 2
    plain = [*range(0, length, group)]
    moved = [0, *range(half, length, group)] if length > group else plain
    before = torch.ones(length, length).tril().bool()

    def together(begins: list[int]) -> torch.Tensor:
        stretch = torch.tensor([sum(begin <= i for begin in begins) for i in range(length)])
        return stretch[:, None] == stretch

    def of_row(lengths: list[int]) -> torch.Tensor:
        same = together([sum(lengths[:i]) for i in range(len(lengths))])
        of_heads = [plain] * (heads // 2) + [moved] * (heads - heads // 2)
        return torch.stack([together(begins) & same & before for begins in of_heads])

    return torch.stack([of_row(lengths) for lengths in rows])


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def ids_of(rows: list[list[int]]) -> torch.Tensor:
    return IDS[0, : len(rows) * sum(rows[0])].view(len(rows), -1)


def as_mask(seen: torch.Tensor, attention: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A mask as Transformers' sdpa and eager take it from a caller."""
    return seen if attention == "sdpa" else torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
