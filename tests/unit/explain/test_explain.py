"""``hf-posenc list methods NAME``: numbers read back from its words and tables, against float64 by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

from distance_rules import RULES, relative_positions
from encoding_pictures import encoding_pictures
from folders import ROOT
from hf_posenc.cli.main import main
from hf_posenc.explain.method_words import MethodWords, method_words
from hf_posenc.methods import registry
from hf_posenc.methods.base import Encoding, Frequencies, StaticMethod, plain_frequencies
from hf_posenc.methods.encodings.modules import AddedToLogits
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import make_method, methods, register_method
from hf_posenc.methods.yarn_rcd import YarnRcd
from hf_posenc.reporting.frequencies import PairRule
from hf_posenc.spec import RopeSpec
from method_pictures import draw_ramp
from pictures import LLAMA_2, compared_rules
from svg_values import line_values

Explain = Callable[..., str]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    """Run the command and return what it prints."""

    def run(*argv: object, code: int = 0) -> str:
        assert main(["list", "methods", *map(str, argv)]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def test_a_preset_is_explained_by_the_name_of_its_method(explain: Explain, config_only: Callable[..., Path]) -> None:
    sizes = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1e6}
    words = ("--preset", "qwen3-yarn-4x", "--model", config_only(**sizes))
    assert explain("yarn", *words).startswith("yarn x4: 32k -> 128k tokens\n")
    assert "is of yarn, not of ntk" in explain("ntk", *words, code=2)


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder with a config and no weights."""

    def make(**settings: Any) -> Path:
        usual = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        usual |= {"head_dim": 16, "max_position_embeddings": 64, "rope_theta": 10000.0, "num_key_value_heads": 2}
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**usual, **settings}))
        return folder

    return make


def rows_below(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose heads begin with a word, without the heads."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if re.match(rf"\s+{head}\s\s", line))
    rows = []
    for line in lines[at + 1 :]:
        if not line.strip() or line.strip().startswith("("):
            break
        rows.append(re.split(r"\s\s+", line.strip()))
    return rows


def number(cell: str) -> float:
    return float(cell.rstrip("*").replace(",", ""))


def joined(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_pairs_of_yarn_are_transformers_own(explain: Explain) -> None:
    text = explain("yarn", "--factor", 4)
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    config = LlamaConfig(head_dim=128, max_position_embeddings=16384, rope_parameters=parameters)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    plain = [10000.0 ** (-2 * pair / 128) for pair in range(64)]
    rows = rows_below(text, "pair")
    assert 10 < len(rows) < 20
    assert (rows[0][0], rows[-1][0]) == ("0", "63*")
    for row in rows:
        pair = int(row[0].rstrip("*"))
        expected = [2 * math.pi / plain[pair], 4096 * plain[pair] / (2 * math.pi), 2 * math.pi / inv_freq[pair].item()]
        assert [number(cell) for cell in row[1:4]] == pytest.approx(expected, rel=5e-3)
        stretch = plain[pair] / inv_freq[pair].item()
        assert number(row[4]) == pytest.approx(stretch, abs=6e-4)
        assert row[5] == ("kept" if stretch < 1.005 else "stretched" if stretch > 3.98 else "blended")
        assert row[0].endswith("*") == (4096 * plain[pair] < 2 * math.pi)
    stretches = [p / f for p, f in zip(plain, inv_freq.tolist(), strict=True)]
    kept, whole = sum(s < 1.005 for s in stretches), sum(s > 3.98 for s in stretches)
    assert f"{kept} kept, {64 - kept - whole} between, {whole} stretched by 4 or more" in joined(text)
    assert f"cos and sin times {attention_factor:.4g}" in joined(text)
    assert f"times {attention_factor**2:.4g}: attention is sharper" in joined(text)
    assert "Llama 2 7B's numbers" in text


def test_pairs_that_complete_no_turn_are_counted_by_hand(explain: Explain, config_only: Callable[..., Path]) -> None:
    text = joined(explain("linear", "--model", config_only(), "--context-length", 256))
    turns = [64 * 10000.0 ** (-pair / 8) / (2 * math.pi) for pair in range(8)]
    never, still = sum(t < 1 for t in turns), sum(4 * t < 1 for t in turns)
    assert never > still > 0
    assert f"Within the 64 tokens of training {never} pairs never complete a rotation (from pair {8 - never})" in text
    assert f"Unscaled, within 256 tokens {still} pairs complete no rotation, and {never} pairs meet angles" in text
    assert f"Within 256 tokens {never} pairs complete no rotation, and no pairs meet angles never met" in text
    assert "0 kept, 0 between, 8 stretched by 4 or more" in text


def test_part_of_a_head_and_of_the_pairs(explain: Explain, config_only: Callable[..., Path]) -> None:
    partial = config_only(model_type="glm", partial_rotary_factor=0.5, head_dim=16)
    assert "Of the 16 features of a head 8 are rotated; 8 carry no position." in joined(
        explain("ntk", "--model", partial)
    )


@pytest.mark.parametrize("length", [2048, 4096])
def test_transformers_dynamic_rule_is_explained_at_the_requested_length(
    explain: Explain, config_only: Callable[..., Path], length: int
) -> None:
    argv = ("dynamic", "--option", "scope=sequence", "--context-length", length)
    rows = rows_below(explain(*argv, "--model", config_only(max_position_embeddings=1024)), "pair")
    factor = length / 1024
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor}
    config = LlamaConfig(head_dim=16, max_position_embeddings=1024, rope_parameters=parameters)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    expected = [10000.0 ** (-pair / 8) / inv_freq[pair].item() for pair in range(8)]
    assert [number(row[4]) for row in rows] == pytest.approx(expected, abs=6e-4)


def test_stages_by_hand(explain: Explain, config_only: Callable[..., Path]) -> None:
    argv = ("dynamic_yarn", "--model", config_only(), "--factor", 2, "--option", "stage=20")
    text = explain(*argv)
    begin, expected = 0, []
    for stage, end in enumerate((64, 84, 104, 124, 144)):
        scale = end / 64
        tokens = 2 * math.pi * 10000.0 ** (7 / 8) * scale
        expected.append((str(stage), f"{begin} to {end - 1}", scale, 0.1 * math.log(scale) + 1, tokens))
        begin = end
    for row, (stage, positions, *numbers) in zip(rows_below(text, "stage"), expected, strict=True):
        assert row[:2] == [stage, positions]
        assert [number(cell) for cell in row[2:]] == pytest.approx(numbers, rel=5e-4)
    assert "5 stages, the original length included, reach 128 tokens" in joined(text)
    growing = rows_below(explain(*argv, "growth=geometric"), "stage")
    ends, end = [], 64
    while end < 128:
        ends.append(end)
        end = round(end * (84 / 64))
    assert [int(row[1].split(" to ")[1]) + 1 for row in growing] == [*ends, end]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "dca-sharpen"])
