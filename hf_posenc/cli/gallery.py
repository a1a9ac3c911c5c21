"""``hf-posenc gallery``."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.explain.overview import LEAD, gallery_pictures
from hf_posenc.explain.sections import PICTURES, picture_panel, write_page
from hf_posenc.report.page import Panel, Paragraph, check_folder


def run_gallery(output_dir: str) -> list[Path]:
    """Draw the gallery.

    Args:
        output_dir: Gets ``gallery.html`` and each picture as ``.png`` and ``.svg``.

    Returns:
        The files, the page first.

    Raises:
        ValueError: ``output_dir`` is a file.
    """
    check_folder(output_dir, PICTURES)
    lead = Panel("about", "About these pictures", [Paragraph(LEAD.replace("`", ""))])
    panels = [lead, *map(picture_panel, gallery_pictures())]
    return write_page(output_dir, "gallery.html", "Positional encodings in pictures", panels)
