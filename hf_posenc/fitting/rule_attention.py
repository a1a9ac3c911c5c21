"""Attention under the rule that is being fitted, differentiable in it, over keys and values that were recorded.

Recorded queries and keys come rotated by known frequencies; they are rotated on by the difference to the rule's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from hf_posenc.attention.inner import AttentionCall, Output, inner_name
from hf_posenc.attention.installation import has_positions, layer_kind, text_layers
from hf_posenc.attention.interface import FULL, PASS, attending_by
from hf_posenc.attention.rotation import Rotation, Tables, angles_at
from hf_posenc.evaluation.lm_head import decoder_body
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.recording import Recording
from hf_posenc.fitting.rule import RuleParameters

_PROBE_TOKENS = 8
_PROBE_EPSILONS = 8  # roundings of the last hidden states


def rule_kind(module: nn.Module, rotary: RotaryModel) -> str:
    """Return ``FULL`` for a layer that a static rule extends; layers with a window too, where all share their RoPE."""
    layer = layer_kind(module, rotary.text_config)
    return FULL if layer == PASS and rotary.label is None and has_positions(module) else layer


def extended_layers(rotary: RotaryModel) -> list[nn.Module]:
    """Return the attention layers whose positions are extended."""
    return [layer for layer in text_layers(rotary) if rule_kind(layer, rotary) == FULL]


class RuleAttention:
    """The attention of every layer of an unpatched model while its rule is fitted.

    Attributes:
        recording: What comes before the tokens that are fed; None for nothing.
        start: How many of its tokens come before them.
    """

    def __init__(self, rotary: RotaryModel, rule: RuleParameters, rotation: Rotation) -> None:
        """Make one.

        Args:
            rotary: The model, unpatched.
            rule: What is fitted.
            rotation: How the family rotates.
        """
        self.rule, self.rotation = rule, rotation
        self.inner = inner_name(str(rotary.text_config._attn_implementation))
        self.plain: torch.Tensor = getattr(rotary.rotary_module, f"{rotary.prefix}inv_freq").detach().clone()
        self.recording: Recording | None = None
        self.start = 0
        self.positions: torch.Tensor | None = None
        self.kwargs: dict[int, dict[str, Any]] = {}
        self._tables: dict[Any, Tables] = {}

    def begin(self, recording: Recording | None, start: int, num_tokens: int) -> torch.Tensor:
        """Forget the last step; return the positions of the tokens that are fed next, int64 ``(1, num_tokens)``."""
        self._tables = {}
        self.recording, self.start = recording, start
        self.positions = torch.arange(start, start + num_tokens, device=self.plain.device)[None]
        return self.positions

    @torch.no_grad()
    def note_arguments(self, rotary: RotaryModel) -> None:
        """Run the model on two tokens, to see what each layer's attention is called with, such as its scaling."""
        positions = self.begin(None, 0, 2)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=rotary.device)
        decoder_body(rotary.model)(input_ids=ids, position_ids=positions, use_cache=False)

    def attend(self, call: AttentionCall) -> Output:
        """Attend to the recorded tokens and among those fed; as Transformers' attention functions."""
        query, key, value, kwargs, kind = call.query, call.key, call.value, call.kwargs, call.kind
        index: Any = call.module.layer_idx
        self.kwargs[index] = {name: value for name, value in kwargs.items() if name != "position_ids"}
        count, start = query.shape[2], self.start
        positions = torch.arange(start, start + count, device=query.device)
        if kind == FULL:
            query = self.rotated(query, positions, None, of_queries=True)
            key = self.rotated(key, positions, None)
        if start:
            assert self.recording is not None
            keys, values = (part.to(key) for part in self.recording.layer(index, "keys", "values", stop=start))
            if kind == FULL:
                before = torch.arange(start, device=query.device)
                keys = self.rotated(keys[None], before, self.recording)[0]
            key = torch.cat((keys.expand(len(query), -1, -1, -1), key), dim=2)
            value = torch.cat((values.expand(len(query), -1, -1, -1), value), dim=2)
        seen = None
        if start or kwargs.get("sliding_window"):
            seen = seen_keys(positions, start + count, kwargs)
        return self.call(call._replace(query=query, key=key, value=value, mask=seen)), None

    def replay(self, module: nn.Module, recording: Recording, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's outputs under the rule, and the recorded ones, ``(num_rows, heads, head_dim)`` each.

        Args:
            module: The attention layer.
            recording: Its inputs.
            rows: Which of the recorded queries, int64 ``(num_rows,)``.
        """
        index: Any = module.layer_idx
        positions = recording.query_positions[rows]
        stop = int(positions.max()) + 1
        keys, values, queries, outputs = recording.layer(index, "keys", "values", "queries", "outputs", stop=stop)
        device = self.plain.device
        query = queries[:, rows][None].to(device)
        positions = positions.to(device)
        query = self.rotated(query, positions, recording, of_queries=True)
        slots = torch.arange(stop, device=device)
        key = self.rotated(keys[None].to(device), slots, recording)
        kwargs = self.kwargs[index]
        seen = seen_keys(positions, stop, kwargs)
        output = self.call(AttentionCall(module, query, key, values[None].to(device), seen, kwargs))
        return output[0], outputs[rows].to(device)

    def rotated(
        self, states: torch.Tensor, positions: torch.Tensor, recording: Recording | None, of_queries: bool = False
    ) -> torch.Tensor:
        """Rotate states ``(batch, heads, length, head_dim)`` on, from where they come to where the rule wants them.

        The temperature of the rule is on the queries alone, squared.

        Args:
            states: Queries or keys.
            positions: Theirs, int64 ``(length,)``.
            recording: Where they come from; None for the model itself, which rotates by its plain frequencies.
            of_queries: Whether they are queries.
        """
        is_run = bool((positions.diff() == 1).all())  # tables of drawn queries are not wanted again
        device = positions.device  # layers may be on several
        key = (int(positions[0]), int(positions[-1]), recording is None, of_queries, device)
        if is_run and key in self._tables:
            return self.rotation.rotate(states, self._tables[key])
        come, factor = (self.plain, 1.0) if recording is None else (recording.inv_freq, recording.attention_factor)
        there, here = (angles_at(positions[None], one[None].to(device)) for one in (self.rule.inv_freq(), come))
        wanted = self.rule.attention_factor() ** 2 if of_queries else self.rule.log_factor.new_ones(())
        tables = self.rotation.tables(there - here, wanted[None].to(device) / factor)
        if is_run:
            self._tables[key] = tables
        return self.rotation.rotate(states, tables)

    def call(self, call: AttentionCall) -> torch.Tensor:
        """Attend with a mask ``(num_queries, num_keys)``; ``(batch, num_queries, heads, head_dim)``."""
        query, key, value, seen, kwargs = call.query, call.key, call.value, call.mask, call.kwargs
        # Implementations other than sdpa know sinks and caps of the logits; here only the family's own function does.
        special = any(kwargs.get(name) is not None for name in ("s_aux", "softcap"))
        if self.inner == "eager" or (special and self.inner != "sdpa"):
            if seen is None:
                seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            added = torch.where(seen, zero, torch.finfo(query.dtype).min)[None, None]
            return call._replace(mask=added).by("eager")[0]
        batch, heads, count, dim = query.shape
        groups = heads // key.shape[1]
        if seen is None:
            output = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=kwargs.get("scaling"), enable_gqa=groups > 1
            )
            return output.transpose(1, 2)
        # Queries that share a head's keys are just more queries, so that no key is repeated.
        stacked = query.reshape(batch, heads // groups, groups * count, dim)
        output = scaled_dot_product_attention(
            stacked, key, value, attn_mask=seen.repeat(groups, 1), scale=kwargs.get("scaling")
        )
        return output.reshape(batch, heads, count, -1).transpose(1, 2)


def seen_keys(positions: torch.Tensor, num_keys: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a mask of the keys that queries at ``positions`` may see, bool ``(num_queries, num_keys)``."""
    slots = torch.arange(num_keys, device=positions.device)
    seen = slots <= positions[:, None]
    window = kwargs.get("sliding_window")
    return seen & (slots > positions[:, None] - window) if window else seen


@contextmanager
def rule_attention(model: Any, rule: RuleParameters, rotation: Rotation) -> Iterator[RuleAttention]:
    """While open, an unpatched model attends under a rule that can be differentiated."""
    rotary = RotaryModel.of(model)
    attention = RuleAttention(rotary, rule, rotation)
    with attending_by(rotary.text_configs, _layers(rotary, attention)):
        yield attention


def _layers(rotary: RotaryModel, attention: Any) -> dict[nn.Module, tuple[Any, str]]:
    """Return every attention layer of an unpatched model that reads text, to attend by ``attention``."""
    return {layer: (attention, rule_kind(layer, rotary)) for layer in text_layers(rotary)}


class _OwnValues:
    """Attends from each token to itself alone, and counts the calls of each layer."""

    def __init__(self, inner: str, positions: torch.Tensor) -> None:
        self.inner, self.positions = inner, positions
        self.calls: Counter[int] = Counter()

    def attend(self, call: AttentionCall) -> Output:
        index: Any = call.module.layer_idx
        self.calls[index] += 1
        return call.own_values()


def attends_once(model: Any) -> bool:
    """Return whether each attention layer is called once in a forward, and has an index of its own.

    Args:
        model: Unpatched, in evaluation mode.
    """
    return _read_own_values(RotaryModel.of(model))[1] == 1


def reads_on_from_keys_and_values(model: Any) -> bool:
    """Return whether recorded keys and values are all that a token needs of those before it.

    They are not where layers without attention carry something on (Mamba, linear attention, convolutions), nor where a
    layer attends more than once in a forward, of which one call is recorded.

    Args:
        model: Unpatched, in evaluation mode.
    """
    rotary = RotaryModel.of(model)
    (one, calls), (other, _) = _read_own_values(rotary), _read_own_values(rotary, others_before=True)
    # Experts are computed for several tokens at a time, which may round differently.
    rounding = _PROBE_EPSILONS * max(torch.finfo(rotary.model.dtype).eps, torch.finfo(torch.float32).eps)
    return calls == 1 and bool((one - other).norm() <= rounding * one.norm())


@torch.no_grad()
def _read_own_values(rotary: RotaryModel, others_before: bool = False) -> tuple[torch.Tensor, int]:
    """Return the last hidden state of a token that attends to itself alone, and the most calls for one layer index.

    Args:
        rotary: The model.
        others_before: Whether other tokens are before it.
    """
    positions = torch.arange(_PROBE_TOKENS, device=rotary.device)[None]
    attention = _OwnValues(inner_name(str(rotary.text_config._attn_implementation)), positions)
    ids = positions.flip(1) + _PROBE_TOKENS if others_before else positions + 1  # the last token is the same
    with attending_by(rotary.text_configs, _layers(rotary, attention)):
        output = decoder_body(rotary.model)(input_ids=ids, position_ids=positions, use_cache=False)
    return output.last_hidden_state[0, -1].float(), max(attention.calls.values())
