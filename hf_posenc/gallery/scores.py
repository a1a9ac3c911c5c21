"""What encodings add to attention, as a function of the distance; and matrices of it by blocks of tokens."""

from __future__ import annotations

import torch

from hf_posenc.methods.encodings.xpos import xpos_decay

# Tokens by which xPos shrinks a pair's logits by its decay once (Sun et al. 2022, arXiv:2212.10554, algorithm 1).
XPOS_SCALE_BASE = 512


def pair_angles(distances: torch.Tensor, num_pairs: int, base: float) -> torch.Tensor:
    """Return radians, float64 ``(*distances.shape, num_pairs)``."""
    frequencies = base ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    return distances.double()[..., None] * frequencies


def rope_score(distances: torch.Tensor, num_pairs: int, base: float = 10000.0) -> torch.Tensor:
    """Return the score of a query and a key that are equal, all pairs of one length, as a share of that at distance 0.

    It is the mean cosine of the pairs' angles. Sinusoidal rows of ``2 * num_pairs`` features have the same dot product.
    """
    return pair_angles(distances, num_pairs, base).cos().mean(-1)


def xpos_score(
    distances: torch.Tensor, num_pairs: int, base: float = 10000.0, scale_base: float = XPOS_SCALE_BASE
) -> torch.Tensor:
    """Return the same of xPos: each pair's cosine has shrunk by its decay.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2, equation 8.
    """
    shrunk = xpos_decay(num_pairs) ** (distances.double()[..., None] / scale_base)
    return (pair_angles(distances, num_pairs, base).cos() * shrunk).mean(-1)


def block_means(values: torch.Tensor, cells: int) -> torch.Tensor:
    """Return the mean over blocks of queries and keys of what depends on their distance alone.

    Args:
        values: At the distances 0, 1, ..., float64 ``(cells * size,)``; a block has ``size`` queries and ``size`` keys.
        cells: Blocks in a row.

    Returns:
        Float64 ``(cells, cells)``, query by key, nan where all keys come after the queries; a block on the diagonal has
        the mean of its pairs of which the key does not.
    """
    size = len(values) // cells
    inside = torch.arange(1 - size, size)
    count = (size - inside.abs()).double()  # pairs of a block that are this much farther apart than its corner
    means = torch.empty(cells, dtype=torch.float64)
    for apart in range(cells):
        distance = apart * size + inside
        seen = count * (distance >= 0)
        means[apart] = (values[distance.clamp(min=0)] * seen).sum() / seen.sum()
    places = torch.arange(cells)
    distance = places[:, None] - places
    return torch.where(distance >= 0, means[distance.clamp(min=0)], torch.nan)
