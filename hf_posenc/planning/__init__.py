"""The costs of a longer context, and the method, recipe and training option to take, before any weights are loaded."""

from hf_posenc.planning.planner import Plan, plan
from hf_posenc.planning.text import plan_text

__all__ = ["Plan", "plan", "plan_text"]
