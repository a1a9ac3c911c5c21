"""The pictures of the documentation, as SVG: of encodings and methods by the package, of measurements from records."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.explain.overview import gallery_pictures
from hf_posenc.report.plot import Drawing

RECORDS = Path(__file__).parent / "records"


def draw_all(folder: Path) -> None:
    """Write every picture into a folder, ``NAME.svg`` and, where it has a form for phones, ``NAME.narrow.svg``."""
    folder.mkdir(parents=True)
    for picture in gallery_pictures():
        _write(folder, picture.slug, picture.drawing)


def _write(folder: Path, name: str, drawing: Drawing) -> None:
    (folder / f"{name}.svg").write_bytes(drawing.svg)
    if drawing.narrow:
        (folder / f"{name}.narrow.svg").write_bytes(drawing.narrow)
