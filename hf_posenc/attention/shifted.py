"""LongLoRA's shifted sparse attention (Chen et al. 2023, section 3.2), for training: half of the heads attend within
groups of tokens, the other half within groups shifted by half a group.

Where its authors' code rolls the last half-group round to the first, so that the first tokens of a text see the last
ones, here the first half-group and the last are groups of their own. Groups are laid out as rows of another batch, in
which attention is causal and needs no mask: a row that is not full is filled up behind its last token, where no token
of its own looks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_posenc.attention.inner import PREFIX, SHIFTED, inner_attention, piece_mask
from hf_posenc.attention.installation import attention_layers, goes_through_interface, looks_ahead, reads_whole_context
from hf_posenc.attention.self_check import probe
from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.sliding_window import window_of_all_layers


@dataclass(frozen=True)
class Groups:
    """The index of each slot of a batch in the rows of its groups.

    Attributes:
        taken: int64 ``(entries,)``, the slot whose token each entry of the rows holds, counted through the batch.
        back: int64 ``(batch * length,)``, the entry of each slot.
        shapes: (rows, width) of each batch of rows; their entries follow one another.
    """

    taken: torch.Tensor
    back: torch.Tensor
    shapes: tuple[tuple[int, int], ...]

    def to(self, device: torch.device) -> Groups:
        """Return them on a device."""
        return Groups(self.taken.to(device), self.back.to(device), self.shapes)

    def rows(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Return states ``(batch, heads, length, dim)`` in rows: one ``(rows, heads, width, dim)`` for each shape."""
        arranged = states.transpose(1, 2).flatten(0, 1).index_select(0, self.taken)
        parts = torch.split(arranged, [rows * width for rows, width in self.shapes])
        shaped = [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]
        return [part.transpose(1, 2) for part in shaped]

    def slots(self, outputs: Sequence[torch.Tensor], batch: int) -> torch.Tensor:
        """Return outputs ``(rows, width, heads, dim)`` of all shapes where they belong: batch, length, heads, dim."""
        arranged = torch.cat([output.flatten(0, 1) for output in outputs])
        return arranged.index_select(0, self.back).view(batch, -1, *arranged.shape[1:])


def make_groups(documents: torch.Tensor, group: int, first: int) -> Groups:
    """Cut a batch into groups: slots of one row, one document and one stretch of ``group`` slots.

    Groups are padded to a few widths, so that all groups of one width are computed in one call of attention: the
    longest group, its half, its quarter and so on. A group is padded to less than twice its tokens.

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


class LazyMask:
    """A mask made when a layer needs it: whole for the inner attention, or read as the document of each token.

    The layers of one forward share it.

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

        Padding has numbers of its own. Read from the pattern itself, at a few pairs of each row: who sees the token
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


def lazy_mask(**request: Any) -> LazyMask:
    """Return a mask to be made later; the arguments are Transformers' for a mask function, by name."""
    return LazyMask(request)


logger = logging.getLogger(__name__)

INNER = ("sdpa", "eager")
_SHIFT = "_hf_posenc_shift"
_TOKENS = 8  # of the text that is read to see that a model can
_UNSUPPORTED = "shifted sparse attention is not supported for model_type {!r}: {}."


