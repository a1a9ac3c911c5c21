"""What tests of every task know of each; and solvers of those that are not RULER's, by the definition alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from hf_posenc.retrieving.tasks import tasks
from hf_posenc.retrieving.tasks.nolima import FACTS

OF_FEW = ("babilong_qa1", "babilong_qa2", "babilong_qa3", "nolima")  # answers: eight places, sixty names
# Tokens that a text may be shorter than its room: a line, or a word more of a list, which is up to three entries.
UNUSED = dict.fromkeys(tasks(), 0) | dict.fromkeys(("cwe", "fwe", "graph_bfs", "graph_parents"), 40)
UNUSED |= dict.fromkeys(("kv", "mrcr", "niah_single_1", "niah_multikey_2", "niah_multikey_3"), 120)
# How each task begins the answer, with no chat template.
BEGUN = (
    r'The value of the key "[^"]+" is|Answer: The nodes exactly 2 steps from \w+ are:'
    r"|Answer: The nodes from which an edge goes to \w+ are:|Answer: (?:The )?[\w -]+ is now in the"
    r"|Answer: Before that, the [\w -]+ was in the|Answer: The \w+ \w+ about \w+ is:|Answer: The person who [^:]+ is"
)


def key_value(text: str, key: str) -> list[str]:
    """Return the value of a key in the JSON object that is the text's only one."""
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return [found[key]]


def nodes_at_two_steps(text: str, start: str) -> list[str]:
    """Return the nodes whose shortest way from the start has two edges, in the order in which they are found."""
    steps, queue = {start: 0}, [start]
    for node in queue:
        for source, target in _edges(text):
            if source == node and target not in steps:
                steps[target] = steps[node] + 1
                queue.append(target)
    return [node for node in queue if steps[node] == 2]


def parents(text: str, node: str) -> list[str]:
    """Return where edges to a node begin, in the order of the list."""
    return [source for source, target in _edges(text) if target == node]


def place_now(text: str, who: str) -> list[str]:
    """Return where a person or a thing is."""
    return _places(text, who)[-1:]


def place_before(text: str, thing: str) -> list[str]:
    """Return where a thing was before the place where it is."""
    return _places(text, thing)[-2:-1]


def verse(text: str, ordinal: str, kind: str, subject: str) -> list[str]:
    """Return the lines of a verse in a talk."""
    found = re.findall(rf"User: Write a {kind} about {subject}\.\nAssistant: (.+)\.", text)
    return list(found[["first", "second", "third", "fourth"].index(ordinal)].split(", "))


def person(text: str, follows: str) -> list[str]:
    """Return who a sentence is about from which something follows."""
    (fact,) = (fact for fact, what in FACTS if what == follows)
    return re.findall(rf"^(\w+) {fact}\.$", text, re.MULTILINE)


# A question, and who answers it from the text and the question's own words.
SOLVERS: tuple[tuple[str, Callable[..., list[str]]], ...] = (
    (r'the key "(.+)" in the JSON object', key_value),
    (r"exactly 2 steps from (\w+)\?", nodes_at_two_steps),
    (r"does an edge go to (\w+)\?", parents),
    (r"Where is (?:the )?(.+) now\?", place_now),
    (r"Where was the (.+) before it came to", place_before),
    (r"What is the (\w+) (\w+) about (\w+) in the talk", verse),
    (r"which person (.+)\?", person),
)


def solve_by_definition(text: str, question: str) -> list[str] | None:
    """Return the answers, or None to a question of another task."""
    for pattern, solver in SOLVERS:
        if found := re.search(pattern, question):
            return solver(text, *found.groups())
    return None


def _edges(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\w+) -> (\w+)$", text, re.MULTILINE)


def _places(text: str, name: str) -> list[str]:
    """Return the different places of a person or thing, one after the other, from what the sentences say."""
    at: dict[str, list[str]] = {}
    holders: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(
            r"([A-Z]\w+) (?:walked over to|has come to|now stands in|moved on to) the (\w+)\.", line
        ):
            for one in (found[1], *(thing for thing, who in holders.items() if who == found[1])):
                at.setdefault(one, []).append(found[2])
        elif found := re.fullmatch(r"([A-Z]\w+) (?:picked up the|took the|got hold of the) (.+?)(?: along)?\.", line):
            assert found[2] not in holders
            holders[found[2]] = found[1]
            here = at.get(found[1], [])[-1:]
            assert at.setdefault(found[2], here)[-1:] in (here, [])
        elif found := re.fullmatch(r"([A-Z]\w+) (?:put the|left the|parted with the) (.+?)(?: down| there)?\.", line):
            assert holders.pop(found[2], found[1]) == found[1]
            at.setdefault(found[2], at[found[1]][-1:])
    return at[name]
