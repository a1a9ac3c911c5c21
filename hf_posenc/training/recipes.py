"""Ways to fine-tune for longer contexts, as one table: the settings each paper gives, and what it leaves.

A value is in a row only if the paper or its authors' code gives it; for all others hf_posenc's default applies. What is
of hf_posenc itself says so in the place of a paper.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_posenc.errors import InvalidRequestError, UnknownNameError
from hf_posenc.utils.units import length_name

logger = logging.getLogger(__name__)


class Lengths(NamedTuple):
    """The lengths by which a recipe chooses.

    Attributes:
        original: Tokens the model was trained on.
        target: Tokens it is extended to.
        rope_theta: The base the model was trained with.
        is_extended: The model is extended already, and stays as it is.
    """

    original: int
    target: int
    rope_theta: float
    is_extended: bool


@dataclass(frozen=True)
class Recipe:
    """One published way to fine-tune.

    Attributes:
        name: What users type.
        paper: Where it comes from, with the section.
        summary: One plain sentence.
        values: Fields of ``FinetuneConfig`` with the paper's values.
        left: What of the paper is left to the user, or is not as published.
        loading: How the command line loads the model for it: fields of ``FinetuneModelArguments``.
        by_model: What ``block`` and ``fit`` choose, in words.
        block: Returns the tokens of a block of a run that gives none, by the position schedule and the original length;
            None: the default.
        fit: Returns the settings that are chosen by the lengths, from those of the run; None: nothing is.
    """

    name: str
    paper: str
    summary: str
    values: Mapping[str, Any]
    left: str
    loading: Mapping[str, Any] = field(default_factory=dict)
    by_model: str = ""
    block: Callable[[str, int], int | None] = lambda schedule, original: None
    fit: Callable[[Mapping[str, Any], Lengths], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("values", "loading"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


# YaRN trained 16 times the original length in one stage (section 4.1); LongRoPE grew in steps beyond (section 3.3).
ONE_STAGE_FACTOR = 16


class Base(NamedTuple):
    """A base that a model was trained with to read ``length`` tokens, coming from ``before``."""

    length: int
    before: float
    rope_theta: float
    source: str


# EasyContext: train_scripts/EasyContext-1M-Llama-2-7B.sh, the last base of each length.
BASES = (
    Base(32768, 1e4, 5e5, "Llama 2 Long, arXiv:2309.16039, section 2.1"),
    Base(32768, 1e4, 1e6, "EasyContext"),
    Base(65536, 5e5, 8e6, "ProLong, arXiv:2410.02660"),
    Base(65536, 1e4, 5e6, "EasyContext"),
    Base(256000, 1e4, 5e7, "EasyContext"),
    Base(512000, 1e4, 2.5e8, "EasyContext"),
    Base(524288, 5e5, 1.28e8, "ProLong, arXiv:2410.02660"),
    Base(1000000, 1e4, 1e9, "EasyContext, not trained further"),
)


def choose_base(target: int, rope_theta: float) -> Base:
    """Return the published base for a target length: of the nearest length that is no shorter.

    Of several for one length, that of the model whose own base was nearest.

    Args:
        target: In tokens.
        rope_theta: The base the model was trained with; the new one has to be larger.

    Raises:
        ValueError: None was published for so long a target, or none larger.
    """
    fit = [base for base in BASES if base.length >= target and base.rope_theta > rope_theta]
    if not fit:
        raise InvalidRequestError(
            f"no base was published for {target} tokens and a model of base {rope_theta:g} (the longest: "
            f"{BASES[-1].length} tokens, {BASES[-1].rope_theta:g}). Give it: --option rope_theta=..."
        )
    return min(fit, key=lambda base: (base.length, abs(math.log(base.before / rope_theta))))


def _with_base(given: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
    if "rope_theta" in given["options"] or given["method"] != "abf" or lengths.is_extended:
        return {}
    base = choose_base(lengths.target, lengths.rope_theta)
    chosen = (base.rope_theta, lengths.target, length_name(base.length), base.source)
    logger.info("abf: rope_theta %g for %d tokens, published for %s (%s)", *chosen)
    return {"options": {**given["options"], "rope_theta": base.rope_theta}}


def _in_stages(given: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
    """Double up to the target, from half of it, or from the longest such length that YaRN reached in one stage."""
    if given["stages"]:
        return {}
    original, target, budget = lengths.original, lengths.target, given["token_budget"]
    targets = [target // 2, target]
    while targets[0] > ONE_STAGE_FACTOR * original:
        targets.insert(0, targets[0] // 2)
    if targets[0] <= original:
        logger.info("progressive: one stage, as half of %d tokens is not beyond the original %d", target, original)
        return {}
    later = budget // 3 // (len(targets) - 1)
    first = budget - later * (len(targets) - 1)
    stages = [f"{targets[0]}:{first}", *(f"{length}:{later}" for length in targets[1:])]
    logger.info("progressive: stages %s", " ".join(stages))
    return {"stages": stages, "factor": None, "context_length": None}


def _original_block(schedule: str, original: int) -> int:
    return original


def _short_block(schedule: str, original: int) -> int | None:
    return None if schedule == "full" else min(2048, original)


_YARN = "Peng et al. 2023, arXiv:2309.00071, section 4.1"
_PI = "Chen et al. 2023, arXiv:2306.15595, section 3.1"
_POSE = "Zhu et al. 2023, arXiv:2309.10400, section 4.1; github.com/dwzhu-pku/PoSE, script/run_train_skipos.sh"
_LONGLORA = "Chen et al. 2023, arXiv:2309.12307, section"
# AdamW as YaRN, PI and LongLoRA have it.
_ADAM = {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95}
_USUAL = {"learning_rate": 2e-5, "warmup_steps": 20, **_ADAM}
_POSE_VALUES = {
    "method": "yarn",
    "options": {"ramp": "harmonic"},
    "learning_rate": 2e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 10,
}
_LORA_PLUS = {
    "method": "linear",
    "lora": True,
    "lora_rank": 8,
    "lora_alpha": 16,
    "trainable": "attention",
    "lora_embeddings": True,
    "lr_scheduler_type": "constant_with_warmup",
    **_USUAL,
}
_64_BLOCKS = "Steps of 64 blocks: here --gradient-accumulation-steps 64, or fewer on several devices"

_ALL = (
    Recipe(
        name="pi-1000",
        paper=_PI,
        summary="Position interpolation, all weights, blocks of the target length.",
        values={"method": "linear", **_USUAL},
        left=f"1000 steps, the whole window in use after 200. {_64_BLOCKS} (the paper: 64 or 128). 1e-5 from 33B on. "
        "Its warm-up begins at a tenth of the rate, ours at 0; it names no decay of the rate after it.",
    ),
    Recipe(
        name="yarn-400",
        paper=_YARN,
        summary="YaRN, all weights, 400 steps for a factor of 16.",
        values={"method": "yarn", **_USUAL},
        left=f"400 steps of blocks of 64k tokens (1.7 B tokens). {_64_BLOCKS}. The paper names no decay of the rate.",
    ),
    Recipe(
        name="yarn-mistral-1000",
        paper="Peng et al. 2023, arXiv:2309.00071, the Mistral 7B models",
        summary="YaRN at a small constant rate, as for Mistral 7B.",
        values={"method": "yarn", "learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup"},
        left="1000 steps of blocks of 16k tokens (--seq-len 16k) for a factor of 8, 500 more for 16.",
    ),
    Recipe(
        name="pose",
        paper=_POSE,
        summary="Blocks of the original length in two chunks, skipped apart at random up to the target.",
        values={**_POSE_VALUES, "position_schedule": "pose", "pose_chunks": 2},
        left=f"1000 steps. {_64_BLOCKS}. Of the three rules the paper trains with, this is its revised YaRN; --method "
        "linear and ntk are the others. The text of a block runs on (v = 0), where the paper draws that of each chunk "
        "apart. The betas of AdamW are not given.",
    ),
    Recipe(
        name="randpos",
        paper=f"Ruoss et al. 2023, arXiv:2305.16843, as the ablation of {_POSE.partition(';')[0]}, table 1",
        summary="As pose, but every token at a random position: an ablation that PoSE finds far worse.",
        values={**_POSE_VALUES, "position_schedule": "random"},
        left=f"1000 steps. {_64_BLOCKS}. The same rule and rates as for pose, so that only the positions differ.",
    ),
    Recipe(
        name="longlora",
        paper=f"{_LONGLORA}s 3.2, 3.3 and 4.1",
        summary="Adapters, embedding and norms, with attention in shifted groups while training.",
        values={**_LORA_PLUS, "shifted_sparse_attention": True, "group_share": 0.25},
        left=f"1000 steps. {_64_BLOCKS}. 1e-5 for 70B.",
    ),
    Recipe(
        name="lora-plus",
        paper=f"{_LONGLORA}s 3.3 and 4.1, table 2",
        summary="Adapters on the attention, with embedding and norms trained too; full attention.",
        values=_LORA_PLUS,
        left=f"1000 steps. {_64_BLOCKS}. 1e-5 for 70B.",
    ),
    Recipe(
        name="qlora",
        paper="Dettmers et al. 2023, arXiv:2305.14314; github.com/artidoro/qlora, scripts/finetune_guanaco_7b.sh",
        summary="Adapters on all linear layers of a model held in 4 bits (NF4, nested).",
        values={
            "lora": True,
            "lora_rank": 64,
            "lora_alpha": 16,
            "trainable": "all",
            "lora_embeddings": False,
            "learning_rate": 2e-4,
            "weight_decay": 0.0,
            "adam_beta2": 0.999,
            "max_grad_norm": 0.3,
            "gradient_checkpointing": True,
        },
        left="The rule of the positions is --method, or our default: QLoRA has none. Steps of 16 blocks. Here no "
        "dropout and no paged optimizer. In Python, load the model in 4 bits yourself.",
        loading={"load_in_4bit": True},
    ),
    Recipe(
        name="abf",
        paper="Xiong et al. 2023, arXiv:2309.16039, section 2.1 (the rule); Gao et al. 2024, arXiv:2410.02660, "
        "ProLong, and github.com/princeton-nlp/ProLong, train_64K.sh (the rates)",
        summary="A larger base, all weights, the base by the target length.",
        values={
            "method": "abf",
            "learning_rate": 1e-5,
            "lr_scheduler_type": "cosine",
            "max_grad_norm": 1.0,
            **_ADAM,
            "weight_decay": 0.1,
        },
        left="5000 steps of 4M tokens, warm-up over a tenth of the steps, decay to a tenth of the rate (here to 0). "
        "--option rope_theta=... takes another base.",
        by_model="rope_theta: that of the nearest published target length that is no shorter (`BASES`)",
        fit=_with_base,
    ),
    Recipe(
        name="longrope2-mixed",
        paper="Shang et al. 2025, arXiv:2502.20082, sections 3.3 and 4.1",
        summary="A tenth of the tokens in windows of the original length, so that short texts are kept.",
        values={"learning_rate": 2e-5, "lr_scheduler_type": "cosine", "short_share": 0.1},
        left=f"10 B tokens, 1 B of them short. {_64_BLOCKS}. Its divisors come from a search: give them by --method "
        "longrope --option long_factor=[...]; here our default rule. Its short windows keep the original positions, "
        "ours have the extended ones.",
    ),
    Recipe(
        name="progressive",
        paper=_YARN,
        summary="YaRN in stages, each twice as long as the one before.",
        values={"method": "yarn", **_USUAL},
        left="400 and 200 steps, both on blocks of 64k tokens; here each stage has blocks of its own length. "
        f"{_64_BLOCKS}. --stages takes others.",
        by_model="stages: half the target on two thirds of --token-budget, then the target on the rest; beyond 32 "
        "times the original length more of them, each twice the one before, the first at most 16 times the original",
        fit=_in_stages,
    ),
    Recipe(
        name="reach",
        paper="of hf_posenc, from Xiong et al. 2024, arXiv:2406.19292 (dictionaries, the loss on answers), Li and "
        "Hoiem 2016, arXiv:1606.09282 (what the model did before), Wortsman et al. 2022, arXiv:2109.01903 (a share of "
        "the training) and CREAM, arXiv:2406.07138 (positions); the rates are measured",
        summary="For small budgets: answers to find far back, and texts, short and long, on which the model predicts "
        "as before; what short ones lose is limited.",
        values={
            "task_mix": ["kv=0.35", "needles=0.2", "retention=0.3", "long_retention=0.15"],
            "keep": 0.03,
            # Questions are near the end of a block: CREAM puts it at the end of the target, its last third or less.
            "position_schedule": "cream",
            **{"lora": True, "trainable": "all", "lora_rank": 64, "lora_alpha": 64, "lora_embeddings": False},
            **{"learning_rate": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 8, **_ADAM},
            # The gradients of a few answers are as long then as those of the retained texts.
            "max_grad_norm": 0.1,
        },
        left="The shares are ours, no paper trains on this mixture. It was measured from an adapter of `hf-posenc fit "
        "--adapt --save-adapter` of rank 16. At least 4 steps, so that each kind has one. The rates are those for 135M "
        "parameters. All weights, which forget more: --lora false --learning-rate 2e-4 "
        "--max-grad-norm 1.",
        by_model="seq_len: 2048, or the original length if that is shorter; with --position-schedule full the target",
        block=_short_block,
    ),
    Recipe(
        name="drope",
        paper="Gelberg et al. 2025, arXiv:2512.12167 (Llama-2-7B)",
        summary="Drops the positions and trains on the original length until the model has got used to it.",
        values={"method": "nope", "learning_rate": 3e-4, "warmup_steps": 100},
        left="15k steps, 30 B tokens: far more than the other recipes. Schedule and weight decay are ours.",
        by_model="seq_len: the original length",
        block=_original_block,
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})


def get_recipe(name: str) -> Recipe:
    """Look a recipe up by name.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    key = name.lower().replace("_", "-") if isinstance(name, str) else name
    if key not in RECIPES:
        raise UnknownNameError("recipe", name, RECIPES, key)
    return RECIPES[key]


def recipe_values(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe together with those that were given.

    Args:
        name: The recipe.
        given: What wins over it. Another method than the recipe's, a preset or a
            ``rope_scaling`` dictionary brings its own options.
    """
    recipe = get_recipe(name)
    values: dict[str, Any] = copy.deepcopy(dict(recipe.values))
    if given.get("preset") is not None or given.get("rope_scaling") is not None:
        values.pop("method", None)
        values.pop("options", None)
    elif given.get("method") not in (None, values.get("method")):
        values.pop("options", None)
    return {**values, **given, "recipe": recipe.name}
