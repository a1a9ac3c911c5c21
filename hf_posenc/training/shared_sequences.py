"""Sequences that several processes share (context parallelism): which blocks suit."""

from __future__ import annotations

import logging

from hf_posenc.errors import InvalidRequestError
from hf_posenc.training.packing import PackedDataset

logger = logging.getLogger(__name__)


class WholeBlocks(PackedDataset):
    """Those blocks of a packed dataset that hold a piece of one document only.

    torch's context parallelism knows no mask but the causal one: accelerate drops the mask that keeps packed documents
    apart (``_attach_context_parallel_hooks``), and tokens would see other documents.

    Args:
        packed: The blocks.

    Raises:
        ValueError: There is no such block.
    """

    def __init__(self, packed: PackedDataset) -> None:
        vars(self).update(vars(packed))
        self.kept = [packed.kept[index] for index in range(len(packed)) if len(packed.pieces(index)) == 1]
        if not self.kept:
            raise InvalidRequestError(
                f"context parallelism cannot keep packed documents apart, and none of the {len(packed)} blocks of "
                f"{packed.seq_len} tokens holds a piece of one document only. Train on documents of at least twice "
                "seq_len, lower seq_len, or launch without context parallelism (--accelerate-config fsdp2)."
            )
        if len(self.kept) < len(packed):
            logger.warning(
                "context parallelism cannot keep packed documents apart: %d of %d blocks, which hold pieces of several "
                "documents, are left out",
                len(packed) - len(self.kept),
                len(packed),
            )
