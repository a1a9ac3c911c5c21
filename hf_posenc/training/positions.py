"""The positions of the tokens of a training block: one after the other, skipped apart (PoSE, CREAM), or in windows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.family_data import FULL_ATTENTION
from hf_posenc.methods.base import DistanceMethod
from hf_posenc.methods.registry import methods

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_posenc.training.config import FinetuneConfig

FULL, POSE, CREAM, RANDOM = "full", "pose", "cream", "random"


@dataclass(frozen=True)
class PositionSchedule:
    """How positions run in the blocks of a run. All lengths are in tokens.

    Only positions skip: the text of a block runs on, so that a pass reads each token once and no document need be
    longer than a block. PoSE draws the text of each chunk apart (in later text of the document), and reports that
    running on, its v = 0, makes little difference.

    In each document they start at 0 and rise; which separates the documents. What is drawn belongs to the seed
    and to the block's index in the order of training, so that it is new in every pass, and the same in any number of
    processes and in a resumed run.

    Attributes:
        kind: ``full``, ``pose``, ``cream`` or ``random``.
        original_length: What the model was trained on.
        target_length: What it is extended to; positions stay below.
        chunks: Of a document's part in a block, for ``pose``.
        short_share: Share of the blocks that are read as windows of the original length; 0 to 1.
        seed: Of what is drawn.

    Raises:
        ValueError: Nothing can be skipped, because the target is not longer than the original length.
    """

    kind: str
    original_length: int
    target_length: int
    chunks: int = 2
    short_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind != FULL and self.target_length <= self.original_length:
            raise InvalidRequestError(
                f"position_schedule {self.kind!r} skips positions up to the target, but the target is "
                f"{self.target_length} tokens and the model was trained on {self.original_length}. Raise factor or "
                "context_length, or train with position_schedule 'full'."
            )

    def is_short(self, index: int) -> bool:
        """Return whether a block, by its index in the order of training, is read as short windows; evenly spread."""
        return int((index + 1) * self.short_share) > int(index * self.short_share)

    def of(self, index: int, lengths: Sequence[int], *, short: bool | None = None) -> torch.Tensor:
        """Return the positions of a block.

        Args:
            index: In the order of training.
            lengths: Of the documents, or parts of documents, in it.
            short: Whether it is read as short windows; None: as ``short_share`` says.

        Returns:
            int64 ``(sum of lengths,)``.
        """
        return torch.cat(list(self._documents(index, lengths, self.is_short(index) if short is None else short)))

    def _documents(self, index: int, lengths: Sequence[int], short: bool) -> Iterator[torch.Tensor]:
        generator = _generator(self.seed, index)
        for length in lengths:
            if short:
                yield torch.arange(length) % self.original_length
            elif self.kind == POSE:
                yield pose_positions(length, self.target_length, self.chunks, generator)
            elif self.kind == CREAM:
                yield cream_positions(length, self.target_length, self.original_length, generator)
            elif self.kind == RANDOM:
                yield random_positions(length, self.target_length, generator)
            else:
                yield torch.arange(length)


def pose_positions(length: int, target: int, chunks: int, generator: torch.Generator) -> torch.Tensor:
    """Draw positions that run on inside each chunk and skip between chunks.

    A chunk's skipping bias lies between that of the chunk before and ``target - length``, all alike likely, as in the
    paper. Of two chunks the first is at most half as long as both, as in the authors' code (``train_pose.py``): more
    tokens come after the skip than before it. Of N, the last has at least an Nth.

    Args:
        length: Tokens of the document's part, at most ``target``.
        target: Positions stay below.
        chunks: How many; a token each where there are fewer tokens.
        generator: What it is drawn from.

    Returns:
        int64 ``(length,)``, from 0, strictly rising, below ``target``.

    Reference: Zhu et al. 2023, arXiv:2309.10400, section 3.2.
    """
    chunks = min(chunks, length)
    borders = torch.randperm(length - length // chunks, generator=generator)[: chunks - 1].sort().values + 1
    positions = torch.arange(length)
    bias = 0
    for border in borders.tolist():
        more = int(torch.randint(target - length - bias + 1, (), generator=generator))
        positions[border:] += more
        bias += more
    return positions


# CREAM: the mean and deviation of its truncated Gaussian at factor 8, the one its code has the numbers for, are 9 and 3
# of the half steps from 2 to 16: the middle of the range, and 3/7 of half of it.
_CREAM_DEVIATION = 3 / 7
_CREAM_END = 4  # tokens of head and tail for each time that the target is the original length


def cream_positions(length: int, target: int, original: int, generator: torch.Generator) -> torch.Tensor:
    """Draw positions of a head at the beginning, a tail at the end of the target, and a middle between them.

    Head and tail have a third of the tokens each, which shows many distances between the three (relativity), or four
    tokens each for every time that the target is the original length, which leaves a long middle that runs on
    (continuity); each of the two in half of the cases. Where the middle lies is drawn in two steps: a length
    from ``length`` to ``target`` by a truncated Gaussian around their mean, then a position alike likely within
    what that length has room for.

    Args:
        length: Tokens of the document's part, at most ``target``.
        target: Positions stay below.
        original: Tokens the model was trained on.
        generator: What it is drawn from.

    Returns:
        int64 ``(length,)``, from 0, strictly rising, below ``target``.

    Reference: Wu et al. 2024, arXiv:2406.07138, section 2, and ``src/train.py`` of its code, which draws the length in
        half steps of ``length``, and takes the same one of the two kinds of head and tail for a whole batch.
    """
    third = length // 3
    is_continuous = bool(torch.randint(2, (), generator=generator))
    end = min(third, max(1, _CREAM_END * target // original)) if is_continuous else third
    positions = torch.arange(length)
    if end == 0:  # too short for three parts
        return positions
    factor = target / length
    low, high = torch.special.ndtr(torch.tensor([-1.0, 1.0], dtype=torch.float64) / _CREAM_DEVIATION)
    drawn = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)
    within = float(torch.special.ndtri(drawn)) * _CREAM_DEVIATION  # -1 to 1
    times = min(max((1 + factor) / 2 + within * (factor - 1) / 2, 1.0), factor)
    middle = length - 2 * end
    first_end, last_end = int(end + (middle - 1) * times), int(times * length) - end - 1
    more = int(torch.randint(first_end, max(last_end, first_end) + 1, (), generator=generator)) - (end + middle - 1)
    positions[end:] += more
    positions[-end:] = torch.arange(target - end, target)
    return positions


def random_positions(length: int, target: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``length`` different positions below ``target``, in order.

    The first is 0, where published code draws it too: a rotary embedding sees differences only.

    Reference: RandPos in Zhu et al. 2023, arXiv:2309.10400, section 4; after Ruoss et al. 2023, arXiv:2305.16843.
    """
    drawn = torch.randperm(target - 1, generator=generator)[: length - 1].sort().values + 1
    return torch.cat([drawn.new_zeros(1), drawn])


