"""Sentences hidden in the documents, and a dialogue that asks for some of them."""

from __future__ import annotations

import re
from random import Random
from typing import ClassVar

from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Dialogues
from hf_posenc.mixtures.made_up import Marks, amount, date, longest_mark, names, phrase, titles

# What is hidden, the question, the answer; and what the value is.
_FORMS = (
    (
        "People from {key} greet each other by saying {value}.",
        "What do people from {key} say when they greet each other?",
        "They greet each other by saying {value}.",
        phrase,
    ),
    (
        "The ship {key} sails with {value} painted on its bow.",
        "What is painted on the bow of the ship {key}?",
        "On its bow is painted {value}.",
        phrase,
    ),
    (
        "At the inn of {key} they serve a soup called {value}.",
        "Which soup do they serve at the inn of {key}?",
        "At that inn they serve {value}.",
        phrase,
    ),
    (
        "The bell of {key} was cast for {value}.",
        "What did they pay for the bell of {key}?",
        "For that bell they paid {value}.",
        amount,
    ),
    (
        "The bridge at {key} was opened on {value}.",
        "When was the bridge at {key} opened?",
        "That bridge was opened on {value}.",
        date,
    ),
)
# The same of a value that is a mark, whose length depends on that of a block.
_MARKED = (
    "Every crate that leaves {key} is marked {value}.",
    "What is marked on the crates that leave {key}?",
    "On these crates is marked {value}.",
)
_SENTENCE_END = re.compile(r"[.!?][\"')\]\u201d\u2019]*\s+")


@register_kind
class NeedleDialogues(Dialogues):
    """Sentences about made-up names, hidden at random depths of the documents; half of them are asked for.

    The questions come in another order than the sentences, and those that are not asked for have the same forms. That
    the answers alone count is from Xiong et al. (2024, arXiv:2406.19292). Needles as distractors of each other are
    RULER's (arXiv:2404.06654, section 3), in other forms and with other values than any task of ``hf-posenc eval
    --tasks`` has.
    """

    name: ClassVar[str] = "needles"
    reads_texts: ClassVar[bool] = True
    least: ClassVar[int] = 16  # tokens of text

    def turns(self, rng: Random, count: int) -> list[tuple[str, str]]:
        asked, longest = self.material.num_questions, longest_mark(self.material.seq_len)
        forms = (*_FORMS, (*_MARKED, lambda rng: Marks.of_any_form(rng, longest).one(rng)))
        places = []
        for key in rng.choice((names, titles))(rng, 2 * asked):
            *form, make = rng.choice(forms)
            value = make(rng)
            places.append([part.format(key=key, value=value) for part in form])
        text = self.material.tokenizer.decode(self.material.stretch(count, rng), skip_special_tokens=True)
        hidden = _hide([sentence for sentence, _, _ in places], str(text).strip(), rng)
        turns = [(question, answer) for _, question, answer in rng.sample(places, asked)]
        first, answer = turns[0]
        return [(f"Some remarks are mixed into this excerpt.\n\n{hidden}\n\n{first}", answer), *turns[1:]]


def _hide(sentences: list[str], text: str, rng: Random) -> str:
    """Return a text with sentences in it, each where a sentence ends, or a word, if one does near its depth."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    parts, last = [], 0
    for depth, sentence in sorted((rng.randint(0, len(text)), sentence) for sentence in sentences):
        blank = text.find(" ", depth) + 1 or len(text)
        place = max(last, next((end for end in ends if depth <= end <= depth + 200), blank))
        parts += [text[last:place], sentence, " "]
        last = place
    return "".join([*parts, text[last:]])
