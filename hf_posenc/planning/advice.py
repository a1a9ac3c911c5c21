"""The choice of method and recipe: a short table of rules, the first that applies decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hf_posenc.families.unmasked_layers import in_words
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.planning.training_options import ADAPTERS, LORA, LORA_4BIT, POSE, POSE_4BIT, POSE_8BIT, POSE_LORA
from hf_posenc.training.recipes import ONE_STAGE_FACTOR
from hf_posenc.utils.units import length_name

# Factors up to this were measured to be of use without training (docs/pages/results/zero-shot.md).
ZERO_SHOT_FACTOR = 4.0
# Of the methods without training the one for every length; as long as nothing is trained, too.
ZERO_SHOT_METHOD = "dynamic_yarn"
# The static methods to take, the first that a model's config can say (Gemma 4's has no yarn).
STATIC_METHODS = (DEFAULT_METHOD, "ntk")
# In PI (table 4) the whole window is in use after 200 steps at the full length.
FEWEST_STEPS = 200


@dataclass(frozen=True)
class Situation:
    """The facts that the rules read.

    Attributes:
        model_type: The family.
        original: Tokens the model was trained on.
        reads: Tokens it reads as it is.
        method: The scaling it has, ``"none"`` for none.
        target: Tokens it is to read.
        token_budget: Tokens to train on; None: not said.
        server: Only static rules will do.
        option: Name of the first training option that fits; None: unknown, or none does.
        fits: Whether one does; None where the memory is not known.
        training: It is to be trained, whatever works without.
        unmasked: Layers that no mask keeps packed documents apart in, by kind (``unmasked_layers``).
        static_method: One of ``STATIC_METHODS``.
        no_staged: Why ``ZERO_SHOT_METHOD`` is not for the model; None if it is.
    """

    model_type: str
    original: int
    reads: int
    method: str
    target: int
    token_budget: int | None = None
    server: bool = False
    option: str | None = None
    fits: bool | None = None
    training: bool = False
    static_method: str = DEFAULT_METHOD
    no_staged: str | None = None
    unmasked: Mapping[str, int] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return self.target / self.original

    @property
    def zero_shot(self) -> bool:
        """Whether a method without training is of use and will do."""
        return self.token_budget is None and not self.training and self.factor <= ZERO_SHOT_FACTOR

    @property
    def zero_shot_method(self) -> str:
        """The method to read with where nothing is trained."""
        return self.static_method if self.server or self.no_staged else ZERO_SHOT_METHOD


@dataclass(frozen=True)
class Advice:
    """The advised choice.

    Attributes:
        method: One of ``available_methods``; ``"none"`` to leave the model as it is.
        recipe: A recipe's name; None: no training.
        reasons: Why, each one sentence.
    """

    method: str
    recipe: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One piece of advice.

    Attributes:
        holds: Whether it is for a situation.
        reason: Why, formatted with the words of ``advise``.
        recipe: What to train by; None: no training.
        method: The method; None for the static one, which is trained also where a recipe has another or none.
    """

    holds: Callable[[Situation], bool]
    reason: str
    recipe: str | None = None
    method: str | None = None


