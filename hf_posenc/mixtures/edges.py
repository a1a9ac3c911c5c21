"""Who is linked to whom, and questions for all that are linked to one."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Dialogues
from hf_posenc.mixtures.made_up import names, titles

# The first line, an edge, the question for its sources, and the answer.
_RELATIONS = (
    ("Teachers and pupils:", "{source} taught {target}", "Who taught {target}?", "{target} learned from {sources}."),
    ("Old letters:", "{source} wrote to {target}", "Who wrote to {target}?", "{target} had letters from {sources}."),
    ("Ferries:", "{source} sails to {target}", "Which ferries reach {target}?", "{target} is reached from {sources}."),
    ("A family book:", "{source}, parent of {target}", "Name the parents of {target}.", "{sources}."),
)
_BETWEEN = (".\n", ". ", "; ", "\n")
_MOST_SOURCES = 3


@register_kind
class Edges(Dialogues):
    """The edges of a directed graph in words, and questions for every source of an edge to some of its nodes.

    One to three answers of a question are anywhere in the text, and are given in its order; other edges lead to nodes
    that are not asked for. So the whole text counts, and not one place of it.
    """

    name: ClassVar[str] = "edges"
    least: ClassVar[int] = 2

    def turns(self, rng: Random, count: int) -> list[tuple[str, str]]:
        heading, edge, question, answer = rng.choice(_RELATIONS)
        between, draw = rng.choice(_BETWEEN), rng.choice((names, titles))
        nodes = draw(rng, 4 + count // 2)
        asked = nodes[: max(1, min(self.material.num_questions, count // (2 * _MOST_SOURCES)))]
        others = nodes[len(asked) :]
        edges: dict[tuple[str, str], None] = {}  # in the order in which they are made, each once
        for target in asked:
            number = rng.randint(1, min(_MOST_SOURCES, count))
            edges |= dict.fromkeys((source, target) for source in rng.sample(others, number))
        while len(edges) < count:
            source, target = rng.sample(others, 2)
            edges[source, target] = None
        shown = list(edges)
        rng.shuffle(shown)
        turns = []
        for node in asked:
            *first, last = [source for source, target in shown if target == node]
            sources = f"{', '.join(first)} and {last}" if first else last
            turns.append((question.format(target=node), answer.format(target=node, sources=sources)))
        text = between.join(edge.format(source=source, target=target) for source, target in shown)
        return [(f"{heading}\n\n{text}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]]
