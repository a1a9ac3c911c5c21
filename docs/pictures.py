"""The pictures of the documentation, as SVG: of encodings and methods by the package, of measurements from records.

python docs/pictures.py --readme    # draws .github/images/perplexity.svg again
"""

from __future__ import annotations

import sys
from pathlib import Path

from result_pictures import readme_svg, result_pictures  # beside this file, which scripts/docs puts on the path

from hf_posenc.explain.overview import gallery_pictures
from hf_posenc.report.plot import Drawing
from hf_posenc.utils.files import write_whole

README_PICTURE = Path(__file__).parents[1] / ".github" / "images" / "perplexity.svg"


def draw_all(folder: Path) -> None:
    """Write every picture into a folder, ``NAME.svg`` and, where it has a form for phones, ``NAME.narrow.svg``."""
    folder.mkdir(parents=True)
    for picture in gallery_pictures():
        _write(folder, picture.slug, picture.drawing)
    for name, drawing in result_pictures():
        _write(folder, name, drawing)


def _write(folder: Path, name: str, drawing: Drawing) -> None:
    (folder / f"{name}.svg").write_bytes(drawing.svg)
    if drawing.narrow:
        (folder / f"{name}.narrow.svg").write_bytes(drawing.narrow)


if __name__ == "__main__":
    if sys.argv[1:] != ["--readme"]:
        raise SystemExit("usage: python docs/pictures.py --readme")
    README_PICTURE.parent.mkdir(exist_ok=True)
    write_whole(README_PICTURE, readme_svg())
