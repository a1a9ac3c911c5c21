"""The keys that Transformers reads of each ``rope_type`` besides those of ``Method.rope_keys``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeType:
    """The way in which Transformers reads one ``rope_type``.

    Attributes:
        needed_keys: Keys that it cannot do without.
        reads_original: It reads ``original_max_position_embeddings`` there.
        reads_head_dim: It reads ``config.head_dim`` itself, and so fails where that is None.
    """

    needed_keys: tuple[str, ...] = ()
    reads_original: bool = False
    reads_head_dim: bool = False


# Transformers 5.23, modeling_rope_utils.py.
_ROPE_TYPES = {
    "linear": RopeType(("factor",)),
    "dynamic": RopeType(("factor",), reads_head_dim=True),
    "yarn": RopeType(("factor",), reads_original=True, reads_head_dim=True),
    "llama3": RopeType(("factor", "low_freq_factor", "high_freq_factor"), reads_original=True),
    "longrope": RopeType(("short_factor", "long_factor"), reads_original=True, reads_head_dim=True),
}


def rope_type_of(name: str | None) -> RopeType:
    """Return the way in which a ``rope_type`` is read; an unknown one is read as one that needs nothing."""
    return _ROPE_TYPES.get(str(name), RopeType())
