"""Needles that share no word with their question, as in NoLiMa: the link between them is general knowledge.

The needles are our own; those of the paper may not be used commercially.
"""

from __future__ import annotations

from random import Random

from hf_posenc.errors import InvalidRequestError
from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import PEOPLE, Puzzle, Question, draw_people

# What is said of a person, and what follows from it. No fact is true of two of them, and no content word is in both.
FACTS = (
    ("has rented a flat beside the Eiffel Tower for ten years", "lives in France"),
    ("never touches meat, fish, eggs or cheese", "follows a vegan diet"),
    ("gets stomach cramps after a glass of milk", "is lactose intolerant"),
    ("spends every weekend with carburettors and pistons", "could repair an engine"),
    ("keeps forty hives behind the barn", "sells honey"),
    ("knows the craters of the moon by name", "would be glad of a telescope"),
    ("waves a baton in front of eighty violinists", "directs an orchestra"),
    ("has walked with a white cane and a guide dog since birth", "is blind"),
    ("hangs up the stethoscope when the last patient has gone", "is a doctor"),
    ("sneezes as soon as a cat comes near", "ought not to adopt a kitten"),
    ("turns dizzy on the second rung of a ladder", "is afraid of heights"),
    ("reads hieroglyphs as others read the newspaper", "could translate a papyrus of the pharaohs"),
    ("grew up at the foot of Mount Fuji", "speaks Japanese"),
    ("was born nine minutes after an identical sister", "has a twin"),
    ("lights the oven at three in the morning and kneads the dough", "makes bread"),
    ("won the marathon on Sunday", "can run for hours"),
    ("stopped two penalty kicks between the posts", "plays football as a goalkeeper"),
    ("rounded Cape Horn alone under sail", "could steer a yacht"),
    ("gave the speech of the opposition in parliament", "is a politician"),
    ("talks with both hands and follows the lips of others", "is deaf"),
    ("sees the towers of the Kremlin from the kitchen window", "has a home in Moscow"),
    ("owes a month's wages to each of four banks", "is deep in debt"),
    ("wore a veil and said yes at the altar on Saturday", "is newly married"),
    ("hammers glowing horseshoes on the anvil", "works as a blacksmith"),
    ("pours away all wine and beer", "refuses alcohol"),
    ("lost a rook and still announced mate in three", "is good at chess"),
    ("drilled and filled six molars before lunch", "is a dentist"),
    ("sweeps the cage of the lions when they have eaten", "is employed by a zoo"),
    ("took the mail over the Andes in a biplane", "is a pilot"),
    ("blew out a hundred candles on the cake", "is a century old"),
    ("hid the stolen necklace under the floor", "is a thief"),
    ("has slept under bridges since the eviction", "is homeless"),
)


@register_task(
    "nolima", has_depth=True, source="NoLiMa, arXiv:2502.05167, with needles of our own", several_questions=True
)
def nolima(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """Which person something is true of: it follows from a sentence in a book that shares no word with the question.

    One such sentence is hidden; with several questions, one for each. It is the book that grows with the length.
    """
    if num_questions > len(FACTS):
        raise InvalidRequestError(
            f"task 'nolima' has {len(FACTS)} needles, so a text cannot have {num_questions} questions: ask less of one "
            "text, and of more texts."
        )
    people = draw_people(rng, num_questions)
    facts = rng.sample(FACTS, num_questions)
    return Puzzle(
        instruction="Sentences about people are hidden in the book below. Remember them. You will be asked about one.",
        questions=tuple(
            Question(
                text=f"Question: In the book above, which person {follows}?",
                answer_prefix=f"Answer: The person who {follows} is",
                answers=(person,),
                choices=PEOPLE,
                needles=(at,),
            )
            for at, (person, (_, follows)) in enumerate(zip(people, facts, strict=True))
        ),
        needles=tuple(f"{person} {fact}." for person, (fact, _) in zip(people, facts, strict=True)),
    )
