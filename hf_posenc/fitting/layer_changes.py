"""Changes of a layer's query and key projections while they are fitted: low-rank ones, and a linear map of each head.

A map can move what a head keeps in one pair of features to another pair, which low-rank changes hardly find. In the end
both are written as low-rank changes alone (LoRA: Hu et al. 2021, arXiv:2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from hf_posenc.fitting.forwards import replaced_forwards

_SAMPLE = 2048  # inputs of a layer, for whose queries and keys the low-rank changes are the best of their rank
_TRAINED_RANK = 16  # of the low-rank changes beside the maps


class _Change:
    """A trained change of one projection: a low-rank one, and then a linear map of each head's outputs.

    Attributes:
        a, b: ``(rank, in_features)`` and ``(out_features, rank)``; those of LoRA, with its beginning.
        maps: ``(heads, head_dim, head_dim)``, added to the outputs; None once they are part of ``a`` and ``b``.
    """

    def __init__(self, linear: nn.Linear, head_dim: int, generator: torch.Generator) -> None:
        self.linear, self.head_dim = linear, head_dim
        weight = linear.weight.detach()
        drawn = torch.rand(_TRAINED_RANK, linear.in_features, generator=generator).to(weight.device)
        self.a = nn.Parameter((2 * drawn - 1) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(weight.new_zeros(linear.out_features, _TRAINED_RANK).float())
        self.maps: torch.Tensor | None
        self.maps = nn.Parameter(weight.new_zeros(linear.out_features // head_dim, head_dim, head_dim).float())
        self._inputs: list[torch.Tensor] = []  # the last ones

    def note(self, states: torch.Tensor) -> None:
        """Keep inputs, for ``reduce``."""
        self._inputs.append(states.flatten(0, -2))
        while sum(map(len, self._inputs[1:])) >= _SAMPLE:
            del self._inputs[0]

    def of(self, states: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs with the change."""
        outputs = outputs + (states.float() @ self.a.T @ self.b.T).to(outputs.dtype)
        if self.maps is None:
            return outputs
        bias = 0 if self.linear.bias is None else self.linear.bias.detach()  # low-rank changes have none
        by_head = (outputs - bias).view(*outputs.shape[:-1], -1, self.head_dim)
        return outputs + torch.einsum("...hi,hij->...hj", by_head, self.maps.to(outputs.dtype)).flatten(-2)

    def reduce(self, rank: int) -> None:
        """Let the low-rank change take the place of the maps too.

        It is the best of its rank for the last inputs: what is changed of the outputs is projected on its first
        principal directions. Each row of A gets the length of those that LoRA begins with.
        """
        assert self.maps is not None
        low_rank = self.b @ self.a
        by_head = (self.linear.weight.float() + low_rank).view(-1, self.head_dim, self.linear.in_features)
        change = low_rank + torch.einsum("hij,hic->hjc", self.maps, by_head).flatten(0, 1)
        outputs = torch.cat(self._inputs).float() @ change.T
        directions = torch.linalg.svd(outputs, full_matrices=False).Vh[:rank]
        rows = directions @ change
        sizes = (math.sqrt(3) * rows.norm(dim=1)).clamp_min(1e-12)
        self.a, self.b, self.maps = nn.Parameter(rows / sizes[:, None]), nn.Parameter(directions.T * sizes), None


class LayerChanges:
    """The changes of the projections of a layer's queries and keys."""

    def __init__(self, module: nn.Module, names: Sequence[str], head_dim: int, generator: torch.Generator) -> None:
        """Make changes that are none yet.

        Args:
            module: The attention layer.
            names: Of the projections, which may hold values too.
            head_dim: How many outputs in a row are of one head.
            generator: Of their beginning.
        """
        self.module = module
        children = {name: child for name, child in module.named_children() if name in names}
        self.by_name = {name: _Change(cast(nn.Linear, child), head_dim, generator) for name, child in children.items()}

    def weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what is trained: the low-rank changes, and the maps."""
        low_rank: list[torch.Tensor] = [weight for change in self.by_name.values() for weight in (change.a, change.b)]
        return low_rank, [change.maps for change in self.by_name.values() if change.maps is not None]

    def reduce(self, rank: int) -> dict[str, torch.Tensor]:
        """Let low-rank changes take the place of all, and return them as PEFT names them."""
        for change in self.by_name.values():
            change.reduce(rank)
        parts = [(f"{name}.lora_", change) for name, change in self.by_name.items()]
        weights = {f"{begin}A.default.weight": change.a.detach() for begin, change in parts}
        return weights | {f"{begin}B.default.weight": change.b.detach() for begin, change in parts}

    def in_place(self, kept: dict[nn.Module, torch.Tensor] | None = None) -> AbstractContextManager[None]:
        """Return a context manager, while which the layer projects with the changes.

        Args:
            kept: Where no queries are asked for: what the unchanged projections made of the longest beginning of a
                text so far, which is the same in every step. A projection of queries alone is then not computed.
        """
        return replaced_forwards(
            {
                linear: partial(self._forward, name, linear, linear.forward, kept)
                for name, linear in self.module.named_children()
                if name in self.by_name or (kept is not None and name == "v_proj")
            }
        )

    def _forward(
        self,
        name: str,
        linear: Any,
        compute: Callable[[torch.Tensor], torch.Tensor],
        kept: dict[nn.Module, torch.Tensor] | None,
        states: torch.Tensor,
    ) -> torch.Tensor:
        if kept is not None and name == "q_proj":
            return states.new_zeros(()).expand(*states.shape[:-1], linear.out_features)
        length, change = states.shape[1], self.by_name.get(name)
        with torch.no_grad():
            if kept is None:
                outputs = compute(states)
            else:
                if linear not in kept or kept[linear].shape[1] < length:
                    kept[linear] = compute(states)
                outputs = kept[linear][:, :length]
        if change is None:
            return outputs
        if kept is None and torch.is_grad_enabled():  # not while an error is measured
            change.note(states)
        return change.of(states, outputs)