def test_distances_are_the_papers(explain: Explain, config_only: Callable[..., Path], rule: str) -> None:
    method, options = RULES[rule]
    argv = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    text = explain(method, "--model", config_only(), "--context-length", 200, "--option", *argv)
    by_hand = relative_positions(rule, 200)
    rows = rows_below(text, "true distance")
    assert len(rows) > 5
    for distance, used in rows:
        assert number(used) == pytest.approx(by_hand[199, 199 - int(number(distance))].item())
    farthest = by_hand.max().item()
    assert f"the farthest key of all counts as {farthest:,.6g} tokens away, of 64 trained" in joined(text)
    if "log_n" in options:
        assert f"1 at the original length, {math.log(200) / math.log(64):.4g} at 200 tokens" in joined(text)


def test_a_rule_that_cannot_reach_is_said_to(explain: Explain, config_only: Callable[..., Path]) -> None:
    argv = ("leaky_rerope", "--model", config_only(), "--option", "leak=2", "window=32", "--factor")
    assert "more than it was trained on: the rule cannot reach" in joined(explain(*argv, 4))
    assert "a distance it was trained on" in joined(explain(*argv, 1.4))


def test_alibi_on_any_number_of_heads(explain: Explain, config_only: Callable[..., Path]) -> None:
    text = explain("alibi", "--model", config_only(hidden_size=96, num_attention_heads=6, num_key_value_heads=6))
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    rows = [[number(cell) for cell in row] for row in rows_below(text, "head")]
    assert [row[1] for row in rows] == pytest.approx(slopes, rel=1e-3)
    assert [row[2] for row in rows] == pytest.approx([math.log(100) / slope for slope in slopes], rel=5e-3)
    assert f"In {sum(math.log(100) / slope < 64 for slope in slopes)} of 6 heads" in joined(text)


def test_t5s_buckets_are_its_own(explain: Explain) -> None:
    text = explain("t5-bias", "--option", "num_buckets=8", "max_distance=40")
    own = T5Attention._relative_position_bucket(-torch.arange(41), False, 8, 40).tolist()
    expected = []
    for bucket in range(8):
        first, last = own.index(bucket), 40 - own[::-1].index(bucket)
        expected.append(f"{first} and more" if bucket == 7 else f"{first}" if first == last else f"{first} to {last}")
    assert [row[1] for row in rows_below(text, "bucket")] == expected
    assert "256 numbers are trained: 8 for each of 32 heads" in joined(text)
    both = explain("t5_bias", "--option", "num_buckets=8", "max_distance=40", "bidirectional=true")
    own = T5Attention._relative_position_bucket(-torch.arange(41), True, 8, 40).tolist()
    assert [row[0] for row in rows_below(both, "bucket")] == [str(bucket) for bucket in sorted(set(own))]
    assert "4 buckets (and as many for later keys), of which 2 hold one distance each" in joined(both)


