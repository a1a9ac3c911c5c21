"""xPos: RoPE whose pairs shrink with distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import plain_frequencies
from hf_posenc.methods.encodings.rope import EQUAL_VECTORS, RopeOptions, RopeRotation, pair_angles
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.utils.units import number_name

# What a key itself may come to, as a logarithm, besides the factor of xPos.
_HEADROOM = 5.0


def xpos_decay(num_pairs: int, gamma: float = 0.4) -> torch.Tensor:
    """Return each pair's decay, float64 ``(num_pairs,)``: its logits shrink by this every ``scale_base`` tokens.

    ``(2i / d + gamma) / (1 + gamma)`` of pair i: the fast pairs, first, shrink most.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2 and algorithm 1.
    """
    share = torch.arange(num_pairs, dtype=torch.float64) / num_pairs
    return (share + gamma) / (1 + gamma)


def xpos_score(
    distance: torch.Tensor, num_pairs: int, base: float = 10000.0, scale_base: float = 512.0
) -> torch.Tensor:
    """Return the result of ``rope_score`` for xPos: each pair's cosine has shrunk by its decay.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2, equation 8.
    """
    shrunk = xpos_decay(num_pairs) ** (distance.double()[..., None] / scale_base)
    return (pair_angles(distance, num_pairs, base).cos() * shrunk).mean(-1)


class XposRotation(RopeRotation):
    """RoPE whose pairs also shrink with distance, the fast ones most: ``decay ** (distance / scale_base)``.

    Queries are multiplied by ``decay ** (p / scale_base)`` and keys by its inverse, p counted from the middle of the
    queries: no factor is larger than half their number makes it, and those of earlier keys are below 1.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2 and algorithm 1.
    """

    def __init__(self, model: ModelShape, options: Xpos) -> None:
        super().__init__(model, options)
        self.decay = xpos_decay(self.width // 2)
        self.scale_base = options.scale_base

    def _factors(self, positions: torch.Tensor, middle: torch.Tensor, sign: int) -> torch.Tensor:
        powers = (positions - middle).double()[:, None, :, None] / self.scale_base
        return self.decay.to(positions.device) ** (sign * powers)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = queries.to(query.device), keys.to(query.device)
        middle = (queries.amin(-1, keepdim=True) + queries.amax(-1, keepdim=True)) // 2
        largest = float((queries.amax(-1) - middle[:, 0]).max()) / self.scale_base * -float(self.decay[0].log())
        if largest > math.log(torch.finfo(query.dtype).max) - _HEADROOM:
            raise InvalidRequestError(
                f"xpos over {queries.shape[-1]} tokens at once needs larger numbers than {query.dtype} has. Feed the "
                "text in parts, with a KV cache, or patch with a larger scale_base."
            )
        query = self.rotate(query, queries, self._factors(queries, middle, 1))
        return query, self.rotate(key, keys, self._factors(keys, middle, -1))


@register_method
@dataclass(frozen=True)
class Xpos(RopeOptions):
    """RoPE whose pairs shrink with distance, the fast ones most."""

    name: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "Sun et al. 2022, arXiv:2212.10554, section 3.2"
    summary: ClassVar[str] = "RoPE whose pairs shrink with distance, the fast ones most; for training from scratch."

    scale_base: float = option(512.0, positive, "tokens in which a pair's logits shrink by its decay")

    def module(self, model: ModelShape) -> nn.Module:
        return XposRotation(model, self)

    def numbers(self, model: ModelShape) -> Numbers:
        spec = self.rotary_spec(model.rope, model.head_dim)
        decay = xpos_decay(spec.num_pairs)
        lengths = (spec.original_max_position_embeddings, model.target)
        rows = []
        for pair, tokens in enumerate((2 * math.pi / plain_frequencies(spec)[: spec.rotated_pairs]).tolist()):
            pair_decay = float(decay[pair])
            left = [f"{pair_decay ** (length / self.scale_base):.3g}" for length in lengths]
            rows.append([str(pair), number_name(tokens), f"{pair_decay:.3f}", *left])
        largest = float(decay[0] ** (-model.target / self.scale_base))  # of a small scale_base infinite
        sentences = [
            f"Each pair's part of the score shrinks by its decay once in {self.scale_base:g} tokens: the fastest by "
            f"{float(decay[0]):.3f}, the slowest by {float(decay[-1]):.3f}.",
            f"Keys are multiplied by the inverse: at position {model.target:,} the fastest pair's by {largest:.3g}, "
            "where float16 ends at 65,504 and bfloat16 keeps two to three digits.",
        ]
        heads = ["pair", "wavelength", "decay", f"left after {lengths[0]:,}", f"after {lengths[1]:,}"]
        return Numbers(sentences, heads, rows)

    def position_map(self, model: ModelShape) -> PositionMap:
        spec = self.rotary_spec(model.rope, model.head_dim)
        score = partial(xpos_score, num_pairs=spec.rotated_pairs, base=spec.rope_theta, scale_base=self.scale_base)
        return PositionMap(
            "xPos",
            [("", score)],
            "score, 1 at distance 0",
            EQUAL_VECTORS,
            f"As RoPE, and each pair fades besides, the fast ones most (scale_base {self.scale_base:g}): after some "
            "thousands of tokens the score stays near 0.",
        )
