"""``fit_method``: a static rule fitted to a model, or a model's weights to a rule, and measured on held-out texts."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_posenc.attention.installation import check_attention
from hf_posenc.attention.rotation import Rotation
from hf_posenc.errors import AlreadyExtendedError, InvalidRequestError, argument
from hf_posenc.evaluation.documents import Document, hash_token_ids, to_token_ids
from hf_posenc.evaluation.lm_head import check_head, decoder_body
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_json, hash_weights
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.rows import try_rows
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.adapter import Adapter, projections
from hf_posenc.fitting.adapting import adapt
from hf_posenc.fitting.budget import Budget
from hf_posenc.fitting.config import GRID, OF_THE_RULE, FitConfig, rule_of
from hf_posenc.fitting.descent import Descent, Step
from hf_posenc.fitting.grid import best_of_grid
from hf_posenc.fitting.hidden_numbers import HiddenNumber, hide_numbers
from hf_posenc.fitting.measuring import NumbersFound, find_numbers, measure_rows, spread_of_seeds
from hf_posenc.fitting.objectives import get_objective, objectives
from hf_posenc.fitting.problem import FitProblem
from hf_posenc.fitting.recording import RECORDED_QUERIES, Recording, is_recorded, record
from hf_posenc.fitting.rule import RuleParameters, rotations_in_training
from hf_posenc.fitting.rule_attention import attends_once, reads_on_from_keys_and_values, rule_attention
from hf_posenc.fitting.run import Fit, FitRun
from hf_posenc.fitting.splitting import Texts, split_texts
from hf_posenc.fitting.verdict import Verdict, judge
from hf_posenc.methods.base import Frequencies
from hf_posenc.methods.registry import make_method
from hf_posenc.patching.api import describe, is_patched
from hf_posenc.patching.extension import declared_scaling, plain_spec
from hf_posenc.patching.extension_config import NO_METHOD, ExtensionRequest
from hf_posenc.patching.presets import preset_for, presets
from hf_posenc.patching.request import resolve
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.console import quiet
from hf_posenc.utils.files import write_whole
from hf_posenc.utils.units import duration_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitResult:
    """The result of a fit.

    Attributes:
        method: ``"fitted"``, or the method whose rule the weights were changed for.
        options: Its options: ``patch_model(model, result.method, **result.options)`` with the target as
            ``context_length``; with ``original_max_position_embeddings`` too if the settings had it.
        verdict: Whether it is better than the compared rules; None where nothing was measured.
        records: What was measured on the held-out texts, by the method of each row.
        numbers_found: How many numbers hidden in a held-out text were found, by the method of each row.
        steps: What each step measured.
        facts: What was fitted on and how, for the manifest: teacher, seed, texts, tokens, and objectives and steps of
            a rule, or under ``adapted`` the settings of changed weights.
        seconds: How long all of it took.
        adapter: The low-rank changes of the weights that go with the rule; None where no weight changes.
    """

    method: str
    options: dict[str, Any]
    verdict: Verdict | None
    records: dict[str, list[Record]]
    numbers_found: dict[str, NumbersFound]
    steps: list[Step] = field(repr=False)
    facts: dict[str, Any]
    seconds: float
    adapter: Adapter | None = None

    def save(self, file: str | Path) -> Path:
        """Write the rule as a JSON file, which ``patch_model(model, "fitted", source=file)`` reads.

        Raises:
            ValueError: No rule was fitted: the weights were changed for an existing one.
        """
        if self.adapter is not None:
            raise InvalidRequestError(
                f"no rule was fitted: the weights were changed for {self.method!r}, which has a name already. Save the "
                "model that result.adapter.wrap(model) returns."
            )
        rule = {"method": self.method, "options": self.options, "fitted_on": self.facts}
        return write_whole(Path(file).expanduser(), json.dumps(rule, indent=2) + "\n")


def fit_method(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Sequence[Document],
    config: FitConfig,
    *,
    work_dir: str | Path | None = None,
    model_name: str | None = None,
) -> FitResult:
    """Fit a rule to a model, with all weights frozen, or low-rank changes of its weights to a rule.

    A rule is a divisor for each slow pair of features, and one temperature. With ``config.adapt_options``, it is an
    existing one, and the query and key projections are changed for it (``FitResult.adapter``). Either way it is
    static: servers run it. The result is compared with published rules on held-out documents, and is called better only
    where the paired interval says so.

    Args:
        model: A loaded model with a rotary embedding, not extended; it is left as it was.
        tokenizer: Its tokenizer; may be None where documents are token ids and no objective writes text.
        documents: Texts or rows of token ids of at least the target length: those that are fitted on, and one more,
            which is held out.
        config: The settings.
        work_dir: Where the teacher's recordings, the state of the fit and the results are kept, so that a stopped fit
            goes on; None takes a temporary folder.
        model_name: The model in records; None takes where it was loaded from.

    Returns:
        The rule, the changes of the weights if there are any, and what was measured.

    Raises:
        TypeError, ValueError: A setting that cannot be, documents that are too short, a model that is extended already
            or whose family the teacher refuses, losses that are not finite.
    """
    began = time.perf_counter()
    config = copy.deepcopy(config)
    rotary = RotaryModel(model)
    spec, texts, rotation = _checked(rotary, tokenizer, documents, config)
    with _folder(work_dir) as where, evaluation_mode(rotary.model), _frozen(rotary.model):
        folder = Path(where).expanduser()
        run = FitRun(rotary, tokenizer, texts, spec, rotation, config, folder, model_name, Budget(config.budget, began))
        folder.mkdir(parents=True, exist_ok=True)
        fit = _fit_rule if config.adapt is None else _fit_weights
        fits = [fit(run, config.seed + more) for more in range(config.seeds)]
        rows, left_out = measure_rows(run, fits[0])
        left_out += spread_of_seeds(run, rows, fits[1:])
        verdict = judge(rows) if rows else None
        numbers = find_numbers(run, rows, fits[0])
    method, options, adapter, steps, facts = fits[0]
    if verdict is not None and left_out:
        verdict = Verdict(verdict.better, verdict.best, (*verdict.lines, *left_out))
    if config.take_best and verdict is not None and verdict.better is False:
        options = run.options_of(make_method(verdict.best, run.factor))
        facts |= {"instead": verdict.best}
    return FitResult(method, options, verdict, rows, numbers, steps, facts, time.perf_counter() - began, adapter)


def texts_to_fit(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, documents: Sequence[Document], config: FitConfig
) -> Texts:
    """Check a request as ``fit_method`` does, without computing anything; errors as there.

    Returns:
        What would be fitted on, and what would be held out.
    """
    return _checked(RotaryModel(model), tokenizer, documents, config)[1]


def _checked(
    rotary: RotaryModel, tokenizer: PreTrainedTokenizerBase | None, documents: Sequence[Document], config: FitConfig
) -> tuple[RopeSpec, Texts, Rotation]:
    """Return the model's RoPE as it was trained, the texts, and the family's way of rotating, after all checks."""
    config.check()
    spec = _spec_to_fit(rotary, config)
    if tokenizer is None and "needles" in config.weights():
        raise InvalidRequestError("objective 'needles' writes numbers into the texts: it needs a tokenizer.")
    texts = split_texts(
        to_token_ids(documents, tokenizer, rotary.text_config.vocab_size),
        int(config.context_length),
        config.max_texts,
        config.held_out,
    )
    _check_start(rotary, spec, config)
    if config.adapt is not None:
        projections(rotary)
    rotation = _rotation(rotary, config)
    with evaluation_mode(rotary.model):
        if config.adapt is None:
            _check_objectives(rotary, config)
        else:
            _check_layers(rotary)
        check_head(rotary.model)
    _try_rules(rotary, config)
    return spec, texts, rotation


def _check_objectives(rotary: RotaryModel, config: FitConfig) -> None:
    """Raise unless the model's layers are such that each objective can be computed.

    Raises:
        ValueError: One reads on behind recorded keys and values, and these are not all that the model carries on.
    """
    reading_on = [name for name in config.weights() if get_objective(name).reads_on]
    if reading_on and not reads_on_from_keys_and_values(rotary):
        others = [name for name, kind in objectives().items() if not kind.reads_on]
        raise InvalidRequestError(
            f"{' and '.join(map(repr, reading_on))} cannot be used with model_type {rotary.text_config.model_type!r}: "
            "a block is read over the recorded keys and values of each attention layer, and this model needs more of "
            "the text before it (recurrent or convolutional layers, or layers that attend twice). Take "
            f"{', '.join(others[:-1])} or {others[-1]}."
        )


def _check_layers(rotary: RotaryModel) -> None:
    """Raise unless the weights of each layer can be changed on their own.

    Raises:
        ValueError: They are offloaded, or layers attend more than once.
    """
    if any(parameter.is_meta for parameter in rotary.model.parameters()):
        raise InvalidRequestError(
            f"{argument('adapt')} changes weights, and some of this model's were offloaded for lack of memory: load "
            "all of it on one device, such as cpu."
        )
    if not attends_once(rotary):
        raise InvalidRequestError(
            f"{argument('adapt')} cannot be used with model_type {rotary.text_config.model_type!r}: it changes each "
            "attention layer on its own, and layers of this model attend more than once in a forward."
        )


def _check_start(rotary: RotaryModel, spec: RopeSpec, config: FitConfig) -> None:
    """Raise unless there is something to fit, and a rule to begin at or to change weights for.

    Raises:
        ValueError: That rule is a preset for other models, needs options or stops pairs, or every number is held.
    """
    where, name = ("start", config.start) if config.adapt is None else ("adapt", config.adapt.rule)
    if name in presets():
        preset_for(name, rotary.text_config)
    if name != GRID:
        factor = config.context_length / spec.original_max_position_embeddings
        rule = rule_of(name, factor)
        inv_freq, _ = rule.frequencies(spec)
        if not bool((inv_freq[: spec.rotated_pairs] > 0).all()):
            raise InvalidRequestError(
                f"{argument(where)} takes a method that rotates every pair of features, got {name!r}."
            )
        if config.adapt is not None and not torch.equal(rule.frequencies(spec, config.context_length)[0], inv_freq):
            raise InvalidRequestError(
                f"{argument('adapt')} changes weights for one list of frequencies, and {name!r} has another one for "
                "long texts: give a rule with one."
            )
    if not config.fit_temperature and bool((rotations_in_training(spec) >= config.keep_rotations).all()):
        raise InvalidRequestError(
            f"nothing is left to fit: every pair makes at least {argument('keep_rotations')} {config.keep_rotations:g} "
            f"rotations over the original length, and {argument('fit_temperature')} is false."
        )


def _spec_to_fit(rotary: RotaryModel, config: FitConfig) -> RopeSpec:
    """Return the RoPE that the model was trained with.

    Raises:
        ValueError: It is extended already, or the target is none.
    """
    if is_patched(rotary) or declared_scaling(rotary.text_config) is not None:
        description = describe(rotary)
        raise AlreadyExtendedError(
            f"the model is extended already ({description['method']}, factor {description['factor']:g}), and a "
            "fit is made of the model as it was trained: give the base model, or call unpatch_model first.",
            description["method"],
            description["factor"],
        )
    spec = plain_spec(rotary.text_config)
    original = config.original(spec.original_max_position_embeddings)
    if config.context_length <= original:
        raise InvalidRequestError(
            f"{argument('context_length')} must be longer than the original length, {original} tokens, got "
            f"{config.context_length}: up to there nothing has to be extended."
        )
    return RopeSpec(spec.rotary_dim, spec.rope_theta, original, spec.unrotated_pairs)


def _rotation(rotary: RotaryModel, config: FitConfig) -> Rotation:
    """Return a family's way of rotating queries and keys.

    Raises:
        ValueError: Its attention cannot be replaced; with the reason.
    """
    # Any method that runs in attention asks the same of a family.
    return check_attention(rotary, resolve(rotary.text_config, ExtensionRequest.of(**config.request("dynamic_yarn"))))


def _try_rules(rotary: RotaryModel, config: FitConfig) -> None:
    """Try every rule that will be needed, before anything expensive.

    Raises:
        ValueError: The family refuses one of them.
    """
    rows = [config.request(name) for name in config.compare if name != NO_METHOD]
    rows += [row for row in (config.rule_request(), config.teacher_request()) if row is not None]
    with quiet("hf_posenc.patching.api"):
        try_rows(rotary.model, rows)


def _folder(work_dir: str | Path | None) -> AbstractContextManager[str | Path]:
    if work_dir is not None:
        return nullcontext(work_dir)
    return tempfile.TemporaryDirectory(prefix="hf_posenc_fit_", ignore_cleanup_errors=True)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """While open, no weight of a model needs a gradient."""
    needed = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in needed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in needed:
            parameter.requires_grad_(True)


def _facts(run: FitRun, seed: int, texts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return what is fitted on, and how."""
    return {
        **_settings(run.config),
        "seed": seed,
        "texts": [hash_token_ids([ids]) for ids in texts],
        "tokens": sum(map(len, texts)),
        "weights": hash_weights(run.rotary.model),
    }