def test_waves_tables_and_decays_by_hand(explain: Explain, config_only: Callable[..., Path]) -> None:
    folder = config_only()
    waves = rows_below(explain("sinusoidal", "--model", folder, "--option", "base=500"), "features")
    assert waves[-1][0] == "62, 63"
    assert number(waves[-1][1]) == pytest.approx(2 * math.pi * 500 ** (62 / 64), rel=5e-3)
    for row in rows_below(explain("xpos", "--model", folder, "--factor", 8), "pair"):
        decay = (int(row[0]) / 8 + 0.4) / 1.4
        assert [number(cell) for cell in row[2:]] == pytest.approx(
            [decay, decay ** (64 / 512), decay ** (512 / 512)], rel=5e-3
        )
    other = explain("rope", "--model", folder, "--option", "rope_theta=500", "partial_rotary_factor=0.5")
    assert "Of the 16 features of a head 8 are rotated" in joined(other)
    assert [number(row[1]) for row in rows_below(other, "pair")] == pytest.approx(
        [2 * math.pi * 500 ** (pair / 4) for pair in range(4)], rel=5e-3
    )
    learned = joined(explain("learned", "--model", folder, "--context-length", 100))
    assert "A table of 64 rows of 64 features: 4,096 numbers" in learned
    assert "Of the 100 positions to be read, 36 have no row." in learned
    assert "Of the 100 distances to be read, 72 share the last." in joined(
        explain("relative_bias", "--model", folder, "--context-length", 100, "--option", "max_distance=28")
    )
    assert "This model has 8 rotated pairs" in joined(explain("nope", "--model", folder))
    assert [number(row[2]) for row in rows_below(explain("rope", "--model", folder), "pair")] == pytest.approx(
        [64 * 10000.0 ** (-pair / 8) / (2 * math.pi) for pair in range(8)], rel=5e-3
    )


def test_every_method_has_words_and_every_property_a_test() -> None:
    assert [name for name, cls in methods().items() if method_words(cls).explanation == MethodWords.explanation] == []
    encodings = [cls for cls in methods().values() if issubclass(cls, InPlaceOfRope)]
    assert {cls.name for cls in encodings} == registry.method_names("is_encoding") | {"nope"}
    for cls in encodings:
        words = method_words(cls)
        assert all((words.title, words.absolute_or_relative, words.kv_cache, words.trained, words.extrapolates))
    tests = (ROOT / "tests/unit/methods/test_encoding_properties.py").read_text()
    named = [test for cls in encodings for _, test in method_words(cls).properties]
    assert len(named) >= 7
    assert all(f"def {test}(" in tests for test in named)