def _generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.sha256(f"positions {seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def check_rule(kind: str, method: str | None) -> None:
    """Refuse to skip positions under a rule that counts tokens.

    Args:
        kind: Of a ``PositionSchedule``.
        method: Name of the model's rule; None if it is not known yet.

    Raises:
        ValueError: The two cannot go together.
    """
    if kind != FULL and method in methods() and issubclass(methods()[method], DistanceMethod):
        raise InvalidRequestError(
            f"position_schedule {kind!r} skips positions, and {method!r} counts distances in tokens: the two cannot be "
            "trained together. Take position_schedule 'full', or a rule that reads positions as they are, such as "
            "'yarn' or 'dynamic_yarn'."
        )


def make_position_schedule(
    config: FinetuneConfig, description: dict[str, Any], window: int | None = None
) -> PositionSchedule:
    """Return the schedule of a run.

    Args:
        config: The run.
        description: What ``hf_posenc.patching.api.describe`` says of the extended model.
        window: The sliding window that every layer has, in tokens; None if some layer reads everything.

    Raises:
        ValueError: The schedule does not suit the model's rule, its lengths or the length of a block.
    """
    original, target = description["original_max_position_embeddings"], description["context_length"]
    kind = config.position_schedule
    check_rule(kind, description["method"])
    if kind != FULL and window is not None and window < target:
        raise InvalidRequestError(
            f"position_schedule {kind!r} skips positions, and every layer has a sliding window of {window} tokens: "
            "what comes before a longer skip would never be seen. Take position_schedule 'full', or sliding_window "
            "'off'."
        )
    schedule = PositionSchedule(kind, original, target, config.pose_chunks, config.short_share, config.seed)
    seq_len = block_length(config, schedule)
    if seq_len > target:
        raise InvalidRequestError(
            f"{argument('seq_len')} {seq_len} is longer than the target length, {target} tokens: the model would be "
            "trained past what it is extended to. Give at most the target, or raise factor or context_length."
        )
    if kind != FULL and seq_len == target:
        raise InvalidRequestError(
            f"position_schedule {kind!r} has nothing to skip in blocks of seq_len {seq_len}, the target length. Leave "
            f"seq_len out for the original length, {original} tokens, or take position_schedule 'full'."
        )
    if kind == POSE and config.pose_chunks > seq_len:
        raise InvalidRequestError(f"pose_chunks must be at most seq_len, {seq_len} tokens, got {config.pose_chunks}.")
    return schedule


def block_length(config: FinetuneConfig, schedule: PositionSchedule) -> int:
    """Return the tokens of a block, for the lengths of a schedule."""
    return config.tokens_per_block(schedule.original_length, schedule.target_length)


@contextmanager
def documents_start_at_zero(config: PreTrainedConfig, *, one_document: bool = False) -> Iterator[None]:
    """While open, Transformers' masks take a new document to begin where positions fall, not where they skip.

    Its masks begin one at every position that is not the last plus one, and would keep PoSE's chunks apart. All else is
    Transformers' own: windows are measured in positions, so a layer with a window does not see past it, as it will not
    at the real length (in tokens by FlashAttention, which knows no positions, and by Transformers 5.0).

    Args:
        config: The model's text config.
        one_document: Take each row for one document without looking at its positions, as where they have no values (on
            the meta device, and while operations are traced).
    """
    from transformers import masking_utils  # brings torch's compiler, which `finetune --help` would wait for

    theirs = masking_utils.find_packed_sequence_indices
    find = partial(find_documents, skips_matter=has_windows(config))
    masking_utils.find_packed_sequence_indices = (lambda position_ids: None) if one_document else find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = theirs


def find_documents(position_ids: torch.Tensor, *, skips_matter: bool) -> torch.Tensor | None:
    """Return the number of each token's document in its row, int64 like ``position_ids`` ``(batch, length)``.

    None where a plainly causal mask will do, which saves making one: every row is one document, without skips if those
    matter to a window.
    """
    from transformers.utils.import_utils import is_tracing

    steps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1)
    if not is_tracing(steps) and bool(((steps == 1) if skips_matter else (steps > 0)).all()):
        return None
    return (steps <= 0).cumsum(-1)


