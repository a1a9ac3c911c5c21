"""``hf-posenc gallery``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_posenc.cli.shared_arguments import parse
from hf_posenc.utils.files import writable_folder


@dataclass
class GalleryArguments:
    """Where the gallery goes."""

    output_dir: str = field(metadata={"help": "folder for gallery.html and the pictures, each as PNG and SVG"})


def gallery(argv: Sequence[str]) -> None:
    """Draw positional encodings, and the methods that extend RoPE, as pictures and one HTML page.

    Examples:
        hf-posenc gallery --output-dir gallery
    """
    _, where = parse("gallery", gallery.__doc__, argv, (GalleryArguments,), {})
    writable_folder(where.output_dir)
    from hf_posenc.explain.overview import LEAD, gallery_pictures
    from hf_posenc.explain.sections import picture_panel, write_page
    from hf_posenc.report.page import Panel, Paragraph

    lead = Panel("about", "About these pictures", [Paragraph(LEAD.replace("`", ""))])
    panels = [lead, *map(picture_panel, gallery_pictures())]
    files = write_page(where.output_dir, "gallery.html", "Positional encodings in pictures", panels)
    print("\n".join(map(str, files)))
