"""The settings of a fit: the rule, the way and the time; imports no PyTorch, so that help answers at once."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownNameError, argument
from hf_posenc.evaluation.config import OutputConfig
from hf_posenc.patching.extension_config import NO_METHOD, ExtensionConfig
from hf_posenc.settings import check_settings, flag, number, same_field, setting, share, whole, word
from hf_posenc.spec import check_length, check_number
from hf_posenc.utils.units import ContextLength, Duration

if TYPE_CHECKING:
    from hf_posenc.methods.base import Method

# What a fitted rule has to be better than: the static rules that need no training, and the model as it is.
GRID = "grid"
PUBLISHED = (NO_METHOD, "linear", "ntk", "ntk_rcd", "yarn", "llama3")
# What a fit keeps in its folder, to go on after it was stopped.
WORK_FILES = ("teacher-*", "fit_state*", "steps*", "results.jsonl*", "seeds.jsonl*", "adapter-*")
# The files of the folder: importing them would import PyTorch.
_FOLDER = Path(__file__).with_name("objectives")
OBJECTIVES = tuple(sorted(one.name for one in pkgutil.iter_modules([str(_FOLDER)]) if one.name != "base"))
_MOST_ROUNDS = 3  # times that all steps of --adapt may be taken, in a layer whose error stays large


def rule_of(name: str, factor: float) -> Method:
    """Return what a method, a preset or the folder of an earlier fit is at a factor.

    Raises:
        ValueError, OSError: There is none of this name, and no folder of a fit.
    """
    from hf_posenc.methods.registry import make_method, methods
    from hf_posenc.patching.presets import presets

    if name not in methods():
        if (preset := presets().get(name)) is not None:
            return make_method(preset.method, factor, preset.options)
        if Path(name).expanduser().exists():
            return make_method("fitted", factor, {"source": name})
    return make_method(name, factor)


@dataclass(frozen=True)
class AdaptConfig:
    """The low-rank changes of the query and key projections, by which a model reads with an existing rule."""

    rule: str = setting("llama3", None, "static method, preset, or folder of an earlier fit")
    rank: int = setting(64, whole(1), "rank of the changes")
    steps: int = setting(
        600, whole(1), "steps of Adam in each layer; up to three times as many if its error stays large"
    )
    queries: int = setting(96, whole(1), "queries of a step")
    learning_rate: float = setting(6e-3, number(above=0), "of Adam; it falls to a tenth")
    short_steps: int = setting(36, whole(0), "steps of Adam on short texts, with all layers together")
    short_rate: float = setting(1e-3, number(above=0), "their learning rate; it falls to a tenth")

    def __post_init__(self) -> None:
        check_settings(self, lambda name: f"{argument('adapt')} {name}")
        if not isinstance(self.rule, str):
            raise InvalidTypeError(f"{argument('adapt')} rule must be the name of a method, got {self.rule!r}.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AdaptConfig:
        """Return the settings that are given by name.

        Raises:
            ValueError: A name is unknown, or a value is out of range.
        """
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownNameError(f"setting of {argument('adapt')}", name, known)
        return cls(**given)


# Settings of FitConfig that decide a fitted rule.
OF_THE_RULE = (
    "objectives",
    "start",
    "steps",
    "learning_rate",
    "keep_rotations",
    "lower_bound",
    "monotone",
    "smoothness",
    "fit_temperature",
    "short_share",
    "queries",
    "layers",
    "block",
    "questions",
    "fitted_numbers",
    "take_best",
    "short_list",
)


@dataclass
class FitConfig:
    """What is fitted, how, and for how long."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = (
        "context_length",
        "teacher",
        "objectives",
        "max_texts",
        "steps",
        "compare",
        "held_out_numbers",
        "budget",
        "dry_run",
    )

    context_length: ContextLength = field(metadata={"help": "tokens the model is to read (32k = 32768)"})
    teacher: str = setting(
        "dca",
        None,
        "method whose attention is matched, from `hf-posenc list methods`; none: the unextended model, for texts "
        "within its original length",
    )
    objectives: list[str] = field(
        default_factory=lambda: ["attention_matching"],
        metadata={"help": f"what is lowered, each as NAME or NAME=WEIGHT: {', '.join(OBJECTIVES)}", "metavar": "NAME"},
    )
    start: str = setting(
        "ntk",
        None,
        "static method to begin at, preset, or folder of an earlier fit; grid: the best of a small grid of ntk_rcd "
        "and yarn_rcd",
    )
    steps: int = setting(100, whole(1), "steps of Adam")
    learning_rate: float = setting(0.05, number(above=0), "of Adam, on the logarithms of the divisors")
    keep_rotations: float = setting(
        30.0, number(above=0), "pairs of at least so many rotations over the original length keep a divisor of 1"
    )
    lower_bound: Literal["none", "critical"] = setting(
        "none",
        word("none", "critical"),
        "critical: pairs that make less than one rotation over the original length are divided by at least the factor",
    )
    monotone: bool = setting(False, flag, "no divisor is less than that of a faster pair")
    smoothness: float = setting(
        0.0, number(at_least=0), "weight of the squared second difference of neighbouring divisors' logarithms"
    )
    fit_temperature: bool = setting(True, flag, "fit the attention factor too; false: it is 1")
    short_share: float = setting(0.4, share, "share of the queries, blocks and questions within the original length")
    queries: int = setting(64, whole(1), "attention_matching: queries of a step in each layer")
    layers: int = setting(10, whole(1), "attention_matching: layers of a step")
    block: int = setting(256, whole(1), "tokens of a block")
    questions: int = setting(8, whole(1), "needles: questions of a step")
    fitted_numbers: int = setting(32, whole(1), "needles: numbers hidden in each text that is fitted on")
    seed: int = setting(0, None, "of everything random")
    seeds: int = setting(
        1, whole(1), "fit with this many seeds, and say by how much the perplexities at the target length differ"
    )
    max_texts: int = setting(
        1, whole(1), "texts of the target length to fit on, at most, evenly spread over the documents"
    )
    held_out: int = setting(
        1, whole(0), "texts that are kept apart, of the last documents, and measured at the end; 0: nothing is measured"
    )
    compare: list[str] = field(
        default_factory=lambda: list(PUBLISHED),
        metadata={"help": "static methods to compare the result with on the held-out texts; none: the model as it is"},
    )
    held_out_numbers: int = setting(
        24,
        whole(0),
        "numbers hidden in a held-out text that the result, and the published rule of the lowest perplexity, are "
        "asked for at the target length; 0: none",
    )
    take_best: bool = setting(
        False, flag, "if another of the compared rules is better than the fitted one, save that one instead"
    )
    short_list: Literal["equal", "plain"] = setting(
        "equal",
        word("equal", "plain"),
        "the list for texts up to the original length: equal, the fitted one, or plain, all ones, with which a KV "
        "cache that grows past the original length is wrong",
    )
    budget: Duration | None = setting(None, None, "time to take (20m), about: fewer steps, and fewer compared methods")
    dry_run: bool = setting(False, flag, "only show what it will take")
    original_max_position_embeddings: ContextLength | None = same_field(
        ExtensionConfig, "original_max_position_embeddings"
    )
    hide_progress: bool = same_field(OutputConfig, "hide_progress")
    teacher_options: dict[str, Any] = setting(dict, None, argparse.SUPPRESS)
    # Settings of AdaptConfig by name; None fits a rule, and no weight changes.
    adapt_options: dict[str, Any] | None = setting(None, None, argparse.SUPPRESS)

    @property
    def adapt(self) -> AdaptConfig | None:
        """How weights are changed, for an existing rule; None where a rule is fitted.

        Raises:
            ValueError: A setting of it is unknown or out of range.
        """
        return None if self.adapt_options is None else AdaptConfig.of(self.adapt_options)

    @property
    def most_rounds(self) -> int:
        """How often the steps of a layer may be taken where its error stays large; a budget counts them once."""
        return _MOST_ROUNDS if self.budget is None else 1

    def request(self, method: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the keywords of ``patch_model`` for a method at the target."""
        original = self.original_max_position_embeddings
        return {
            "method": method,
            "context_length": int(self.context_length),
            "original_max_position_embeddings": None if original is None else int(original),
            **(options or {}),
        }

    def teacher_request(self) -> dict[str, Any] | None:
        """Return the keywords of ``patch_model`` for the teacher; None for the unextended model."""
        return None if self.teacher == NO_METHOD else self.request(self.teacher, self.teacher_options)

    def rule_request(self) -> dict[str, Any] | None:
        """Return the keywords of ``patch_model`` for the rule of changed weights; None where a rule is fitted."""
        if self.adapt is None:
            return None
        rule = rule_of(self.adapt.rule, 1.0)
        return self.request(rule.name, rule.changed_options())

    def original(self, trained: int) -> int:
        """Return the original length of a model in tokens: as requested, or else the one it was trained with."""
        return int(self.original_max_position_embeddings or trained)

    def weights(self) -> dict[str, float]:
        """Return the weight of each objective.

        Raises:
            ValueError: One is unknown or named twice, or a weight is no number above 0.
        """
        weights: dict[str, float] = {}
        for each in self.objectives:
            name, equals, text = each.partition("=")
            if name not in OBJECTIVES:
                raise UnknownNameError("objective", name, OBJECTIVES)
            if name in weights:
                raise InvalidRequestError(f"{argument('objectives')}: {name!r} is given twice.")
            try:
                weights[name] = check_number(f"the weight of {name}", float(text) if equals else 1.0, above=0)
            except ValueError as error:
                raise InvalidRequestError(
                    f"{argument('objectives')} takes NAME or NAME=WEIGHT, such as needles=0.2, got {each!r}: {error}"
                ) from error
        if not weights:
            raise InvalidRequestError(f"{argument('objectives')} is empty: give at least one of {OBJECTIVES}.")
        return weights

    def check(self) -> None:
        """Check what can be checked before a model is loaded.

        Raises:
            ValueError, TypeError: A name is unknown or a value is out of range.
        """
        from hf_posenc.methods.base import AttentionMethod, StaticMethod
        from hf_posenc.methods.registry import get_method, make_method

        self.weights()
        check_settings(self)
        self.context_length = ContextLength(check_length(argument("context_length"), self.context_length))
        if self.teacher != NO_METHOD and not issubclass(get_method(self.teacher), (AttentionMethod, StaticMethod)):
            raise InvalidRequestError(f"{argument('teacher')} must be a method for RoPE, got {self.teacher!r}.")
        if self.teacher != NO_METHOD:
            make_method(self.teacher, 1.0, self.teacher_options)
        elif self.teacher_options:
            raise InvalidRequestError(
                f"the teacher is the unextended model, which has no options, got {self.teacher_options}: name the "
                f"{argument('teacher')} they are for."
            )
        if self.adapt_options is not None:
            self._check_adapt()
        named = [("compare", name, get_method(name)) for name in self.compare if name != NO_METHOD]
        if self.start != GRID:
            named.append(("start", self.start, type(rule_of(self.start, 1.0))))
        if self.adapt is not None:
            named.append(("adapt", self.adapt.rule, type(rule_of(self.adapt.rule, 1.0))))
        for setting_name, name, method in named:
            if not issubclass(method, StaticMethod):
                raise InvalidRequestError(
                    f"{argument(setting_name)} takes static methods, got {name!r}: servers run no other, and a list of "
                    "divisors expresses no other."
                )

    def _check_adapt(self) -> None:
        """Check the settings of the low-rank changes, and those that do not go with them."""
        from hf_posenc.methods.base import AttentionMethod
        from hf_posenc.methods.registry import get_method

        if self.teacher != NO_METHOD and not issubclass(get_method(self.teacher), AttentionMethod):
            raise InvalidRequestError(
                f"{argument('adapt')} takes a {argument('teacher')} that leaves the model's frequencies alone, such as "
                f"'dca', or none; got {self.teacher!r}."
            )
        default = FitConfig(self.context_length)
        if given := [name for name in OF_THE_RULE if getattr(self, name) != getattr(default, name)]:
            raise InvalidRequestError(
                f"{argument('adapt')} changes weights for an existing rule (rule=NAME, or the folder of an earlier "
                f"fit), and fits none: leave out {', '.join(map(argument, given))}."
            )
