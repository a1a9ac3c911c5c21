"""The table of recipes: the papers' numbers, what wins over them, and each one training a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import load_extended
from hf_posenc.cli.main import main
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import describe
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.recipes import RECIPES, choose_base, get_recipe
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.run_plan import with_recipe
from tiny_runs import Build, config

# Typed from the papers and the authors' scripts: method, rate, warm-up, and what marks the recipe.
PUBLISHED: dict[str, tuple[str | None, float, int, dict[str, Any]]] = {
    "pi-1000": ("linear", 2e-5, 20, {"adam_beta2": 0.95, "weight_decay": 0.0}),
    "yarn-400": ("yarn", 2e-5, 20, {"adam_beta2": 0.95, "weight_decay": 0.0}),
    "yarn-mistral-1000": ("yarn", 1e-6, 20, {"lr_scheduler_type": "constant_with_warmup"}),
    "pose": ("yarn", 2e-5, 10, {"position_schedule": "pose", "pose_chunks": 2, "options": {"ramp": "harmonic"}}),
    "randpos": ("yarn", 2e-5, 10, {"position_schedule": "random", "options": {"ramp": "harmonic"}}),
    "longlora": ("linear", 2e-5, 20, {"lora_rank": 8, "lora_alpha": 16, "group_share": 0.25, "lora": True}),
    "lora-plus": ("linear", 2e-5, 20, {"lora_rank": 8, "lora_embeddings": True, "shifted_sparse_attention": False}),
    "qlora": (None, 2e-4, 20, {"lora_rank": 64, "lora_alpha": 16, "adam_beta2": 0.999, "max_grad_norm": 0.3}),
    "abf": ("abf", 1e-5, 20, {"lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95}),
    "longrope2-mixed": (None, 2e-5, 20, {"lr_scheduler_type": "cosine", "short_share": 0.1}),
    "progressive": ("yarn", 2e-5, 20, {"weight_decay": 0.0}),
    "drope": ("nope", 3e-4, 100, {}),
    "reach": (
        *(None, 1e-3, 8),  # as docs/pages/results/reach.md was measured
        {
            "task_mix": ["kv=0.35", "needles=0.2", "retention=0.3", "long_retention=0.15"],
            "keep": 0.03,
            **{"lora": True, "lora_rank": 64, "lora_alpha": 64, "lora_embeddings": False, "max_grad_norm": 0.1},
            **{"position_schedule": "cream", "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta2": 0.95},
        },
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_run_with_the_papers_numbers(name: str) -> None:
    made = FinetuneConfig.from_recipe(name, output_dir="out")
    method, rate, warmup, marks = PUBLISHED[name]
    assert (made.recipe, made.method, made.learning_rate, made.warmup_steps) == (name, method, rate, warmup)
    assert {key: getattr(made, key) for key in marks} == marks
    recipe = RECIPES[name]
    assert recipe.name == name
    assert all(text.strip() and "  " not in text for text in (recipe.paper, recipe.summary, recipe.left))
    assert made.settings()["recipe"] == name


def test_what_is_told_wins_and_another_method_brings_its_own_options() -> None:
    given = FinetuneConfig.from_recipe("pose", output_dir="out", learning_rate=1e-4, pose_chunks=3)
    assert (given.learning_rate, given.pose_chunks, given.lr_scheduler_type) == (1e-4, 3, "linear")
    other = FinetuneConfig.from_recipe("pose", output_dir="out", method="ntk")
    assert (other.method, other.options, other.position_schedule) == ("ntk", {}, "pose")
    preset = FinetuneConfig.from_recipe("yarn-400", output_dir="out", preset="qwen3-yarn-4x")
    assert (preset.method, preset.learning_rate) == (None, 2e-5)
    with pytest.raises(ValueError, match=r"'yarn-40'\..*'yarn-400'"):
        FinetuneConfig.from_recipe("yarn-40", output_dir="out")
    with pytest.raises(ValueError, match=r"FinetuneConfig.from_recipe\('pose'"):
        FinetuneConfig("out", recipe="pose")
    with pytest.raises(TypeError):
        get_recipe("pose").values["lora"] = True  # type: ignore[index]  # the mistake


@pytest.mark.parametrize(
    ("target", "own", "expected"),
    [
        (16384, 1e4, 5e5),  # Llama 2 Long
        (32768, 1e4, 5e5),
        (32769, 1e4, 5e6),  # EasyContext, from Llama 2
        (65536, 5e5, 8e6),  # ProLong, from Llama 3
        (32768, 5e5, 1e6),  # Llama 2 Long's is not larger
        (65536, 1e6, 8e6),
        (131072, 5e5, 5e7),
        (524288, 5e5, 1.28e8),
        (524288, 1e4, 1.28e8),
        (1_000_000, 1e4, 1e9),
    ],
)
def test_the_base_is_that_of_the_nearest_published_length(target: int, own: float, expected: float) -> None:
    assert choose_base(target, own).rope_theta == expected


def test_a_base_that_nobody_published_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"2000000.*--option rope_theta="):
        choose_base(2_000_000, 1e4)
    with pytest.raises(ValueError, match=r"1e\+10"):
        choose_base(8192, 1e10)


def test_what_recipes_choose_by_the_model(tiny_llama: Build, caplog: pytest.LogCaptureFixture) -> None:
    facts = ModelFacts.of(RotaryModel(tiny_llama()))

    def fitted(name: str, **given: Any) -> FinetuneConfig:
        return with_recipe(FinetuneConfig.from_recipe(name, output_dir="out", **given), facts)

    caplog.set_level("INFO")
    assert fitted("abf", factor=2.0).options == {"rope_theta": 5e5}
    assert "rope_theta 500000" in caplog.text
    assert fitted("abf", options={"rope_theta": 7e5}).options == {"rope_theta": 7e5}
    assert fitted("abf", method="ntk").options == {}
    assert (fitted("drope").seq_len, fitted("drope", seq_len=32).seq_len) == (64, 32)
    assert (fitted("reach").seq_len, fitted("reach", seq_len=32).seq_len) == (64, 32)
    assert fitted("reach", position_schedule="full").seq_len is None
    assert fitted("reach", preset="smollm2-135m-fitted-4x", factor=None).seq_len == 64
    assert fitted("abf", preset="qwen3-yarn-4x").options == {}
    long = ModelFacts.of(RotaryModel(tiny_llama(max_position_embeddings=8192)))
    assert with_recipe(FinetuneConfig.from_recipe("reach", output_dir="out"), long).seq_len == 2048
    two = fitted("progressive", context_length=256, token_budget=3000)
    assert (two.stages, two.context_length) == (["128:2000", "256:1000"], None)
    # From 64 tokens 64 times as far: the first stage is at most 16 times as long, and each of the others doubles.
    many = fitted("progressive", factor=64.0, token_budget=30_000).stages
    assert many == ["1024:20000", "2048:5000", "4096:5000"]
    assert fitted("progressive", factor=32.0, token_budget=3000).stages == ["1024:2000", "2048:1000"]
    assert fitted("progressive", factor=2.0).stages is None  # half of it is the original length
    assert fitted("progressive", stages=["192", "256"]).stages == ["192", "256"]
    assert fitted("abf", stages=["96", "128"]).options == {"rope_theta": 5e5}  # the base of the last stage's length
    assert fitted("drope", stages=["96", "128"]).seq_len == 64
    plain = config(Path("out"))
    assert with_recipe(plain, facts) is plain


SLOW = set(RECIPES) - {"drope"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # bitsandbytes
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RECIPES])
def test_every_recipe_trains(
    name: str,
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    documents: list[torch.Tensor],
) -> None:
    model = tiny_llama()
    recipe = RECIPES[name]
    if recipe.loading:
        from hf_posenc.checkpoint.loading import load_model

        tiny_llama().save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        model, _ = load_model(tmp_path / "base", device="cpu", **recipe.loading)
    # 256 tokens: half of them are beyond the original 64, so the progressive run has two stages
    given: dict[str, Any] = {"context_length": 256, "token_budget": 6 * 256, "save_steps": 100, "learning_rate": 1e-3}
    if name == "reach":  # a dialogue is longer than the 64 tokens that this model was trained on
        given["position_schedule"] = "full"
    run = FinetuneConfig.from_recipe(name, output_dir=str(tmp_path / "run"), eval_documents=0, warmup_steps=0, **given)
    result = finetune(model, tokenizer, documents, run)
    logs = [line for path in sorted((tmp_path / "run").rglob("train_log.jsonl")) for line in read_log(path)]
    assert len(logs) == result.steps >= 6
    alike = [log["loss"] for log in logs if log.get("kind") == logs[0].get("kind")]  # of a mixture, one kind of data
    assert alike[-1] < alike[0]
    there = describe(result.model)
    assert there["context_length"] == 256
    assert there["method"] == (recipe.values.get("method") or "yarn")
    card = (tmp_path / "run/README.md").read_text()
    assert f"- recipe: {name}" in card
    if name == "drope":
        assert "in blocks of 64" in card
        assert int(load_extended(tmp_path / "run").model.rotary_emb.inv_freq.count_nonzero()) == 0
    if name == "abf":
        written = json.loads((tmp_path / "run/config.json").read_text())
        assert written["rope_parameters"]["rope_theta"] == 5e5


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name}\n" in f"\n{shown}" for name in RECIPES)
    assert "load_in_4bit True" in shown
    assert "option ramp=harmonic" in shown
