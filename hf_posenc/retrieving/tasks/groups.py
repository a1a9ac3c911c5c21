"""Names for several tasks at once, such as those of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Tasks that are asked for by one name; ``left_out`` says which of the published ones are not among them."""

    tasks: tuple[str, ...]
    summary: str
    left_out: str = ""


GROUPS = {
    "ruler": Group(
        (
            *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
            *("niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
        ),
        summary="11 of the 13 tasks of RULER, arXiv:2404.06654",
        left_out=(
            "RULER's qa_1 and qa_2 are left out: they need the data sets SQuAD and HotpotQA, and all texts here are "
            "made offline. An average over these 11 tasks is not an average over RULER's 13."
        ),
    ),
    "babilong": Group(
        ("babilong_qa1", "babilong_qa2", "babilong_qa3"), summary="one, two and three supporting facts in a book"
    ),
    "graph": Group(("graph_bfs", "graph_parents"), summary="walks on a list of edges"),
}
