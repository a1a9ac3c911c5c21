"""The pictures of the documentation, as SVG: of encodings and methods by the package, of measurements from records.

python docs/pictures.py --readme    # draws .github/images/perplexity.svg again
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.explain.canvas import HeatMap, Picture, draw_heat_maps
from hf_posenc.explain.method_pictures import draw_ramp, draw_stages, draw_temperature, draw_wavelengths, drawn
from hf_posenc.explain.overview import FACTOR, LLAMA_2, gallery_pictures
from hf_posenc.methods.base import plain_frequencies
from hf_posenc.methods.dynamic import DynamicNtk
from hf_posenc.methods.dynamic_yarn import DynamicYarn
from hf_posenc.methods.yarn import Yarn
from hf_posenc.report.frequencies import PairRule
from hf_posenc.report.plot import Drawing
from hf_posenc.utils.files import write_whole
from result_pictures import readme_svg, result_pictures  # beside this file, which scripts/docs puts on the path

README_PICTURE = Path(__file__).parents[1] / ".github" / "images" / "perplexity.svg"
TARGET = round(FACTOR * LLAMA_2.original_max_position_embeddings)
_CELLS = 128  # of a row and a column of a heat map


def draw_all(folder: Path) -> None:
    """Write every picture into a folder, ``NAME.svg`` and, where it has a form for phones, ``NAME.narrow.svg``."""
    folder.mkdir(parents=True)
    for picture in (*gallery_pictures(), *yarn_pictures(), draw_key_scales()):
        _write(folder, picture.slug, picture.drawing)
    for name, drawing in result_pictures():
        _write(folder, name, drawing)


def yarn_pictures() -> list[Picture]:
    """Return the pictures of YaRN on the gallery's model: wavelengths, ramp, temperature; and its stages."""
    rule = PairRule("yarn", LLAMA_2, Yarn(FACTOR), TARGET)
    found = drawn(draw_wavelengths(rule), draw_ramp(rule), draw_temperature(LLAMA_2, rule.method))
    found.append(draw_stages(LLAMA_2, DynamicYarn(FACTOR), TARGET))
    return [replace(picture, slug=f"yarn_{picture.slug}") for picture in found]


def draw_key_scales() -> Picture:
    """Draw the scale that the key of each score is rotated by: published dynamic NTK, fed in two ways, and stages."""
    positions = torch.arange(_CELLS) * (TARGET // _CELLS)
    queries, keys = torch.meshgrid(positions, positions, indexing="ij")
    stages = Stages(LLAMA_2, DynamicNtk(FACTOR))
    published = DynamicNtk(1.0, scope="sequence")

    def of_length(length: int) -> float:
        scaled, _ = published.frequencies(LLAMA_2, length)
        return float(plain_frequencies(LLAMA_2)[-1] / scaled[-1])

    def of_stage(position: int) -> float:
        return stages.factor(int(stages.of(torch.tensor([position]))))

    def map_of(scale: Callable[[int], float], of: torch.Tensor, title: str, name: str) -> HeatMap:
        by_position = {int(position): scale(int(position)) for position in positions}
        values = torch.tensor([[by_position[int(position)] for position in row] for row in of], dtype=torch.float64)
        return HeatMap(torch.where(keys <= queries, values, torch.nan), (TARGET, TARGET), title, name)

    maps = [
        map_of(lambda _: of_length(TARGET), keys, "published, one forward", "scales-forward"),
        map_of(lambda position: of_length(position + 1), keys, "published, token by token", "scales-tokens"),
        map_of(of_stage, queries, "stages, always", "scales-stages"),
    ]
    caption = (
        "The scale of the frequencies by which the key of each score is rotated, up to 4 times the trained length."
    )
    drawing = draw_heat_maps(maps, (1, FACTOR), 3, aspect=0.95, bar="scale of the key")
    return Picture("key_scales", "Scales of keys", caption, drawing)


def _write(folder: Path, name: str, drawing: Drawing) -> None:
    (folder / f"{name}.svg").write_bytes(drawing.svg)
    if drawing.narrow:
        (folder / f"{name}.narrow.svg").write_bytes(drawing.narrow)


if __name__ == "__main__":
    if sys.argv[1:] != ["--readme"]:
        raise SystemExit("usage: python docs/pictures.py --readme")
    README_PICTURE.parent.mkdir(exist_ok=True)
    write_whole(README_PICTURE, readme_svg())
