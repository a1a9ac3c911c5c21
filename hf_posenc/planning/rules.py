"""Which method and recipe to take: a short table of rules, the first that applies decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_posenc.planning.levers import (
    ADAPTERS,
    LORA,
    LORA_4BIT,
    POSE,
    POSE_4BIT,
    POSE_8BIT,
    POSE_LORA,
)
from hf_posenc.training.recipes import ONE_STAGE_FACTOR
from hf_posenc.utils.units import length_name

# Factors up to this were measured to be of use without training (README, "Longer, without a price for short texts").
ZERO_SHOT_FACTOR = 4.0
# In PI (table 4) the whole window is in use after 200 steps at the full length.
FEWEST_STEPS = 200


@dataclass(frozen=True)
class Situation:
    """What the rules look at.

    Attributes:
        model_type: The family.
        original: Tokens the model was trained on.
        reads: Tokens it reads as it is.
        method: The scaling it has, ``"none"`` for none.
        target: Tokens it is to read.
        token_budget: Tokens to train on; None: not said.
        server: Only static rules will do.
        lever: Name of the first lever that makes full training fit; None: unknown, or none does.
        fits: Whether one does; None where the memory is not known.
        training: It is to be trained, whatever works without.
    """

    model_type: str
    original: int
    reads: int
    method: str
    target: int
    token_budget: int | None = None
    server: bool = False
    lever: str | None = None
    fits: bool | None = None
    training: bool = False

    @property
    def factor(self) -> float:
        return self.target / self.original

    @property
    def zero_shot(self) -> bool:
        """Whether a method without training is of use and will do."""
        return self.token_budget is None and not self.training and self.factor <= ZERO_SHOT_FACTOR


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        method: Of ``available_methods``; ``"none"`` to leave the model as it is.
        recipe: A recipe's name; None: no training.
        reasons: Why, each one sentence.
    """

    method: str
    recipe: str | None
    reasons: tuple[str, ...]


Rule = tuple[Callable[[Situation], bool], str, str | None, str]
# Condition, method, recipe, reason. The zero-shot ones come first, then what the memory or the budget leaves, then all.
_RULES: tuple[Rule, ...] = (
    (
        lambda s: s.target <= s.reads,
        "none",
        None,
        "the model reads {reads} tokens as it is, so nothing has to be done for {target}",
    ),
    (
        lambda s: s.zero_shot and s.server,
        "yarn",
        None,
        "a factor of {factor} works without training, and static YaRN is what servers run; short texts pay a little",
    ),
    (
        lambda s: s.zero_shot,
        "dynamic_yarn",
        None,
        "a factor of {factor} works without training, and staged scaling costs nothing up to the original length",
    ),
    (
        lambda s: s.fits is False,
        "yarn",
        "qlora",
        "nothing fits, not even adapters on 4-bit weights in PoSE's windows, which need least: take larger or more "
        "devices",
    ),
    (
        lambda s: s.lever == LORA,
        "yarn",
        "lora-plus",
        "full weights do not fit at the full length; adapters with embedding and norms come close to them "
        "(LongLoRA; its own rule is linear: give --method yarn too)",
    ),
    (
        lambda s: s.lever == ADAPTERS,
        "yarn",
        "lora-plus",
        "of the ways at the full length adapters alone fit, on weights in 16 bits: with --lora-embeddings false "
        "(the recipe's own rule is linear: give --method yarn too)",
    ),
    (
        lambda s: s.lever in (LORA_4BIT, POSE_4BIT),
        "yarn",
        "qlora",
        "weights in 16 bits do not fit; adapters are trained on 4-bit ones{in_windows}",
    ),
    (
        lambda s: s.lever in (POSE, POSE_8BIT),
        "yarn",
        "pose",
        "no block of the full length fits; PoSE shows all distances in windows of the original length",
    ),
    (
        lambda s: s.lever == POSE_LORA,
        "yarn",
        "pose",
        "no block of the full length fits, nor do full weights: PoSE's short windows, with --lora",
    ),
    (
        lambda s: s.token_budget is not None and s.token_budget < FEWEST_STEPS * s.target,
        "yarn",
        "pose",
        "the budget is {steps} blocks of the full length, too few; as PoSE's short windows it is {pose_steps}",
    ),
    (
        lambda s: s.factor > ONE_STAGE_FACTOR,
        "yarn",
        "progressive",
        "a factor of {factor} is more than YaRN trained at once (16): grow in stages",
    ),
    (
        lambda s: s.model_type == "mistral",
        "yarn",
        "yarn-mistral-1000",
        "training at the full length is what YaRN's authors did for Mistral, and it fits",
    ),
    (lambda s: True, "yarn", "yarn-400", "training at the full length is what YaRN's authors did, and it fits"),
)


def advise(situation: Situation) -> Advice:
    """Return what the first rule that applies says, and what else is worth knowing."""
    s = situation
    method, recipe, reason = next((method, recipe, why) for holds, method, recipe, why in _RULES if holds(s))
    words = {
        "reads": length_name(s.reads),
        "target": length_name(s.target),
        "factor": f"{s.factor:g}",
        "in_windows": ", in PoSE's windows of the original length" if s.lever == POSE_4BIT else "",
        "steps": (s.token_budget or 0) // s.target,
        "pose_steps": (s.token_budget or 0) // s.original,
    }
    if s.fits is None:
        reason = reason.replace(", and it fits", "")
    return Advice(method, recipe, (reason.format(**words), *_besides(s, recipe)))


def _besides(s: Situation, recipe: str | None) -> list[str]:
    notes = []
    if s.method != "none" and s.target > s.reads:
        notes.append(
            f"the checkpoint is scaled already ({s.method}, {length_name(s.reads)} tokens): on_scaled='replace' puts "
            "the new rule in its place, with a factor from the original length"
        )
    if recipe is not None and s.token_budget is None and s.factor > ZERO_SHOT_FACTOR:
        notes.append(f"beyond a factor of {ZERO_SHOT_FACTOR:g} no rule is as good without training")
    if recipe is not None and not s.server:
        notes.append("until it is trained, dynamic_yarn is the rule to read with")
    return notes
