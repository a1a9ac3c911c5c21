"""Walks on a graph that is given as a long list of edges: breadth-first search, and the parents of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question

_SOURCE = "GraphWalks (OpenAI 2025, huggingface.co/datasets/openai/graphwalks), in our words"
_STEPS = 2
_CHILDREN = 2  # of each node that the search passes
_PARENTS = 3
_TOKENS_PER_NODE = 40  # of context, so that about three edges begin at a node
_Edge = tuple[str, str]


@register_task("graph_bfs", has_depth=False, source=_SOURCE, several_questions=True)
def graph_bfs(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """All nodes exactly two steps from a node, breadth-first, in a random graph that is a list of edges.

    The list fills the text, so edges and nodes grow with the length. Each question begins at a node of its own.
    """
    levels = [_CHILDREN**step for step in range(_STEPS + 1)]
    special, others = _nodes(rng, num_questions * sum(levels), context_length)
    trees = [special[at : at + sum(levels)] for at in range(0, len(special), sum(levels))]
    # Node i of a tree is the parent of the nodes 2 i + 1 and 2 i + 2.
    edges = [(tree[(at - 1) // _CHILDREN], tree[at]) for tree in trees for at in range(1, len(tree))]
    rng.shuffle(edges)
    leaves = [node for tree in trees for node in tree[-levels[-1] :]]
    return _puzzle(
        edges,
        tuple(
            Question(
                text=(
                    f"Question: Which nodes are exactly {_STEPS} steps from {tree[0]}? Search breadth-first, and take "
                    "the edges of a node in the order of the list."
                ),
                answer_prefix=f"Answer: The nodes exactly {_STEPS} steps from {tree[0]} are:",
                answers=tuple(_at_steps(edges, tree[0], _STEPS)),
                needles=tuple(at for at, (source, _) in enumerate(edges) if source in tree),
            )
            for tree in trees
        ),
        # No other edge leaves a node that the search passes; those of the last step go on.
        _Others([*others, *leaves], [*others, *special], rng.random()),
    )


@register_task("graph_parents", has_depth=False, source=_SOURCE, several_questions=True)
def graph_parents(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """All nodes with an edge to a node, in a random graph that is a list of edges.

    The list fills the text, so edges and nodes grow with the length. Each question asks about a node of its own.
    """
    asked, others = _nodes(rng, num_questions, context_length)
    edges = [(parent, node) for node in asked for parent in rng.sample(others, _PARENTS)]
    rng.shuffle(edges)
    return _puzzle(
        edges,
        tuple(
            Question(
                text=f"Question: From which nodes does an edge go to {node}? Name them in the order of the list.",
                answer_prefix=f"Answer: The nodes from which an edge goes to {node} are:",
                answers=tuple(source for source, target in edges if target == node),
                needles=tuple(at for at, (_, target) in enumerate(edges) if target == node),
            )
            for node in asked
        ),
        _Others([*others, *asked], others, rng.random()),
    )


def _puzzle(edges: Sequence[_Edge], questions: tuple[Question, ...], others: _Others) -> Puzzle:
    return Puzzle(
        instruction=(
            "Below is a list of the edges of a directed graph. The line 'a -> b' is an edge from node a to node b. "
            "Remember them."
        ),
        questions=questions,
        needles=tuple(_line(*edge) for edge in edges),
        lines=others.lines,
    )


@dataclass(frozen=True)
class _Others:
    """Edges that change no answer, each once: from any of ``sources`` to any of ``targets``."""

    sources: Sequence[str]
    targets: Sequence[str]
    seed: float

    def lines(self) -> Iterator[str]:
        rng, seen = Random(self.seed), set[_Edge]()
        while len(seen) < len(self.sources) * len(self.targets) // 2:
            edge = rng.choice(self.sources), rng.choice(self.targets)
            if edge[0] != edge[1] and edge not in seen:
                seen.add(edge)
                yield _line(*edge)


def _line(source: str, target: str) -> str:
    return f"{source} -> {target}"


def _nodes(rng: Random, num_special: int, context_length: int) -> tuple[list[str], list[str]]:
    """Return the nodes that questions are about, and the others; each six hexadecimal digits."""
    count = num_special + max(context_length // _TOKENS_PER_NODE, 2 * _PARENTS)
    nodes = [f"{number:06x}" for number in rng.sample(range(16**6), count)]
    return nodes[:num_special], nodes[num_special:]


def _at_steps(edges: Sequence[_Edge], start: str, steps: int) -> list[str]:
    """Return the nodes at that distance in a tree, in the order of a breadth-first search."""
    reached = [start]
    for _ in range(steps):
        reached = [target for node in reached for source, target in edges if source == node]
    return reached