# Their decoders (Transformers 5.23) leave position_ids out when they make masks, so that packed documents would see
# each other. They take finished masks: one, or one for each kind of layer.
_TAKES_ONE_MASK, _TAKES_A_MASK_PER_KIND = ("falcon",), ("gpt_oss",)


def finished_masks(config: PreTrainedConfig, embedded: torch.Tensor, position_ids: torch.Tensor | None) -> Any:
    """Return what to pass as ``attention_mask``, that keeps documents apart; None where the decoder does that itself.

    Transformers' own masks, for the attention implementation in use.

    Args:
        config: The model's text config.
        embedded: Of a batch's shape ``(batch, length, any)``, its dtype that of the masks.
        position_ids: ``(batch, length)``.
    """
    from transformers import masking_utils

    given: dict[str, Any] = {"config": config, "inputs_embeds": embedded, "position_ids": position_ids}
    given |= {"attention_mask": None, "past_key_values": None}
    if "cache_position" in inspect.signature(masking_utils.create_causal_mask).parameters:  # Transformers 5.0
        order = torch.arange(embedded.shape[1], device=embedded.device)
        given |= {"input_embeds": given.pop("inputs_embeds"), "cache_position": order}
    if position_ids is None or getattr(config, "alibi", False):  # alibi makes its bias of the mask
        return None
    if config.model_type in _TAKES_ONE_MASK:
        return masking_utils.create_causal_mask(**given)
    if config.model_type in _TAKES_A_MASK_PER_KIND:
        return {
            "full_attention": masking_utils.create_causal_mask(**given),
            "sliding_attention": masking_utils.create_sliding_window_causal_mask(**given),
        }
    return None


def has_windows(config: PreTrainedConfig) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return any(sizes) or not kinds <= FULL_ATTENTION