def _fit_rule(run: FitRun, seed: int) -> Fit:
    """Fit a rule, with all weights frozen.

    Args:
        run: The fit.
        seed: Seed of the samples; the texts, and what is recorded of them, depend on that of the settings alone.
    """
    config, spec = run.config, run.spec
    weights = config.weights()
    kinds = {name: get_objective(name) for name in weights}
    fitted, hidden = _hide(run) if "needles" in kinds else (run.texts.fitted, [[] for _ in run.texts.fitted])
    facts = _facts(run, seed, fitted)
    recordings = []
    if any(kind.needs_teacher for kind in kinds.values()):
        recordings = [_record(run, ids, at, facts) for at, ids in enumerate(fitted)]
    _keep_time_to_measure(run)
    generator = torch.Generator().manual_seed(seed)
    start = None if config.start == GRID else rule_of(config.start, run.factor).frequencies(spec)
    rule = _parameters(run, start or make_method("ntk", run.factor).frequencies(spec))
    with rule_attention(run.rotary, rule, run.rotation) as attention:
        attention.note_arguments(run.rotary)
        problem = FitProblem(run.rotary, attention, fitted, recordings, hidden, run.original, run.target, generator)
        terms = {name: (kind(problem, config), weights[name]) for name, kind in kinds.items()}
        identity = hash_json([facts, run.spec.rope_theta, run.original])
        descent = Descent(
            rule,
            terms,
            generator,
            steps=config.steps,
            learning_rate=config.learning_rate,
            smoothness=config.smoothness,
            file=run.folder / f"fit_state-{seed}.json",
            identity=identity,
        )
        if run.steps is None:
            run.steps = run.budget.steps(
                config.steps,
                run.folder / f"steps-{descent.identity}.json",
                lambda: (0.0, config.seeds * descent.seconds_of_a_step()),
                of=f" for each of {config.seeds} seeds" * (config.seeds > 1),
            )
        descent.steps = run.steps
        descent.load()
        if start is None and not descent.done:
            name, start = best_of_grid(run, rule, problem, terms)
            logger.info("the fit begins at %s", name)
            rule.begin_at(start)
        descent.run(show_progress=not config.hide_progress)
    divisors, attention_factor = rule.numbers()
    facts |= {"steps": descent.steps}
    return Fit("fitted", run.options(list(divisors), attention_factor), None, descent.history, facts)


