"""Pictures written to a folder, with one HTML page of all of them that asks no server for anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_posenc.gallery.canvas import Picture
from hf_posenc.report.page import html_page
from hf_posenc.report.pieces import Panel, inline, quiet
from hf_posenc.utils.files import write_whole


def check_output_folder(output_dir: str | Path) -> Path:
    """Return the folder to write to.

    Raises:
        ValueError: It is a file.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(output_dir)!r} is a file. Give a folder for the pictures.")
    return folder


def picture_panel(picture: Picture) -> Panel:
    """Return a picture with its caption as a part of a page."""
    html = f"{inline(picture.drawing, picture.slug, picture.title)}\n{quiet(picture.caption)}"
    markdown = f"![{picture.title}]({picture.slug}.png)\n\n{picture.caption}"
    return Panel(picture.slug, picture.title, html, markdown, picture.drawing)


def write_page(output_dir: str | Path, name: str, title: str, panels: Sequence[Panel]) -> list[Path]:
    """Write a page and the PNG and SVG files of its drawings; files of an earlier run there are replaced.

    Args:
        output_dir: Folder; made if it is not there.
        name: Of the page.
        title: Its heading.
        panels: In order.

    Returns:
        The page, then the pictures.
    """
    folder = check_output_folder(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    page = write_whole(folder / name, html_page(title, panels, images=True))
    drawn = [panel for panel in panels if panel.drawing is not None]
    return [
        page,
        *(
            write_whole(folder / f"{panel.slug}{suffix}", content)
            for panel in drawn
            if panel.drawing is not None
            for suffix, content in panel.drawing.files.items()
        ),
    ]