class Shift:
    """The state of a model whose attention is shifted and sparse.

    Attributes:
        group: Tokens of a group.
        inner: The attention implementation in use.
        in_evaluation: Whether layers in evaluation mode attend in groups too, and not to everything.
        grouped: Layers that attended in groups so far.
    """

    def __init__(self, group: int, inner: str) -> None:
        self.group = group
        self.inner = inner
        self.in_evaluation = False
        self.grouped: set[int] = set()

    @contextmanager
    def dry_run(self, group: int) -> Iterator[None]:
        """While open, groups have this many tokens, and those of a model in evaluation mode are the same."""
        before = self.group, self.in_evaluation
        self.group, self.in_evaluation = group, True
        try:
            yield
        finally:
            self.group, self.in_evaluation = before

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        in_groups: bool,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend in groups, or as ever; arguments and result are those of Transformers' attention functions."""
        if not in_groups or not (module.training or self.in_evaluation):
            whole = mask.whole(self.inner) if isinstance(mask, LazyMask) else mask
            return inner_attention(self.inner, module)(module, query, key, value, whole, **kwargs)
        masks = _groupable(mask, query, key, kwargs)
        self.grouped.add(module.layer_idx)  # type: ignore[arg-type]  # an int, which mypy takes for a module
        length = query.shape[2]
        # Half a group further on, but not where one group is all there is: then nothing is to be linked.
        firsts = (self.group, self.group // 2 if length > self.group else self.group)
        # Positions of all queries say nothing of rows of some.
        kwargs = {**kwargs, "position_ids": None}
        outputs = [
            self._half(layer, states, masks.groups(self.group, first, query.device), kwargs)
            for (layer, *states), first in zip(_halves(module, query, key, value), firsts, strict=True)
        ]
        return torch.cat(outputs, dim=2), None

    def _half(
        self, module: nn.Module, states: list[torch.Tensor], groups: Groups, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the output of half of the heads, ``(batch, length, heads, head_dim)``."""
        attend = inner_attention(self.inner, module)
        done = []
        for query, key, value in zip(*(groups.rows(each) for each in states), strict=True):
            mask = piece_mask(self.inner, query.shape[2], query.shape[2], None, query)
            done.append(attend(module, query, key, value, mask, **kwargs)[0])
        return groups.slots(done, len(states[0]))


def _groupable(mask: Any, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> LazyMask:
    """Return the mask, from which groups can be read; refuse a call whose queries and keys cannot be put in groups."""
    if not isinstance(mask, LazyMask):
        raise InvalidRequestError(
            "shifted sparse attention was given a mask of the caller's or of the model's own, whose pattern it "
            "does not know. Pass a mask (batch, length) of padding, position_ids of packed documents, or nothing."
        )
    if query.shape[2] != key.shape[2]:
        raise InvalidRequestError(
            f"shifted sparse attention is for training on whole blocks, and {query.shape[2]} queries came with "
            f"{key.shape[2]} keys. Pass use_cache=False."
        )
    if any(kwargs.get(name) is not None for name in ("position_bias", "s_aux")):
        raise InvalidRequestError(
            "the model adds to its logits, which shifted sparse attention would put at other tokens."
        )
    return mask


def _halves(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[list[Any]]:
    """Yield the layer, queries, keys and values of each half of the heads.

    Where query heads of both halves share a key head, each query head gets keys of its own.
    """
    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    half = heads // 2
    if not half:
        raise InvalidRequestError("it has one attention head, which cannot be halved")
    if half % shared:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        module, shared = copy.copy(module), 1
        module.__dict__["num_key_value_groups"] = 1  # of the copy: what attention functions repeat keys by
    for begin, end in ((0, half), (half, heads)):
        few = slice(begin // shared, end // shared)
        yield [module, query[:, begin:end], key[:, few], value[:, few]]


def shifted_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function that Transformers calls; each attention layer knows whether it is one for groups."""
    if _SHIFT not in module.__dict__:
        raise InvalidRequestError(
            f"{type(module).__name__} was added to the model after its attention was made sparse."
        )
    shift, in_groups = module.__dict__[_SHIFT]
    return shift.attend(module, query, key, value, attention_mask, in_groups, kwargs)  # type: ignore[no-any-return]  # __dict__ holds anything


def check_shiftable(model: Any, group: int) -> None:
    """Refuse what cannot be trained with shifted sparse attention.

    Args:
        model: The model, wrapped or not.
        group: Tokens of a group.

    Raises:
        TypeError, ValueError: The group, or the model; with the reason.
    """
    if isinstance(group, bool) or not isinstance(group, int):
        raise InvalidTypeError(f"group must be a whole number of tokens, got {group!r}.")
    if group < 2:
        raise InvalidRequestError(f"a group of shifted sparse attention needs at least 2 tokens, got {group}.")
    rotary = RotaryModel.of(model)
    config = rotary.text_config
    if reason := _reason_of_implementation(str(config._attn_implementation)) or _reason_of_model(rotary):
        raise InvalidRequestError(_UNSUPPORTED.format(config.model_type, reason))


def _reason_of_implementation(implementation: str) -> str | None:
    if implementation.startswith(SHIFTED):
        return "it is on already"
    if implementation.startswith(PREFIX):
        return (
            "its attention rotates by rules of its own (dynamic, self_extend, dca, rerope, ...), which count on all "
            "keys before a query; extend it by a static rule such as 'yarn' or 'linear'"
        )
    if implementation not in INNER:
        known = " or ".join(map(repr, INNER))
        return f"its attention implementation is {implementation!r}; load it with attn_implementation={known}"
    return None


def _reason_of_model(rotary: RotaryModel) -> str | None:
    layers = attention_layers(rotary.model)
    if not layers or not goes_through_interface(layers[0]):
        return "its attention does not go through Transformers' AttentionInterface"
    if window_of_all_layers(rotary.text_config):
        return "every layer has a sliding window (pass sliding_window='off' when extending it)"
    if looks_ahead(rotary):
        return "its attention looks ahead"
    if any("sinks" in name for layer in layers for name, _ in layer.named_parameters(recurse=False)):
        return "its attention has sinks, learned logits beside those of the keys"
    return None


@contextmanager
def shifted_sparse_attention(model: Any, group: int) -> Iterator[Shift]:
    """While open, a model in training mode attends in groups of tokens, as LongLoRA's shifted sparse attention does.

    Half of the heads attend within groups of ``group`` tokens, the other half within groups shifted by half of it,
    always causally; documents that are packed stay apart. Layers with a sliding window are left alone, and so is a
    model in evaluation mode. A text of one group is attended to as a whole. Attention weights are not given out.

    Args:
        model: The model, wrapped or not, extended by a static rule or not at all; with sdpa or eager attention.
        group: Tokens of a group, 2 at least. LongLoRA takes a quarter of the training length.

    Raises:
        TypeError, ValueError: As ``check_shiftable``'s; or the model's layers do something of their own with masks.
    """
    rotary = RotaryModel(model)
    check_shiftable(rotary, group)
    config = rotary.text_config
    inner = str(config._attn_implementation)
    AttentionInterface.register(SHIFTED + inner, shifted_attention)
    AttentionMaskInterface.register(SHIFTED + inner, lazy_mask)
    shift, layers = Shift(group, inner), attention_layers(rotary.model)
    before = [(each, each._attn_implementation) for each in rotary.text_configs]
    try:
        for layer in layers:
            layer.__dict__[_SHIFT] = (shift, reads_whole_context(layer, config))
        for each, _ in before:
            each._attn_implementation = {"": SHIFTED + inner}  # and not of configs inside it
        _try_out(rotary, shift)
        logger.info(
            "shifted sparse attention: half of the heads in groups of %d tokens, the others %d further on, in %d of %d "
            "layers",
            group,
            group // 2,
            len(shift.grouped) or config.num_hidden_layers,
            config.num_hidden_layers,
        )
        yield shift
    finally:
        for each, implementation in before:
            each._attn_implementation = {"": implementation}
        for layer in layers:
            layer.__dict__.pop(_SHIFT, None)


def shift_of(model: Any) -> Shift | None:
    """Return the state of a model whose attention is shifted and sparse; None if it is not."""
    found = (module.__dict__.get(_SHIFT) for module in RotaryModel.of(model).model.modules())
    return next((each[0] for each in found if each), None)


def _try_out(rotary: RotaryModel, shift: Shift) -> None:
    """Read a few tokens, to see that layers attend in groups; where weights are elsewhere that has to wait."""
    if any(parameter.is_meta or not parameter.numel() for parameter in rotary.model.parameters()):
        return
    reason, cause = "no layer called it", None
    try:
        with shift.dry_run(2):
            probe(rotary.model, _TOKENS)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason, cause = f"its layers do something of their own ({error})", error
    if cause is not None or not shift.grouped:
        raise InvalidRequestError(_UNSUPPORTED.format(rotary.model_type, reason)) from cause
