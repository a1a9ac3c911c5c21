"""What a longer context costs, and which method, recipe and lever to take, before any weights are loaded."""

from __future__ import annotations

from hf_posenc.planning.planner import Plan, plan
from hf_posenc.planning.text import plan_text

__all__ = ["Plan", "plan", "plan_text"]
