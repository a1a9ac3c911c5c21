"""Blocks of several kinds of data in given shares, in an order that a resumed run repeats."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.mixtures import get_kind, read_shares, words_of
from hf_posenc.training.mixtures.base import Kind, Material
from hf_posenc.training.packing import (
    MaskedTokens,
    PackedDataset,
    Tokens,
    block_of,
    farthest,
    joined,
    warn_about_distances,
)

logger = logging.getLogger(__name__)


class MixedDataset(PackedDataset):
    """The documents of a run, packed, and the kinds of data that are made from them.

    Args:
        packed: The documents as they are.
        tokenizer: The model's.
        documents: The same documents, each on its own.
        config: The run, with ``task_mix``.

    Raises:
        ValueError: A kind does not suit the documents, the tokenizer or the length of a block, or the token budget
            has no step for it.
    """

    def __init__(
        self,
        packed: PackedDataset,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[Tokens],
        config: FinetuneConfig,
    ) -> None:
        vars(self).update(vars(packed))
        self.shares = read_shares(config.task_mix)
        texts = [document for document in documents if not isinstance(document, MaskedTokens)]
        reading = [name for name in self.shares if get_kind(name).reads_texts]
        if reading and len(texts) < len(documents):
            raise InvalidRequestError(
                f"{argument('task_mix')}: {' and '.join(reading)} are made of free text, and "
                f"{len(documents) - len(texts)} of {len(documents)} documents are chats or prompts with answers. Give "
                "texts, or leave these kinds out."
            )
        self._check_budget(config)
        material = Material(tokenizer, texts, packed, config.seed)
        self.kinds: dict[str, Kind] = {name: get_kind(name)(material) for name in self.shares}

    def _check_budget(self, config: FinetuneConfig) -> None:
        per_step = config.tokens_per_step(self.seq_len)
        steps = config.token_budget // per_step
        order = kinds_of_steps(self.shares, math.ceil(1 / min(self.shares.values())))
        last = max(self.shares, key=order.index)
        needed = order.index(last) + 1
        if steps < needed:
            raise InvalidRequestError(
                f"{argument('task_mix')}: every step is of one kind, and no step of {steps} is left for "
                f"{last}={self.shares[last]}: give a {argument('token_budget')} of {needed * per_step} tokens or more, "
                "fewer blocks in a step, or fewer kinds."
            )

    def schedule(self, num_steps: int, blocks_per_step: int, seed: int) -> MixedSchedule:  # type: ignore[override]  # as BlockSchedule for Trainer
        """Return the blocks of a run in the order of training; what is drawn belongs to the run's own seed."""
        return MixedSchedule(self, num_steps, blocks_per_step)

    def fingerprint(self) -> str:
        """Return a short hash of the documents, the shares, and the first block of each kind."""
        digest = hashlib.sha256(" ".join([super().fingerprint(), *words_of(self.shares)]).encode())
        for kind in self.kinds.values():
            for piece in kind.block(0):
                digest.update(piece.ids.numpy().tobytes() + piece.counted.numpy().tobytes())
        return digest.hexdigest()[:16]


class MixedSchedule(Dataset[dict[str, torch.Tensor]]):
    """The blocks of a run in the order of training, every step of one kind.

    In the loss of a step each counted token weighs alike: beside a block of text, whose tokens all count, the few
    tokens of an answer in the same step would hardly change the weights.
    """

    def __init__(self, data: MixedDataset, num_steps: int, blocks_per_step: int) -> None:
        self.data, self.blocks_per_step = data, blocks_per_step
        self.kinds = kinds_of_steps(data.shares, num_steps)
        steps: dict[str, Iterator[int]] = {name: itertools.count() for name in data.shares}
        self._of_kind = [next(steps[name]) for name in self.kinds]  # how many steps of the same kind come before

    def __len__(self) -> int:
        return len(self.kinds) * self.blocks_per_step

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, in_step = divmod(index, self.blocks_per_step)
        kind = self.data.kinds[self.kinds[step]]
        pieces = kind.block(self._of_kind[step] * self.blocks_per_step + in_step)
        return block_of(
            joined(pieces), self.data.positions.of(index, [len(one) for one in pieces], short=kind.is_short)
        )

    def log(self, *, wants_distances: bool, group: int | None) -> None:
        """Say what is trained on, of each kind how much; a warning where hardly any long distance is seen.

        Args:
            wants_distances: The run is to teach longer ones.
            group: Tokens of a group of shifted sparse attention; None for no groups.
        """
        seq_len, original = self.data.seq_len, self.data.positions.original_length
        beyond = 0.0
        for name, steps in Counter(self.kinds).items():
            first = self[self.kinds.index(name) * self.blocks_per_step]
            counted = int((first["labels"] != -100).sum())
            is_beyond = farthest(first["position_ids"], group) >= original
            beyond += steps / len(self.kinds) * is_beyond.double().mean().item()
            logger.info(
                "%s (%g of the tokens): %d steps, %d tokens; of the first block's %d tokens %d count in the loss",
                name,
                self.data.shares[name],
                steps,
                steps * self.blocks_per_step * seq_len,
                seq_len,
                counted,
            )
        if wants_distances:
            warn_about_distances(beyond, original, group)


def kinds_of_steps(shares: Mapping[str, float], num_steps: int) -> list[str]:
    """Return the kind of each step: always the one that is farthest behind its share."""
    found: list[str] = []
    counts = dict.fromkeys(shares, 0)
    for step in range(1, num_steps + 1):
        found.append(max(shares, key=lambda name: shares[name] * step - counts[name]))
        counts[found[-1]] += 1
    return found
