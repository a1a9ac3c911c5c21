"""Passkey retrieval: one number in a long text."""

from __future__ import annotations

from random import Random

from hf_posenc.retrieval.tasks import register_task
from hf_posenc.retrieval.tasks.base import Needle, Puzzle


@register_task("passkey", has_depth=True, source="Mohtashami and Jaggi 2023, arXiv:2305.16300")
def passkey(rng: Random, context_length: int) -> Puzzle:
    """A number of five digits, hidden once."""
    key = str(rng.randint(10_000, 99_999))
    return Puzzle(
        instruction="A pass key is hidden in the long text below. Find it and remember it. You will be asked for it.",
        question="What is the pass key?",
        answer_prefix="The pass key is",
        answers=(key,),
        needles=(Needle(f"The pass key is {key}. Remember it. {key} is the pass key.", at_depth=True),),
    )
