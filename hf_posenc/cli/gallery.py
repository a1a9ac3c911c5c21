"""``hf-posenc gallery``."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.gallery.canvas import Picture
from hf_posenc.gallery.curves import curves
from hf_posenc.gallery.maps import ENCODINGS, Shape, draw_maps
from hf_posenc.gallery.pages import check_output_folder, picture_panel, write_page
from hf_posenc.gallery.spirals import draw_dials, draw_spirals
from hf_posenc.gallery.stretching import rule_pictures
from hf_posenc.gallery.tables import draw_alibi_bias, draw_alibi_slopes, draw_sinusoidal_table, draw_t5_buckets
from hf_posenc.gallery.told import draw_told, draw_told_maps
from hf_posenc.methods.registry import make_method
from hf_posenc.report.pieces import Panel
from hf_posenc.spec import RopeSpec

# Llama 2's heads, which the papers on longer contexts extend.
LLAMA_2 = RopeSpec(rotary_dim=128, rope_theta=10000.0, original_max_position_embeddings=4096)
FACTOR = 4.0
_TOLD = ("self_extend", "dca", "rerope", "leaky_rerope")
_LEAD = (
    "What positional encodings look like, and what the rules that stretch RoPE do to it. Rotary pictures are of heads "
    "of 128 features at base 10000, trained on 4,096 tokens (Llama 2's) and extended to 16,384; biases are of 8 heads. "
    "`hf-posenc explain NAME --model MODEL --output-dir FOLDER` draws them for a model of yours."
)


def gallery_pictures() -> list[Picture]:
    """Return all pictures of the gallery, in order."""
    shape = Shape(num_pairs=LLAMA_2.num_pairs, base=LLAMA_2.rope_theta)
    target = round(FACTOR * LLAMA_2.original_max_position_embeddings)
    told = [(name, make_method(name, FACTOR)) for name in _TOLD]
    found = [
        *rule_pictures(LLAMA_2, FACTOR),
        draw_dials(LLAMA_2, target),
        draw_spirals(LLAMA_2),
        *curves(shape),
        draw_told(LLAMA_2, told, target),
        draw_told_maps(LLAMA_2, told, target),
        *(draw_maps(name, shape) for name in ENCODINGS),
        draw_alibi_bias(shape),
        draw_alibi_slopes(),
        draw_t5_buckets(shape),
        draw_sinusoidal_table(shape),
    ]
    return [picture for picture in found if picture is not None]


def run_gallery(output_dir: str) -> list[Path]:
    """Draw the gallery.

    Args:
        output_dir: Gets ``gallery.html`` and each picture as ``.png`` and ``.svg``.

    Returns:
        The files, the page first.

    Raises:
        ValueError: ``output_dir`` is a file.
    """
    check_output_folder(output_dir)
    lead = Panel("about", "About these pictures", f"<p>{_LEAD.replace('`', '')}</p>", _LEAD)
    panels = [lead, *map(picture_panel, gallery_pictures())]
    return write_page(output_dir, "gallery.html", "Positional encodings in pictures", panels)
