"""Attention that rotates queries and keys further, then calls the model's own attention implementation.

The rotary module does what it always did: queries and keys come rotated by the plain frequencies, and so the KV cache
holds them. Up to the original length there is nothing to add. Past it, all that a piece of attention needs is rotated
on by the difference between the rule's angle and the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from hf_posenc.attention.footprint import KEPT_COSINES
from hf_posenc.attention.inner import UNWRITTEN, AttentionCall, Output, inner_attention, piece_mask
from hf_posenc.attention.interface import PASS, PositionalAttention, split_mask
from hf_posenc.attention.layout import StagedForward, written_slots
from hf_posenc.attention.pieces import Pieces
from hf_posenc.attention.regional import attend_by_distance
from hf_posenc.attention.rotation import ROTATIONS, RotatedKeys, Rotation, Tables, angles_at
from hf_posenc.attention.staged import Stages
from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import DistanceMethod, Extension, StagedMethod
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.warning import warn_user


class RotatingAttention(PositionalAttention[StagedForward]):
    """A rule by which queries and keys are rotated further, and what a forward's layers share."""

    def __init__(
        self, extension: Extension, inner: str, plain: torch.Tensor, rotation: Rotation = ROTATIONS[0]
    ) -> None:
        """Make one.

        Args:
            extension: The rule, of stages or of distances.
            inner: The attention implementation that was in use.
            plain: The model's own float32 ``inv_freq``, by which queries and keys come rotated.
            rotation: How the family rotates.
        """
        super().__init__(inner)
        assert isinstance(extension.method, (StagedMethod, DistanceMethod)), extension.method
        self.spec, self.method = extension.spec, extension.method
        self._read_rule()
        self.plain = plain.detach().clone()
        self.rotation = rotation
        self.rotated = RotatedKeys()
        self.warned = False
        # Each layer's kind, queries and keys as they come, while patch_model looks at them.
        self.seen: list[tuple[str, torch.Tensor, torch.Tensor]] | None = None

    def _read_rule(self) -> None:
        """Make of the method what is looked up in every forward: one of the two, by its kind."""
        spec, method = self.spec, self.method
        self.stages = Stages(spec, method) if isinstance(method, StagedMethod) else None
        self.distances = method.regions(spec) if isinstance(method, DistanceMethod) else None

    @contextmanager
    def following(self, method: StagedMethod | DistanceMethod, spec: RopeSpec) -> Iterator[None]:
        """While open, attend by another rule than the one that the model is extended by."""
        kept = self.method, self.spec
        try:
            self.method, self.spec = method, spec
            self._read_rule()
            yield
        finally:
            self.method, self.spec = kept
            self._read_rule()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "stages": None, "distances": None}  # of functions made on the spot

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read_rule()

    # ---- once per forward ----

    def begin(self) -> None:
        """Forget what the layers of a forward shared, and keys rotated for another cache."""
        super().begin()
        if self.cache is not None:
            self.rotated.check(self.cache)

    def look_at(self, position_ids: torch.Tensor, num_slots: int, states: torch.Tensor | None) -> StagedForward:
        staged = StagedForward(position_ids, num_slots, states, self.stages)
        self._warn_past_target(staged.layout.longest)
        return staged

    def _warn_past_target(self, length: int) -> None:
        target = round(self.method.factor * self.spec.original_max_position_embeddings)
        if length > target and not self.warned:
            self.warned = True
            warn_user(
                f"{length} tokens, and {self.method.name} was requested for {target}: the method continues beyond it."
            )

    def frequencies(self, stage: int, device: torch.device) -> tuple[torch.Tensor, float]:
        """Return float32 ``inv_freq`` and the attention factor of a stage."""
        if stage == 0 or self.stages is None:
            return self.plain.to(device), 1.0
        inv_freq, attention_factor = self.stages.frequencies(stage)
        return inv_freq.float().to(device, non_blocking=True), attention_factor

    def tables(
        self,
        forward: StagedForward,
        stages: tuple[int, ...],
        start: int,
        stop: int,
        device: torch.device,
        of_queries: bool,
    ) -> Tables:
        """Return the cos and sin that rotate a range of slots further, each row to its stage.

        The temperature is in the tables of queries, squared, and not in those of keys: pairs that rotate as before are
        then left alone, bit for bit.
        """
        key = (stages, start, stop, device, of_queries)
        if key not in forward.tables:
            positions = forward.layout.positions[:, start:stop].to(device, non_blocking=True)
            frequencies = [self.frequencies(stage, device) for stage in stages]
            inv_freq = torch.stack([inv_freq for inv_freq, _ in frequencies])
            factors = torch.tensor([factor**2 if of_queries else 1.0 for _, factor in frequencies])
            factors = factors.to(device, non_blocking=True)
            tables = self.rotation_tables(positions, positions, inv_freq, factors)
            if sum(cos.numel() for cos, _ in (*forward.tables.values(), tables)) > KEPT_COSINES:
                return tables
            forward.tables[key] = tables
        return forward.tables[key]

    def rotation_tables(
        self,
        positions: torch.Tensor,
        to_positions: torch.Tensor,
        inv_freq: torch.Tensor,
        factors: torch.Tensor,
    ) -> Tables:
        """Return the cos and sin that rotate states from where the model rotated them to where a rule wants them.

        Args:
            positions: ``(rows, length)``, by which the model rotated, at its plain frequencies.
            to_positions: ``(rows, length)``, by which the rule rotates; may be fractions.
            inv_freq: float32 ``(rows, rotary_dim // 2)``, at these frequencies.
            factors: What multiplies the states, float32 ``(rows,)``.
        """
        plain = angles_at(positions, self.plain.to(positions.device)[None])
        return self.rotation.tables(angles_at(to_positions, inv_freq) - plain, factors)

    # ---- once per layer ----

    def attend(self, call: AttentionCall) -> Output:
        """Attend as the rule says; the result is that of Transformers' attention functions."""
        states, dense = split_mask(call.mask)
        if self.seen is not None:
            self.seen.append((call.kind, call.query, call.key))
            return call.own_values()  # how one layer rotates must not be felt in the next
        is_step = call.query.shape[2] == 1 and dense is None and not self.method.log_n
        if torch.compiler.is_compiling() and is_step and self.stages is not None:
            return self._compiled_step(self.stages, call, states)
        return self._attend(call, states, dense)  # type: ignore[no-any-return]  # the decorator leaves it untyped

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # which pieces there are depends on positions: one graph break a layer
    def _attend(self, call: AttentionCall, states: torch.Tensor | None, dense: torch.Tensor | None) -> Output:
        key, value = call.key, call.value
        if dense is not None and isinstance(self.cache_layer(call.module), StaticLayer):
            key, value, dense = written_slots(key, value, dense)
        forward = self.read(call.kwargs["position_ids"], key.shape[2], states)
        pieces = Pieces(self, forward, call._replace(key=key, value=value, mask=dense))
        if call.kind == PASS:
            return pieces.untouched()
        plain_until = self.method.plain_until(self.spec)
        if dense is not None and forward.layout.longest > plain_until and forward.looks_ahead(dense):
            raise InvalidRequestError(
                f"the attention mask lets tokens see later ones, as those of an image or of a prefix do, and method "
                f"{self.method.name!r} has no rule for later tokens past {plain_until} tokens. A static method "
                "such as 'yarn' takes them."
            )
        if self.distances is not None:
            return attend_by_distance(pieces, self.distances)
        return pieces.by_stage() if forward.row_stages is None else pieces.whole(forward.row_stages)

    def _compiled_step(self, rule: Stages, call: AttentionCall, states: torch.Tensor | None) -> Output:
        """One token in tensor operations alone, nothing read back: no graph break, no recompilation per token."""
        query, key = call.query, call.key
        num_slots, device = key.shape[2], key.device
        if states is None:
            states = torch.ones(1, num_slots, dtype=torch.int8, device=device)
        if call.kind != PASS:
            slots = torch.arange(num_slots, device=device)
            last = (states != UNWRITTEN).sum(-1, keepdim=True) - 1
            position = call.kwargs["position_ids"][:, -1:]
            positions = position - last + slots
            first = (states > 0).to(torch.int64).argmax(-1, keepdim=True)
            row_position = position - positions.gather(1, first.expand(positions.shape[0], 1))
            ends = rule.ends(num_slots)
            stage = torch.bucketize(row_position[:, 0], torch.tensor(ends, device=device), right=True)
            frequencies = [self.frequencies(index, device) for index in range(len(ends) + 1)]
            inv_freq = torch.stack([inv_freq for inv_freq, _ in frequencies])[stage]
            factors = torch.tensor([factor**2 for _, factor in frequencies], device=device)[stage]
            ones = torch.ones_like(factors)
            key = self.rotation.rotate(key, self.rotation_tables(positions, positions, inv_freq, ones))
            query = self.rotation.rotate(query, self.rotation_tables(position, position, inv_freq, factors))
        mask = (
            (states > 0)[:, None, None, :]
            if self.inner == "sdpa"
            else piece_mask(self.inner, 1, num_slots, states > 0, query)
        )
        module = call.module  # torch.compile of PyTorch 2.7 knows no _replace
        return inner_attention(self.inner, module)(module, query, key, call.value, mask, **call.kwargs)
