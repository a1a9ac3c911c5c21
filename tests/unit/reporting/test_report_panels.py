"""The panels beside the tables: losses by position, what methods do to the frequencies, time and memory, sorting."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc.evaluation import perplexity
from hf_posenc.patching.api import patched
from hf_posenc.reporting import report
from hf_posenc.reporting.comparable import make_tables
from hf_posenc.reporting.costs import row_costs
from hf_posenc.reporting.frequencies import make_rules
from hf_posenc.reporting.looks import make_looks
from hf_posenc.reporting.perplexity_panels import Losses
from report_records import make_record, make_retrieval_record, read_page
from svg_values import line_values

# SmolLM2-135M's.
ROPE = {"rotary_dim": 64, "rope_theta": 100000.0, "unrotated_pairs": 0}
SMOL: dict[str, Any] = {"original_max_position_embeddings": 8192, "rope": ROPE}


def extended(method: str, factor: float, **options: Any) -> Any:
    return make_record(method, 8192, 30.0, factor=factor, options=options, **SMOL)


def test_losses_by_position_are_the_models_own(tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    model, documents = tiny_llama(), [torch.randint(1, 128, (128,)) for _ in range(3)]
    records = perplexity(model, documents, [32, 64, 128], model_name="m", position_bucket=4, progress=False)
    with patched(model, "linear", 2):
        records += perplexity(model, documents, [32, 64, 128], model_name="m", position_bucket=4, progress=False)
        with torch.no_grad():
            logits = model(torch.stack(documents)).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.stack(documents)[:, 1:].flatten(), reduction="none"
    )
    expected = losses.view(3, 127).double()
    head, *rows = read_page(report(records, tmp_path).html.read_text()).tables["positions_truncated_table"]
    assert head == ["tokens", "unpatched", "linear x2"]
    assert [row[0] for row in rows] == [f"{at}–{at + 7}" for at in range(0, 128, 8)]  # 32 buckets, two to a line
    for at, row in enumerate(rows):
        mean = expected[:, max(0, 8 * at - 1) : 8 * at + 7].mean().item()  # token 0 is not scored
        assert float(row[2]) == pytest.approx(mean, abs=6e-4)
    assert [row[1] for row in rows] != [row[2] for row in rows]
    assert {"positions_truncated.png", "positions_truncated.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "| 120–127 |" in (tmp_path / "report.md").read_text()


def test_buckets_are_added_up_not_averaged() -> None:
    losses = Losses(10, (9.0, 40.0, 60.0, 5.0, 0.0), (9, 10, 10, 1, 0))
    assert losses.means() == [(0, 1.0), (10, 4.0), (20, 6.0), (30, 5.0)]
    assert losses.merged(3) == Losses(20, (49.0, 65.0, 0.0), (19, 11, 0))
    assert losses.merged(3).means() == [(0, 49 / 19), (20, 65 / 11)]
    assert losses.merged(5) == losses


def test_buckets_of_different_width_are_apart_and_those_measured_again_are_not(tmp_path: Path) -> None:
    def with_buckets(method: str, width: int, **changes: Any) -> Any:
        counts = [width - 1] + [width] * (256 // width - 1)
        by_position = {"position_bucket": width, "position_nll": [3.0 * n for n in counts], "position_tokens": counts}
        return make_record(method, 256, 40.0, **by_position, **changes)

    _, apart = make_tables([with_buckets("none", 64), with_buckets("yarn", 32)])
    assert "at 256 tokens (truncated), position_bucket is 64 for unpatched and 32 for yarn x4" in apart.notes[0]
    again = [with_buckets("none", 64), with_buckets("none", 32), with_buckets("yarn", 32)]
    report([*again, make_record("ntk", 256, 41.0)], tmp_path)  # not every record has them
    tables = read_page((tmp_path / "report.html").read_text()).tables
    assert tables["positions_truncated_table"][0] == ["tokens", "unpatched", "yarn x4"]
    assert tables["positions_truncated_table"][1] == ["0–31", "3.000", "3.000"]


@pytest.mark.parametrize(
    ("method", "options"),
    [("linear", {}), ("yarn", {}), ("yarn", {"beta_fast": 16.0}), ("llama3", {}), ("dynamic", {"scope": "sequence"})],
)
def test_stretch_is_what_transformers_makes_of_the_frequencies(method: str, options: dict[str, Any]) -> None:
    parameters = {"rope_type": method, "rope_theta": 100000.0, "factor": 4.0, "original_max_position_embeddings": 8192}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if method == "llama3" else {}
    parameters |= {k: v for k, v in options.items() if k != "scope"}
    length = 8192 if method == "dynamic" else 32768  # where dynamic finds its original length
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "head_dim": 64, "max_position_embeddings": length}
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[method](config, "cpu", seq_len=32768)
    plain = [100000.0 ** (-2 * pair / 64) for pair in range(32)]
    ((rule,),) = make_rules([extended(method, 4.0, **options)])
    assert rule.stretch == pytest.approx([p / f for p, f in zip(plain, inv_freq.tolist(), strict=True)], rel=1e-5)
    assert rule.frequencies[1] == pytest.approx(attention_factor)
    assert rule.rotations == pytest.approx([8192 * p / (2 * math.pi) for p in plain])


def test_records_of_methods_that_are_not_known_here_are_shown_without_their_frequencies(tmp_path: Path) -> None:
    rope = {"rotary_dim": 16, "rope_theta": 10000.0}
    records: list[Any] = [make_record("none", 256, 30.0, rope=rope), make_record("yarn", 256, 31.0, rope=rope)]
    records += [make_record("mine", 256, 32.0, rope=rope), make_record("ntk", 256, 33.0, options={"old": 1}, rope=rope)]
    assert [[rule.method.name for rule in rules] for rules in make_rules(records)] == [["none", "yarn"]]
    page = report(records, tmp_path).html.read_text()
    assert "mine x4" in page
    assert "ntk x4" in page


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    records = [make_record("none", length, 30.0, label="$a_$") for length in (128, 256)]
    assert "$a_$" in report(records, tmp_path).html.read_text()


def test_pairs_that_are_stopped_are_said_to_be_and_not_drawn(tmp_path: Path) -> None:
    records = [extended("none", 1.0), extended("nope", 2.0), extended("linear", 2.0)]
    page = read_page(report(records, tmp_path).html.read_text())
    rows = page.tables["frequencies_pairs"][1:]
    assert [row[-2:] for row in rows] == [["stopped", "2.000"]] * 32
    (summary,) = (row for row in page.tables["frequencies_methods"] if row[0].startswith("nope"))
    assert [summary[1], *summary[3:6]] == ["0 pairs", "0", "0", "32"]
    assert "linear x2" in (drawn := (tmp_path / "frequencies.svg").read_text())
    assert "nope" not in drawn


def test_angles_never_trained_counted_by_hand() -> None:
    records = [extended("none", 1.0), extended("linear", 2.0), extended("ntk", 2.0), extended("yarn", 2.0)]
    records += [extended("dynamic_yarn", 2.0), extended("dca", 2.0)]
    longest = dataclasses.replace(records[0], context_length=20000)
    (rules,) = make_rules([*records, longest])
    plain = [100000.0 ** (-2 * pair / 64) for pair in range(32)]
    theta = 100000.0 * 2 ** (64 / 62)
    scaled = {"unpatched": plain, "linear x2": [p / 2 for p in plain]}
    scaled["ntk x2"] = [theta ** (-2 * pair / 64) for pair in range(32)]
    for rule in rules[:3]:
        reach = 20000 if rule.name == "unpatched" else 16384
        assert rule.reach == reach
        expected = sum(
            8192 * before < 2 * math.pi and reach * after > 8192 * before * (1 + 1e-6)
            for before, after in zip(plain, scaled[rule.name], strict=True)
        )
        assert rule.unseen() == expected
    assert [rule.unseen() for rule in rules] == [12, 0, 11, 0, 0, None]
    assert [sum(rule.shares()) for rule in rules] == [32] * 6
    assert rules[1].shares() == (0, 0, 32)
    assert rules[4].stretch == pytest.approx(rules[3].stretch)  # the stage that ends at the target is yarn x2


def test_the_frequency_panel_shows_each_pair_and_each_method(tmp_path: Path) -> None:
    records = [extended("none", 1.0), extended("yarn", 4.0), extended("rerope", 4.0)]
    page = report(records, tmp_path).html.read_text()
    tables = read_page(page).tables
    assert "12 of them never complete a rotation within the 8k tokens" in page
    methods = {row[0]: row[1:] for row in tables["frequencies_methods"]}
    assert methods["unpatched"] == ["0 pairs", "8k", "32", "0", "0", "1"]
    assert (methods["yarn x4"][0], methods["yarn x4"][5]) == ("0 pairs", f"{0.1 * math.log(4) + 1:.4g}")
    assert methods["rerope x4"][0] == "distances"
    head, *pairs = tables["frequencies_pairs"]
    assert head == ["pair", "wavelength in tokens", "rotations in 8k", "a whole rotation", "yarn x4"]
    assert len(pairs) == 32
    assert [row[3] for row in pairs] == ["yes"] * 20 + ["never"] * 12
    assert pairs[31][:3] == ["31", f"{2 * math.pi * 100000 ** (62 / 64):,.0f}", "0.0187"]
    assert (pairs[0][4], pairs[31][4]) == ("1.000", "4.000")
    assert (tmp_path / "frequencies.svg").exists()


def test_models_have_panels_of_their_own_and_those_without_rope_none(tmp_path: Path) -> None:
    other = {**SMOL, "model": "other", "rope": {**ROPE, "rotary_dim": 32, "unrotated_pairs": 4}}
    records = [extended("none", 1.0), extended("yarn", 4.0), make_record("none", 8192, 31.0, **other)]
    tables = read_page(report(records, tmp_path / "two").html.read_text()).tables
    assert len(tables["frequencies_2_pairs"]) == 1 + 12
    assert sorted(path.name for path in (tmp_path / "two").glob("freq*.png")) == ["frequencies.png"]
    without = [dataclasses.replace(record, rope={}) for record in records[:2]]
    assert "frequencies" not in report(without, tmp_path / "without").html.read_text()


def test_time_is_shown_at_the_length_of_its_pass() -> None:
    one_pass = [make_record("none", n, 30.0, seconds=12.5, peak_memory_bytes=3 * 2**29) for n in (64, 128, 256)]
    passes = [make_record("yarn", n, 30.0, seconds=n / 100) for n in (64, 128, 256)]
    (table,) = make_tables([*one_pass, *passes])
    shared, own = map(row_costs, table.rows)
    assert [(cost.other, cost.seconds) for cost in shared.values()] == [(256, 12.5), (256, 12.5), (None, 12.5)]
    assert [(cost.other, cost.seconds) for cost in own.values()] == [(None, 0.64), (None, 1.28), (None, 2.56)]


def test_costs_of_passes_and_prompts_are_on_the_page(tmp_path: Path) -> None:
    records: list[Any] = [make_record("none", n, 30.0, seconds=12.5, peak_memory_bytes=10**9) for n in (128, 256)]
    records += [
        make_retrieval_record("none", n, 0.0, seed, True, seconds=n / 256 + seed, peak_memory_bytes=10**6 * (seed + 1))
        for n in (256, 512)
        for seed in (0, 1)
    ]
    paths = report(records, tmp_path)
    tables = read_page(paths.html.read_text()).tables
    assert tables["cost_truncated_table"] == [
        ["method", "256"],  # the pass over 256 tokens gave 128 too
        ["unpatched", "12 s 1.00 GB"],
    ]
    assert tables["cost_retrieval_passkey_table"][1] == ["unpatched", "1.5 s 2.00 MB", "2.5 s 2.00 MB"]
    assert not (tmp_path / "cost_truncated.png").exists()  # one point is no line
    assert (tmp_path / "cost_retrieval_passkey.png").exists()
    assert "| unpatched | 1.5 s, 2.00 MB | 2.5 s, 2.00 MB |" in paths.markdown.read_text()


def test_every_cell_is_sorted_by_what_it_says_and_only_our_script_may_run(tmp_path: Path) -> None:
    records = [make_record(method, n, p) for method, p in (("none", 5000.5), ("yarn", 45.0)) for n in (128, 256)]
    page = report(records, tmp_path).html.read_text()
    parsed = read_page(page)
    assert parsed.sorts["perplexity_truncated_table"][1:] == [
        [None, None, "5000.5", "5000.5"],
        [None, "-99.10008999", "45", "45"],
    ]
    for rows in (parsed.tables[name] for name in parsed.tables if name.endswith("_table")):
        assert len({len(row) for row in rows}) == 1
    (policy,) = [values["content"] for tag, values in parsed.tags if values.get("http-equiv")]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"fetch|XMLHttp|import|https?:|//", script)


def test_no_two_methods_look_alike() -> None:
    methods = [f"m{index}" for index in range(30)]
    found = make_looks([make_record(method, 256, 30.0) for method in ["none", *methods]])
    assert len({(look.colour, look.marker, look.dashes) for look in found.values()}) == 31
    assert len({look.colour for look in list(found.values())[1:7]}) == 6
    assert len({(look.marker, look.dashes) for look in found.values()}) == 31  # without any colour


def test_losses_by_position_are_smoothed_and_it_is_said_how(tmp_path: Path) -> None:
    rng = random.Random(0)
    counts = [15] + [16] * 63
    sums = {method: [n * (3 + rng.random()) for n in counts] for method in ("none", "linear", "ntk", "yarn")}

    def of(method: str) -> Any:
        by_position = {"position_bucket": 16, "position_tokens": counts, "position_nll": sums[method]}
        return [make_record(method, 128, 40.0), make_record(method, 1024, 40.0, **by_position)]

    paths = report([*of("none"), *of("yarn")], tmp_path / "two")
    svg = (tmp_path / "two" / "positions_truncated.svg").read_text()
    smooth = line_values(svg, "line-1")
    expected = []
    for at in range(64):  # five buckets of 16 tokens, a sixteenth of the length and a little more
        near = [bucket for bucket in range(64) if abs(bucket - at) <= 2]
        expected.append(sum(sums["yarn"][one] for one in near) / sum(counts[one] for one in near))
    assert [x for x, _ in smooth] == pytest.approx([16 * at + 8 for at in range(64)], abs=0.5)
    assert [y for _, y in smooth] == pytest.approx(expected, abs=5e-3)
    raw = line_values(svg, "raw-1")
    means = [total / count for total, count in zip(sums["yarn"], counts, strict=True)]
    assert [y for _, y in raw] == pytest.approx(means, abs=5e-3)
    words = "each point is the mean over the 80 positions around it (fewer at both ends), of all documents."
    assert f"{words} The faint lines are means over 16 positions.</figcaption>" in paths.html.read_text()
    assert words in paths.markdown.read_text()
    paths = report([one for method in sums for one in of(method)], tmp_path / "four")
    assert "raw-" not in (tmp_path / "four" / "positions_truncated.svg").read_text()
    assert f"{words}</figcaption>" in paths.html.read_text()


def test_a_running_mean_counts_tokens_not_buckets_and_skips_what_was_not_measured() -> None:
    losses = Losses(10, (0.0, 9.0, 40.0, 60.0), (0, 9, 10, 10))
    assert losses.smoothed(1) == [(15.0, 1.0), (25.0, 4.0), (35.0, 6.0)]
    assert losses.smoothed(3) == [(15.0, 49 / 19), (25.0, 109 / 29), (35.0, 5.0)]
