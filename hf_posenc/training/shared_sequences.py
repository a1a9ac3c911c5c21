"""Sequences that several processes share (context parallelism): which blocks suit."""

from __future__ import annotations

import hashlib
import logging

import torch

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
        self.kept = [index for index in range(len(packed)) if len(packed.pieces(index)) == 1]
        if not self.kept:
            raise ValueError(
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

    def __len__(self) -> int:
        return len(self.kept)

    def fingerprint(self) -> str:
        """Return a short hash as of all blocks, and of which of them are kept: it is another order of training."""
        if len(self.kept) == super().__len__():
            return super().fingerprint()
        return hashlib.sha256(f"{super().fingerprint()} {self.kept}".encode()).hexdigest()[:16]

    def where(self, index: int) -> torch.Tensor:
        """Return the places of a block's tokens in the stream, int64 ``(seq_len,)``."""
        return super().where(self.kept[index])
