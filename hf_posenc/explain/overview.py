"""The gallery: what encodings look like on one model, and what the rules that stretch RoPE do to it."""

from __future__ import annotations

from hf_posenc.explain.canvas import Picture
from hf_posenc.explain.encoding_pictures import encoding_pictures
from hf_posenc.explain.method_pictures import draw_distance_maps, draw_distances, draw_stretch, drawn
from hf_posenc.methods.abf import Abf
from hf_posenc.methods.base import DistanceMethod, Method, StaticMethod
from hf_posenc.methods.dynamic import DynamicNtk
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape
from hf_posenc.methods.registry import methods
from hf_posenc.methods.yarn import Yarn
from hf_posenc.report.frequencies import PairRule
from hf_posenc.spec import RopeSpec

# Llama 2's heads, which the papers on longer contexts extend.
LLAMA_2 = RopeSpec(rotary_dim=128, rope_theta=10000.0, original_max_position_embeddings=4096)
FACTOR = 4.0
LEAD = (
    "What positional encodings look like, and what the rules that stretch RoPE do to it. Rotary pictures are of heads "
    "of 128 features at base 10000, trained on 4,096 tokens (Llama 2's) and extended to 16,384; biases are of 8 heads. "
    "`hf-posenc explain NAME --model MODEL --output-dir FOLDER` draws them for a model of yours."
)
_RAMPS = ("code", "paper", "harmonic")


def gallery_pictures() -> list[Picture]:
    """Return all pictures of the gallery: of static rules, of rules of distances, and of each encoding."""
    target = round(FACTOR * LLAMA_2.original_max_position_embeddings)
    model = ModelShape(num_heads=8, hidden_size=512, head_dim=128, length=1024, target=target, spec=LLAMA_2)
    usable = [cls(FACTOR) for cls in methods().values() if not cls.needs_options]
    of_distances = [(method.name, method) for method in usable if isinstance(method, DistanceMethod)]
    encodings = [method for method in usable if isinstance(method, InPlaceOfRope)]
    return [
        *rule_pictures(LLAMA_2, FACTOR),
        draw_distances(LLAMA_2, of_distances, target),
        draw_distance_maps(LLAMA_2, of_distances, target),
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
