"""The pictures of the documentation, as SVG: of encodings and methods by the package, of measurements from records.

python docs/pictures.py --readme    # draws .github/images/perplexity.svg again
python docs/pictures.py FOLDER      # draws all pictures of the documentation into a new folder
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

# The modules beside this file, which scripts/docs puts on the path.
from canvas import HeatMap, Picture, draw_heat_maps
from encoding_pictures import encoding_pictures
from hf_posenc.attention.staged import Stages
from hf_posenc.methods.abf import Abf
from hf_posenc.methods.base import DistanceMethod, Method, StaticMethod, plain_frequencies
from hf_posenc.methods.dynamic import DynamicNtk
from hf_posenc.methods.dynamic_yarn import DynamicYarn
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape
from hf_posenc.methods.registry import methods
from hf_posenc.methods.yarn import Yarn
from hf_posenc.reporting.frequencies import PairRule
from hf_posenc.reporting.plot import Drawing
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.files import write_whole
from method_pictures import (
    draw_distance_maps,
    draw_distances,
    draw_ramp,
    draw_stages,
    draw_stretch,
    draw_temperature,
    draw_wavelengths,
    drawn,
)
from result_pictures import readme_svg, result_pictures

README_PICTURE = Path(__file__).parents[1] / ".github" / "images" / "perplexity.svg"
# Llama 2's heads, which the papers on longer contexts extend.
LLAMA_2 = RopeSpec(rotary_dim=128, rope_theta=10000.0, original_max_position_embeddings=4096)
FACTOR = 4.0
TARGET = round(FACTOR * LLAMA_2.original_max_position_embeddings)
_RAMPS = ("code", "paper", "harmonic")
_CELLS = 128  # of a row and a column of a heat map


def draw_all(folder: Path) -> None:
    """Write every picture into a folder, ``NAME.svg`` and, where it has a form for phones, ``NAME.narrow.svg``."""
    folder.mkdir(parents=True)
    for picture in (*method_and_encoding_pictures(), *yarn_pictures(), draw_key_scales()):
        _write(folder, picture.slug, picture.drawing)
    for name, drawing in result_pictures():
        _write(folder, name, drawing)


def method_and_encoding_pictures() -> list[Picture]:
    """Return pictures of static rules, of rules of distances, and of each encoding."""
    model = ModelShape(num_heads=8, hidden_size=512, head_dim=128, length=1024, target=TARGET, spec=LLAMA_2)
    usable = [cls(FACTOR) for cls in methods().values() if not cls.needs_options]
    of_distances = [(method.name, method) for method in usable if isinstance(method, DistanceMethod)]
    encodings = [method for method in usable if isinstance(method, InPlaceOfRope)]
    return [
        *rule_pictures(LLAMA_2, FACTOR),
        draw_distances(LLAMA_2, of_distances, TARGET),
        draw_distance_maps(LLAMA_2, of_distances, TARGET),
        *(picture for method in encodings for picture in encoding_pictures(method, model)),
    ]


def compared_rules(spec: RopeSpec, factor: float) -> list[PairRule]:
    """Return the static rules at a factor, and Transformers' dynamic one at the target and at half of it."""
    target = round(factor * spec.original_max_position_embeddings)
    usable = [cls(factor) for cls in methods().values() if issubclass(cls, StaticMethod) and not cls.needs_options]
    dynamic, larger_base = DynamicNtk(factor, scope="sequence"), Abf(factor, rope_theta=500000.0)
    rules: list[tuple[str, Method, int]] = [
        *((method.name, method, target) for method in usable if not method.instead_of_rope),
        ("dynamic at the target", dynamic, target),
        ("dynamic at half of it", dynamic, target // 2),
        ("abf, base 500000", larger_base, target),
    ]
    return [PairRule(name, spec, method, reach) for name, method, reach in rules]


def rule_pictures(spec: RopeSpec, factor: float) -> list[Picture]:
    """Return the curves of all rules side by side, and of YaRN's three ramps."""
    where = (
        f"{spec.rotated_pairs} pairs at base {spec.rope_theta:g}, trained on "
        f"{spec.original_max_position_embeddings:,} tokens, factor {factor:g}"
    )
    every = draw_stretch(
        compared_rules(spec, factor),
        "rules",
        f"How far each rule stretches each pair, x{factor:g}",
        f"{where}. Fast pairs are to the left; in the grey are those that never complete a rotation in training, which "
        f"a rule has to stretch by {factor:g} if they are to stay at angles they had. Transformers' dynamic rule at "
        "the target and at half of it; abf is as far as its base goes, whatever the factor.",
    )
    target = round(factor * spec.original_max_position_embeddings)
    ramps = [PairRule(f"yarn, ramp={ramp}", spec, Yarn(factor, ramp=ramp), target) for ramp in _RAMPS]
    yarn = draw_stretch(
        ramps,
        "yarn_ramps",
        f"YaRN's three ramps, x{factor:g}",
        f"{where}. Three published curves between what is kept (32 rotations and more) and what is stretched in full "
        "(one rotation and less): the authors' code, the paper's text, and PoSE's.",
    )
    return drawn(every, yarn)


def yarn_pictures() -> list[Picture]:
    """Return the pictures of YaRN on that model: wavelengths, ramp, temperature; and its stages."""
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
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/pictures.py --readme | FOLDER")
    if sys.argv[1] == "--readme":
        README_PICTURE.parent.mkdir(exist_ok=True)
        write_whole(README_PICTURE, readme_svg())
    else:
        draw_all(Path(sys.argv[1]))
