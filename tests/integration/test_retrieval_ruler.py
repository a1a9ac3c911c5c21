"""Our prompts beside those of RULER's own generators: the same rules answer both, with equal counts and lengths."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.prompts import PromptMaker
from hf_posenc.retrieving.tasks import tasks
from ruler import generate

pytestmark = pytest.mark.slow
COUNT = 40
REPEAT = ("--type_haystack", "repeat")  # its essays need data that is not in the package
GENERATORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "niah_single_2": ("niah", REPEAT),
    "niah_multikey_1": ("niah", (*REPEAT, "--num_needle_k", "4")),
    "niah_multivalue": ("niah", (*REPEAT, "--num_needle_v", "4")),
    "niah_multiquery": ("niah", (*REPEAT, "--num_needle_q", "4")),
    "vt": ("variable_tracking", ()),
    "cwe": ("common_words_extraction", ()),
    "fwe": ("freq_words_extraction", ()),
}
FORMS = {"niah": r"[1-9]\d{6}", "vt": "[A-Z]{5}", "cwe": r"[\w' -]+", "fwe": "[a-z]{6}"}


@dataclass(frozen=True)
class Seen:
    """What a prompt shows: how many needles (or different words), and which answers follow from them."""

    size: int
    answers: frozenset[str]
    profile: tuple[int, ...] = ()


def see(task: str, text: str) -> Seen:
    """Read a prompt by the task's definition, RULER's and ours alike."""
    if task.startswith("niah"):
        found = re.findall(r"One of the (?:special magic|secret) numbers (?:for|of) (.+?) is:? (\d+)\.", text)
        question = (
            text.strip().splitlines()[-1] if "What" in text.strip().splitlines()[-1] else text.rpartition("What")[2]
        )
        wanted = {key for key, _ in found if key in question}
        return Seen(len(found), frozenset(number for key, number in found if key in wanted))
    if task == "vt":
        lines = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text)  # the worked example has other lengths
        value = re.findall(r"value (\d{5})", text)[-1]
        same: set[str] = set()
        for name, source in lines:
            same |= {name} if source == value or source in same else set()
        return Seen(len(lines), frozenset(same))
    if task == "cwe":
        words = re.findall(
            r"\d+\. (.+?)(?=\s+\d+\. |\s*$)", text.rpartition("numbered list")[2].rpartition("Question:")[0]
        )
        ranked = Counter(words).most_common()
        return Seen(0, frozenset(word for word, _ in ranked[:10]), tuple(sorted({count for _, count in ranked})))
    words = [word for word in text.rpartition("Question:")[0].split() if re.fullmatch(r"\.\.\.|[a-z]{6}", word)]
    counts = Counter(words[_instruction(words) :])
    ranked = [word for word, _ in counts.most_common(4) if word != "..."]
    # noise to first word: four to one
    return Seen(0, frozenset(ranked), (round(counts["..."] / counts[ranked[0]]),))


def _instruction(words: list[str]) -> int:
    """Return where the coded text begins: its first dots."""
    return words.index("...")


@pytest.mark.parametrize(("task", "length"), [*((task, 2048) for task in GENERATORS), ("cwe", 6144), ("fwe", 6144)])
def test_prompts_are_those_of_rulers_definitions(task: str, length: int, tmp_path: Path) -> None:
    kind, flags = GENERATORS[task]
    theirs = generate(kind, length, COUNT, tiny_model_path(), tmp_path, *flags)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, [load_novel(HELD_OUT_NOVEL)]), "off")
    depth = 40.0 if tasks()[task].has_depth else None
    ours = [maker.make(task, length, depth, seed)[0] for seed in range(COUNT)]
    seen_theirs = [see(task, their["input"]) for their in theirs]
    seen_ours = [see(task, tokenizer.decode(our.ids)) for our in ours]
    assert [set(seen.answers) for seen in seen_theirs] == [set(their["outputs"]) for their in theirs]
    assert [set(seen.answers) for seen in seen_ours] == [set(our.answers) for our in ours]
    assert {(seen.size, len(seen.answers), seen.profile) for seen in seen_theirs} == {
        (seen.size, len(seen.answers), seen.profile) for seen in seen_ours
    }
    form = FORMS[task.partition("_")[0]]
    assert all(re.fullmatch(form, answer) for seen in (*seen_theirs, *seen_ours) for answer in seen.answers)
    used = [len(our.ids) + our.max_new_tokens for our in ours]
    assert max(used) <= length
    assert min(used) >= length - 40
    if task != "fwe":  # whose generator leaves the answer out of the budget
        assert max(their["length"] for their in theirs) <= length
        assert min(used) >= max(their["length"] for their in theirs) - 40
