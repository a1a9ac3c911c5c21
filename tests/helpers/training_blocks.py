"""Blocks of a training run as the tests want them: in the order of the stream, or of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_posenc.data.packing import PackedDocuments
from hf_posenc.data.tokens import Tokens
from hf_posenc.training.blocks import PackedBlocks
from hf_posenc.training.positions import FULL, PositionSchedule


def blocks_of(packed: PackedDocuments) -> list[dict[str, torch.Tensor]]:
    """Return the blocks in the order of the stream, with consecutive positions."""
    blocks = PackedBlocks(packed, PositionSchedule(FULL, packed.seq_len, packed.seq_len), len(packed), seed=0)
    blocks.order = list(range(len(packed)))
    return list(blocks)


def blocks_of_a_run(
    documents: Sequence[Tokens],
    seq_len: int,
    num_blocks: int,
    *,
    eos_token_id: int | None = None,
    positions: PositionSchedule | None = None,
    one_document: bool = False,
    seed: int = 0,
) -> PackedBlocks:
    """Return the blocks that a run with these settings reads, in the order of training."""
    packed = PackedDocuments(documents, seq_len, eos_token_id=eos_token_id, one_document=one_document)
    return PackedBlocks(packed, positions or PositionSchedule(FULL, seq_len, seq_len), num_blocks, seed)
