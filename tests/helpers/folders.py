"""Where this checkout lies, for tests that run its scripts or start processes of their own."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
HELPERS = ROOT / "tests" / "helpers"
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