@pytest.fixture
def of_another_package() -> Iterator[None]:
    """A static rule and two encodings, as another package would register them: what they do, and no words."""

    class DistanceBias(AddedToLogits):
        def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return (keys[:, None, :] - queries[:, :, None])[:, None].float()

    @register_method
    @dataclass(frozen=True)
    class Halved(StaticMethod):
        name: ClassVar[str] = "halved"
        paper: ClassVar[str] = "Nobody 2026"
        summary: ClassVar[str] = "Divides the frequencies of the slow half."
        on_disk: ClassVar[str] = "longrope"

        strength: float = option(1.0, positive, "power of the factor")

        def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
            inv_freq = plain_frequencies(spec)
            inv_freq[spec.num_pairs // 2 :] /= self.factor**self.strength
            return inv_freq, 1.0

    @register_method
    @dataclass(frozen=True)
    class Steep(Encoding):
        name: ClassVar[str] = "steep"
        paper: ClassVar[str] = "Nobody 2026"
        summary: ClassVar[str] = "Takes the distance off each logit."

        def module(self, model: ModelShape) -> nn.Module:
            return DistanceBias()

    @register_method
    @dataclass(frozen=True)
    class Cosine(Steep):
        name: ClassVar[str] = "cosine"

        def numbers(self, model: ModelShape) -> Numbers:
            return Numbers([f"{model.num_heads} heads see {model.target} tokens."], ["head"], [["all"]])

        def position_map(self, model: ModelShape) -> PositionMap:
            rows = [("", lambda distances: distances.double().cos())]
            return PositionMap("Cosine", rows, "cosine", (-1.0, 1.0), "Waves.")

    yield
    for name in ("halved", "steep", "cosine"):
        del registry.METHODS.all()[name]
    methods.cache_clear()


@pytest.mark.usefixtures("of_another_package")
def test_what_another_package_registers_is_explained(explain: Explain, config_only: Callable[..., Path]) -> None:
    model = config_only()
    rows = rows_below(explain("halved", "--model", model, "--factor", 8, "--option", "strength=2"), "pair")
    assert [number(row[4]) for row in rows] == [1.0] * 4 + [64.0] * 4
    plain = joined(explain("steep", "--model", model))
    assert plain.startswith("steep, up to 256 tokens")
    assert "Source: Nobody 2026." in plain
    said = explain("cosine", "--model", model, "--factor", 2)
    assert "cosine, up to 128 tokens" in said
    assert "4 heads see 128 tokens." in said
    shape = ModelShape(4, 64, 16, 64, 256, RopeSpec(16, 1e4, 64))
    assert {"halved", "yarn"} <= {rule.name for rule in compared_rules(RopeSpec(16, 1e4, 64), 4.0)}
    assert [picture.slug for picture in encoding_pictures(make_method("cosine"), shape)] == ["map_cosine"]
    assert encoding_pictures(make_method("steep"), shape) == []


@pytest.mark.parametrize(
    ("critical", "scale", "words"),
    [
        (30, 3, "from pair 21 to 29 the share grows (linear in its index)"),
        (22, 5, "at pair 21 the share grows (linear in its index)"),
        (12, 3, "no pair lies between"),
    ],
)
def test_the_ramp_to_a_critical_pair(explain: Explain, critical: int, scale: int, words: str) -> None:
    """Llama 2's pair of 32 rotations is pair 20.9: the ramp begins at 20, or one pair before the critical one."""
    text = joined(explain("yarn_rcd", "--factor", 3, "--option", f"critical_pair={critical}", f"scale={scale}"))
    low = min(20, critical - 1)
    said = f"The ramp: pairs 0 to {low} are kept, pair {critical}, the critical pair, and slower ones are divided by "
    assert f"{said}{scale}; {words}." in text
    rule = PairRule("yarn_rcd x3", LLAMA_2, YarnRcd(3, critical_pair=critical, scale=scale), 12288)
    ramp = draw_ramp(rule)
    assert ramp is not None
    svg = ramp.drawing.svg.decode()
    whole = "the factor" if scale == 3 else "5"
    assert f"0: kept, 1: divided by {whole}" in re.findall("<!-- (.*?) -->", svg)
    line = line_values(svg, "line-0", log_x=False)
    assert len(line) > 3
    assert (line[0][1], line[-1][1]) == pytest.approx((0, 1), abs=5e-3)
    for pair, share in line:
        assert share == pytest.approx(min(max((pair - low) / (critical - low), 0), 1), abs=1e-2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("yran",), "unknown method 'yran'. Did you mean 'yarn'? Known: abf, alibi,"),
        (("yarn", "--factor", "0.25"), "factor must be >= 1, got 0.25"),
        (("yarn", "--factor", "2", "--context-length", "8k"), "not both"),
        (("linear", "--option", "beta_fast=3"), "takes no option 'beta_fast'"),
        (("alibi", "--option", "slope=3"), "'alibi' takes no option 'slope'. It takes none."),
        (("t5_bias", "--option", "num_buckets=1"), "num_buckets is 1, at least 2"),
        (("sinusoidal", "--option", "base=1"), "base must be greater than 1, got 1"),
        (("rope", "--factor", "2", "--context-length", "8k"), "not both"),
        (("rope", "--factor", "0.5"), "factor must be >= 1, got 0.5"),
        (("rope", "--preset", "qwen3-yarn-4x"), "--preset is for methods"),
        (("yarn", "--model", "/nowhere/at-all"), "there is no file or folder '/nowhere/at-all'"),
    ],
)
def test_mistakes_are_said_in_one_line(explain: Explain, argv: tuple[str, ...], words: str) -> None:
    said = [line for line in explain(*argv, code=2).splitlines() if line.startswith("hf-posenc: error: ")]
    assert len(said) == 1
    assert words in said[0]


def test_what_a_model_cannot_have_is_refused(
    explain: Explain, config_only: Callable[..., Path], tmp_path: Path
) -> None:
    scaled = config_only(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert "already scaled: linear" in explain("yarn", "--model", scaled, code=2)
    gpt2 = config_only(model_type="gpt2")
    assert "has no rotary embedding" in explain("rope", "--model", gpt2, code=2)
    assert "absolute" in explain("learned", "--model", gpt2).lower()
    mamba = tmp_path / "mamba"
    mamba.mkdir()
    (mamba / "config.json").write_text('{"model_type": "mamba", "hidden_size": 64}')
    assert "has no num_attention_heads" in explain("alibi", "--model", mamba, code=2)
    nanochat = config_only(model_type="nanochat")
    assert "method 'dca' is not supported for model_type 'nanochat'" in explain("dca", "--model", nanochat, code=2)
