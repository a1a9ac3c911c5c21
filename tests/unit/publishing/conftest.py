"""The stand-in of the Hub, with somebody logged in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import Hub, running_hub, use_hub


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub where ``me`` is logged in, and nothing is in the cache yet."""
    with running_hub() as hub:
        use_hub(monkeypatch, hub, str(tmp_path / "hf"), "hf_me")
        yield hub
