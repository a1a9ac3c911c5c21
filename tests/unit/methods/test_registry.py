"""The table of methods: names, aliases, options, and the errors for bad input."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posenc import available_methods
from hf_posenc.methods.registry import get_method, make_method, methods
from hf_posenc.spec import RopeSpec, check_length


def test_rows_cover_the_table() -> None:
    rows = available_methods()
    assert [row["name"] for row in rows] == list(methods())
    assert all(row["summary"] and row["paper"] and row["on_disk"] for row in rows)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("pi", "linear"),
        ("dynamic_ntk", "dynamic"),
        ("YaRN", "yarn"),
        ("ntk-by-parts", "ntk_by_parts"),
        ("DroPE", "nope"),
    ],
)
def test_aliases(given: str, name: str) -> None:
    assert get_method(given).name == name


def test_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'yran'\..*'yarn'\?"):
        get_method("yran")


@pytest.mark.parametrize(
    ("method", "factor", "options", "error", "message"),
    [
        (
            "linear",
            4,
            {"beta_fast": 32},
            TypeError,
            r"'linear' takes no option 'beta_fast' \(ntk_by_parts, yarn, yarn_rcd, dynamic_yarn do\)",
        ),
        ("yarn", 4, {"attn_factor": 1.0}, TypeError, r"takes no option 'attn_factor'\. It takes: attention_factor"),
        ("yarn", 0.25, {}, ValueError, r"factor must be >= 1, got 0\.25\. It is target / original"),
        ("yarn", "4", {}, TypeError, r"factor must be a number, got '4' \(str\)"),
        ("yarn", True, {}, TypeError, r"factor must be a number, got True"),
        ("yarn", 4, {"beta_fast": 1, "beta_slow": 2}, ValueError, "beta_fast must be greater than beta_slow"),
        ("yarn", float("inf"), {}, ValueError, "factor must be a finite number, got inf. It is target / original"),
        ("yarn", float("nan"), {}, ValueError, "factor must be a finite number, got nan"),
        ("yarn", 4, {"attention_factor": float("inf")}, ValueError, "attention_factor must be a finite number"),
        ("abf", 4, {"rope_theta": float("inf")}, ValueError, "rope_theta must be a finite number, got inf"),
        ("longrope", 4, {"long_factor": [1, float("inf")]}, ValueError, r"long_factor\[1\] must be a finite number"),
        ("yarn", 4, {"attention_factor": -1}, ValueError, "attention_factor must be greater than 0, got -1"),
        ("yarn", 4, {"truncate": "no"}, TypeError, "truncate must be True or False"),
        ("yarn", 4, {"ramp": "cubic"}, ValueError, "unknown ramp 'cubic'. Known: code, paper, harmonic"),
        ("longrope", 4, {"long_factor": "1,2"}, TypeError, "long_factor must be a list of numbers"),
        ("longrope", 4, {"long_factor": [1, 0]}, ValueError, r"long_factor\[1\] must be greater than 0"),
        ("dynamic", 4, {"scope": "token"}, ValueError, "unknown scope 'token'. Known: query, sequence"),
    ],
)
def test_bad_requests_say_what_came_and_what_is_allowed(
    method: str, factor: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_method(method, factor, options)


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("inf"), "must be a finite number, got inf"), (16.5, "a whole number of tokens, got 16.5"), (0, ">= 1")],
)
def test_lengths_are_whole_and_finite(value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"context_length.*{message}"):
        check_length("context_length", value)
    assert check_length("context_length", 16.0) == 16


def test_a_number_too_large_for_a_float_is_not_finite() -> None:
    with pytest.raises(ValueError, match="1000"):
        make_method("yarn", 10**400, {})


def test_changed_options_leave_defaults_out() -> None:
    assert make_method("yarn", 4, {"beta_fast": 16, "truncate": True}).changed_options() == {"beta_fast": 16.0}
    assert make_method("longrope", 4, {"long_factor": (1.0, 2.0)}).changed_options() == {"long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1e4, 64), "rotary_dim must be >= 1"),
        ((8, 1e4, 64, 4), "at least one must"),
        ((8, 0.5, 64), "rope_theta must be greater than 1"),
        ((8, 1e4, 0), "must be >= 1, got 0"),
    ],
)
def test_spec_checks_itself(values: tuple[int, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeSpec(*values)