def _fit_weights(run: FitRun, seed: int) -> Fit:
    """Fit low-rank changes by which the model attends under a rule as under its teacher."""
    _keep_time_to_measure(run)
    config, facts = run.config, _facts(run, seed, run.texts.fitted)
    rows = config.rule_request(), config.teacher_request()
    adapter = adapt(run, seed, hash_json([facts, *rows, run.spec.rope_theta, run.original]))
    method = rule_of(adapter.settings.rule, run.factor)
    # The rule itself is kept beside, as a method with its options: not where it was.
    settings_kept = {name: value for name, value in vars(adapter.settings).items() if name != "rule"}
    facts["adapted"] = {"modules": list(adapter.modules), **settings_kept}
    return Fit(method.name, method.changed_options(), adapter, [], facts)


def _hide(run: FitRun) -> tuple[list[torch.Tensor], list[list[HiddenNumber]]]:
    """Return the texts with numbers hidden in them, and these."""
    assert run.tokenizer is not None  # checked before
    pairs = [
        hide_numbers(run.tokenizer, ids, run.config.fitted_numbers, Random(f"{run.config.seed} {at}"))
        for at, ids in enumerate(run.texts.fitted)
    ]
    return [ids for ids, _ in pairs], [found for _, found in pairs]


def _parameters(run: FitRun, start: Frequencies) -> RuleParameters:
    config = run.config
    # Pairs that never finish a rotation in training have not met all angles.
    lowest = torch.where(rotations_in_training(run.spec) < 1, run.factor, 1e-6)
    return RuleParameters(
        run.spec,
        start,
        keep_rotations=config.keep_rotations,
        lowest=lowest if config.lower_bound == "critical" else None,
        monotone=config.monotone,
        temperature=config.fit_temperature,
    ).to(run.rotary.device)