# The zero-shot ones come first, then what the memory or the budget leaves, then all.
_RULES = (
    Rule(
        lambda s: s.target <= s.reads,
        "the model reads {reads} tokens as it is, so nothing has to be done for {target}",
        method="none",
    ),
    Rule(
        lambda s: s.zero_shot and s.server,
        "a factor of {factor} works without training, and static {static_method} is what servers run; short texts pay "
        "a little, and less after hf-posenc fit --adapt rank=64",
    ),
    Rule(
        lambda s: s.zero_shot and s.no_staged is not None,
        "a factor of {factor} works without training, and static {static_method} is what this model can have "
        "({no_staged}); short texts pay a little",
    ),
    Rule(
        lambda s: s.zero_shot,
        "a factor of {factor} works without training, and staged scaling costs nothing up to the original length",
        method=ZERO_SHOT_METHOD,
    ),
    Rule(
        lambda s: s.fits is False,
        "nothing fits, not even adapters on 4-bit weights in PoSE's windows, which need least: take larger or more "
        "devices",
        "qlora",
    ),
    Rule(
        lambda s: s.option == LORA,
        "full weights do not fit at the full length; adapters with embedding and norms come close to them "
        "(LongLoRA; its own rule is linear: give --method {static_method} too)",
        "lora-plus",
    ),
    Rule(
        lambda s: s.option == ADAPTERS,
        "of the ways at the full length adapters alone fit, on weights in 16 bits: with --lora-embeddings false "
        "(the recipe's own rule is linear: give --method {static_method} too)",
        "lora-plus",
    ),
    Rule(
        lambda s: s.option in (LORA_4BIT, POSE_4BIT),
        "weights in 16 bits do not fit; adapters are trained on 4-bit ones{in_windows}",
        "qlora",
    ),
    Rule(
        lambda s: s.option in (POSE, POSE_8BIT),
        "no block of the full length fits; PoSE shows all distances in windows of the original length",
        "pose",
    ),
    Rule(
        lambda s: s.option == POSE_LORA,
        "no block of the full length fits, nor do full weights: PoSE's short windows, with --lora",
        "pose",
    ),
    Rule(
        lambda s: s.token_budget is not None and s.token_budget < FEWEST_STEPS * s.target,
        "the budget is {steps} blocks of the full length, too few; as PoSE's short windows it is {pose_steps}",
        "pose",
    ),
    Rule(
        lambda s: s.factor > ONE_STAGE_FACTOR,
        "a factor of {factor} is more than YaRN trained at once (16): grow in stages",
        "progressive",
    ),
    Rule(
        lambda s: s.model_type == "mistral",
        "training at the full length is what YaRN's authors did for Mistral{and_it_fits}",
        "yarn-mistral-1000",
    ),
    Rule(lambda s: True, "training at the full length is what YaRN's authors did{and_it_fits}", "yarn-400"),
)


def advise(situation: Situation) -> Advice:
    """Return the advice of the first rule that applies, and other facts worth knowing."""
    s = situation
    rule = next(rule for rule in _RULES if rule.holds(s))
    words = {
        "reads": length_name(s.reads),
        "target": length_name(s.target),
        "factor": f"{s.factor:g}",
        "static_method": s.static_method,
        "no_staged": s.no_staged,
        "in_windows": ", in PoSE's windows of the original length" if s.option == POSE_4BIT else "",
        "and_it_fits": ", and it fits" if s.fits else "",
        "steps": (s.token_budget or 0) // s.target,
        "pose_steps": (s.token_budget or 0) // s.original,
    }
    return Advice(rule.method or s.static_method, rule.recipe, (rule.reason.format(**words), *_besides(s, rule.recipe)))


def _besides(s: Situation, recipe: str | None) -> list[str]:
    notes = []
    if s.method != "none" and s.target > s.reads:
        notes.append(
            f"the checkpoint is scaled already ({s.method}, {length_name(s.reads)} tokens): on_scaled='replace' "
            "takes the new rule instead, with a factor from the original length"
        )
    if recipe is not None and s.static_method != DEFAULT_METHOD:
        notes.append(
            f"the model's config cannot say {DEFAULT_METHOD}, which recipes have: give --method {s.static_method} too"
        )
    if recipe is not None and s.token_budget is None and s.factor > ZERO_SHOT_FACTOR:
        notes.append(f"beyond a factor of {ZERO_SHOT_FACTOR:g} no rule is as good without training")
    if s.unmasked and (recipe is not None or s.training):
        notes.append(
            f"{in_words(s.unmasked)} let a token see others whatever the attention mask says: blocks are of one "
            "document each (--packing false)"
        )
    if recipe is not None and not s.server:
        notes.append(f"until it is trained, {s.zero_shot_method} is the rule to read with")
    return notes
