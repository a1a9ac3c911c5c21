"""``scripts/from_sinusoids_to_yarn.py`` prints what it says it prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from folders import SCRIPTS

PAGE = SCRIPTS / "from_sinusoids_to_yarn.py"


@pytest.mark.slow  # half a minute: the page reads texts with the tiny model seven times over
def test_page_prints_what_stands_behind_its_arrows() -> None:
    said = [line.partition("# -> ")[2] for line in PAGE.read_text(encoding="utf-8").splitlines() if "# -> " in line]
    ran = subprocess.run([sys.executable, PAGE], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == said
    assert len(said) > 20