def _settings(config: FitConfig) -> dict[str, Any]:
    """Return the settings that decide the result: all but those of the measurement, and of a rule if none is fitted."""
    left_out = (
        *(() if config.adapt is None else OF_THE_RULE),
        "seed",
        "seeds",
        "adapt_options",
        "compare",
        "held_out",
        "held_out_numbers",
        "take_best",
        "short_list",
        "budget",
        "dry_run",
        "hide_progress",
    )
    return {name: value for name, value in vars(config).items() if name not in left_out}


def _record(run: FitRun, ids: torch.Tensor, at: int, facts: Mapping[str, Any]) -> Recording:
    """Return the recording of the teacher's forward over a text."""
    config = run.config
    ids = run.taught(ids)
    generator = torch.Generator().manual_seed(config.seed)
    queries = torch.randperm(len(ids), generator=generator)[:RECORDED_QUERIES].sort().values
    teacher = (config.teacher, config.teacher_options, run.original, run.target)
    identity = hash_json([facts["weights"], *teacher, facts["texts"][at], config.seed])
    folder = run.folder / f"teacher-{at}"
    known = is_recorded(folder, identity)
    with run.extended(config.teacher_request()):
        recording = record(run.rotary.model, ids, folder, queries, identity)
    if len(ids) == run.target:
        run.pass_seconds = max(run.pass_seconds, recording.facts["seconds"])
    text = f"text {at + 1} of {len(run.texts.fitted)}, {len(ids)} tokens"
    if known:
        logger.info("%s: read before", text)
    else:
        logger.info("%s: read by %s in %s", text, config.teacher, duration_name(recording.facts["seconds"]))
    return recording


def _keep_time_to_measure(run: FitRun) -> None:
    """Keep a part of the budget for measuring the result of each seed, and one other."""
    if run.budget.seconds is None or not (held_out := run.texts.held_out) or run.budget.rules:
        return
    run.pass_seconds = run.pass_seconds or time_pass(run.rotary, held_out[0])  # of the teacher, where it read a text
    run.budget.rules = 1 + run.config.seeds
    run.budget.measuring = run.pass_seconds * len(held_out) * run.budget.rules


@torch.no_grad()
def time_pass(rotary: RotaryModel, ids: torch.Tensor) -> float:
    began = time.perf_counter()
    states = decoder_body(rotary.model)(input_ids=ids[None].to(rotary.device), use_cache=False).last_hidden_state
    float(states[0, -1, 0])  # waits until a GPU has finished
    return time.perf_counter() - began
