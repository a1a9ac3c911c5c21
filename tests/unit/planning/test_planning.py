"""The plan: what a model is, its cache and operations against real ones, the advice, the ways to train, the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DynamicCache,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
)

import hf_posenc
from hf_posenc.assets import tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.planning import plan, plan_text
from hf_posenc.planning.advice import Situation, advise
from hf_posenc.planning.architecture import read_architecture
from hf_posenc.planning.flops import training_flops
from hf_posenc.planning.gpus import RESERVE
from hf_posenc.planning.inference_memory import kv_cache
from hf_posenc.planning.text import finetune_words, flags_of
from hf_posenc.planning.training_memory import TrainingMemory, predict_training_memory
from hf_posenc.planning.training_options import Sharding, TrainingOption, fewest_devices, training_options
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.recipes import RECIPES
from hf_posenc.training.run_plan import with_recipe
from hf_posenc.training.step_plan import StepPlan
from hf_posenc.training.weights import trained_alone
from hf_posenc.utils.units import MemorySize
from tiny_llama import TINY_SIZES
from tiny_models import recompute_activations

RUN = FinetuneConfig("unused")
_PREDICTED: dict[Any, TrainingMemory] = {}


@pytest.fixture(autouse=True)
def _predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prediction is made once for all tests."""

    def predict(config: Any, step: StepPlan, seq_len: int, **given: bool) -> TrainingMemory:
        key = (config.to_json_string(), step, seq_len, tuple(given.items()))
        if key not in _PREDICTED:
            _PREDICTED[key] = predict_training_memory(config, step, seq_len, **given)
        return _PREDICTED[key]

    monkeypatch.setattr("hf_posenc.planning.training_options.predict_training_memory", predict)


@pytest.mark.parametrize(("window", "kept"), [(None, 50), (20, 19)])
def test_the_kv_cache_is_transformers_own(window: int | None, kept: int) -> None:
    config = MistralConfig(**TINY_SIZES, sliding_window=window)
    model = MistralForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(50)[None], past_key_values=cache)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache(config, 50).at(50) == real == 2 * 2 * 2 * 16 * kept * 4  # layers, keys and values, heads, dim
    deep = MistralConfig(**{**TINY_SIZES, "num_hidden_layers": 9}, sliding_window=window, dtype="bfloat16")
    assert kv_cache(deep, 50).at(50) == 9 * real // 2 // 2


def test_what_a_model_is() -> None:
    facts = read_architecture(LlamaConfig(**TINY_SIZES, tie_word_embeddings=True, dtype="bfloat16"), "tiny")
    assert (facts.model_type, facts.num_layers, facts.num_kv_heads, facts.head_dim) == ("llama", 2, 2, 16)
    assert (facts.original, facts.reads, facts.method, facts.dtype) == (64, 64, "none", "bfloat16")
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert facts.matrix_parameters == 2 * layer + 128 * 64
    assert facts.parameters == facts.matrix_parameters + 5 * 64  # the norms
    assert facts.weight_bytes == 2 * facts.parameters
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    yarn = read_architecture(LlamaConfig(**{**TINY_SIZES, "max_position_embeddings": 256}, rope_parameters=scaled), "x")
    assert (yarn.original, yarn.reads, yarn.method, yarn.factor) == (64, 256, "yarn", 4)
    published = LlamaConfig(**{**TINY_SIZES, "max_position_embeddings": 32768})
    published._name_or_path = "mistralai/Mistral-7B-v0.1"
    known = read_architecture(published, "mistralai/Mistral-7B-v0.1")
    assert known.original == 8192  # what patches/mistral.toml knows, whatever the config declares
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    moe = read_architecture(Qwen3MoeConfig(**TINY_SIZES, **experts), "moe")
    assert moe.parameters - moe.matrix_parameters > 2 * 3 * 3 * 64 * 32  # three of four experts a layer, and more


@pytest.mark.parametrize(("checkpointing", "trainable"), [(False, "all"), (True, "all"), (False, "attention")])
def test_operations_are_those_that_pytorch_counts(checkpointing: bool, trainable: Any) -> None:
    config = LlamaConfig(**TINY_SIZES, attn_implementation="eager", tie_word_embeddings=True)
    model = LlamaForCausalLM(config).train()
    if checkpointing:
        recompute_activations(model, use_reentrant=False)
    ids = torch.arange(100)[None]
    with trained_alone(model, trainable), chunked_lm_loss(model), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, position_ids=ids, labels=ids).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(flops for op, flops in counted.items() if "bmm" not in str(op))
    batched = sum(flops for op, flops in counted.items() if "bmm" in str(op))
    run = FinetuneConfig("unused", gradient_checkpointing=checkpointing, trainable=trainable)
    ours = training_flops(read_architecture(config, "x"), run.step, 100, 100)
    # The last row has no loss, and recomputing stops before a layer's last product, which nothing needs. Behind a
    # frozen embedding the inputs of the first queries, keys and values need no gradient.
    skipped = checkpointing * 2 * 2 * 128 * 64 * 100 + (trainable == "attention") * 2 * 64 * 128 * 100
    assert ours.parameters == pytest.approx(matrices + skipped, rel=0.01)
    # Eager attention makes the whole square, and goes back in four products, not in flash's five.
    passes = 1 + checkpointing
    assert ours.attention == pytest.approx(batched * (passes + 2.5) / (passes + 2) / 2, rel=0.03)


def test_windows_and_groups_see_fewer_keys() -> None:
    full = read_architecture(MistralConfig(**TINY_SIZES, sliding_window=None), "x")
    windowed = read_architecture(MistralConfig(**TINY_SIZES, sliding_window=10), "x")
    keys = sum(min(i + 1, 10) for i in range(100)) / 100
    assert training_flops(windowed, RUN.step, 100, 1).attention == pytest.approx(2 * 3.5 * 4 * 64 * keys)
    assert training_flops(full, RUN.step, 100, 1).attention == pytest.approx(2 * 3.5 * 4 * 64 * 50.5)
    assert training_flops(full, RUN.step, 100, 1, group=25).attention == pytest.approx(2 * 3.5 * 4 * 64 * 13)


@pytest.mark.parametrize(
    ("given", "method", "recipe"),
    [
        ({"target": 8192}, "none", None),
        ({"target": 131072, "method": "llama3", "reads": 131072}, "none", None),
        ({"target": 32768}, "dynamic_yarn", None),
        ({"target": 32768, "server": True}, "yarn", None),
        ({"target": 65536}, "yarn", "yarn-400"),
        ({"target": 65536, "model_type": "mistral"}, "yarn", "yarn-mistral-1000"),
        ({"target": 262144}, "yarn", "progressive"),
        ({"target": 32768, "token_budget": 10**9}, "yarn", "yarn-400"),
        ({"target": 32768, "token_budget": 10**6}, "yarn", "pose"),
        ({"target": 65536, "option": "gradient checkpointing", "fits": True}, "yarn", "yarn-400"),
        ({"target": 65536, "option": "LoRA+", "fits": True}, "yarn", "lora-plus"),
        ({"target": 65536, "option": "PoSE window", "fits": True}, "yarn", "pose"),
        ({"target": 65536, "option": "PoSE window, LoRA+", "fits": True}, "yarn", "pose"),
        ({"target": 65536, "option": "PoSE window, LoRA+", "fits": False}, "yarn", "qlora"),
    ],
)
def test_the_rules(given: dict[str, Any], method: str, recipe: str | None) -> None:
    situation = Situation(**{"model_type": "llama", "original": 8192, "reads": 8192, "method": "none", **given})
    advice = advise(situation)
    assert (advice.method, advice.recipe) == (method, recipe)
    assert advice == advise(situation)
    assert advice.reasons
    assert not any("{" in reason for reason in advice.reasons)
    if recipe == "yarn-400":  # that it fits is said only where that is known
        assert advice.reasons[0].endswith("it fits") == bool(situation.fits)


def test_the_advice_for_a_scaled_checkpoint_names_on_scaled() -> None:
    advice = advise(Situation("llama", 8192, 131072, "llama3", 262144))
    assert any("on_scaled='replace'" in reason for reason in advice.reasons)


WAYS = ["as requested", "bf16", "gradient checkpointing", "no mask", "8-bit AdamW", "LoRA+", "LoRA", "4-bit LoRA"]
WAYS += [f"PoSE window{name}" for name in ("", ", 8-bit AdamW", ", LoRA+", ", 4-bit LoRA")]


def test_the_first_way_that_fits_is_taken() -> None:
    config = LlamaConfig(**{**TINY_SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4})
    ways = list(training_options(config, RUN, 1024, 64))
    assert [way.name for way in ways] == WAYS
    peaks = [way.memory.peak for way in ways]
    assert [way.seq_len for way in ways] == [1024] * 8 + [64] * 4
    assert peaks[:7] == sorted(peaks[:7], reverse=True)  # in 4 bits a matrix is unpacked, more than so few weights save
    assert peaks[8:] == sorted(peaks[8:], reverse=True)
    for index in (0, 2, 3, 4):
        made = plan(config, 1024, gpu_memory=RESERVE + peaks[index], token_budget=10**9, run=RUN)
        assert (made.option.name, made.fits, len(made.training_options)) == (WAYS[index], True, index + 1)
        assert made.sharding is None
    small = plan(config, 1024, gpu_memory=RESERVE + 1000, run=RUN)
    assert (small.fits, small.advice.recipe, len(small.training_options)) == (False, "qlora", 12)
    assert "more devices do not help to train all weights" in plan_text(small)
    weights = small.all_weights.memory.weights
    enough = plan(config, 1024, gpu_memory=RESERVE + weights, run=RUN)
    assert (enough.fits, "more devices do not help" in plan_text(enough)) == (False, False)
    short = list(training_options(config, FinetuneConfig("unused", lora=True, bf16=True, packing=False), 64, 64))
    assert [way.name for way in short] == ["as requested", "gradient checkpointing", "LoRA", "4-bit LoRA"]


def test_windows_of_the_text_model_cost_a_mask_where_positions_skip() -> None:
    config = Gemma3Config(text_config={**TINY_SIZES, "sliding_window": 32}, vision_config={"num_hidden_layers": 1})
    ways = training_options(config, FinetuneConfig("unused", lora=True, bf16=True, packing=False), 1024, 64)
    assert {way.packed for way in ways if way.name.startswith("PoSE")} == {True}


def test_of_a_way_that_is_far_too_much_only_the_least_is_said() -> None:
    config = LlamaConfig(**TINY_SIZES)
    ways = list(training_options(config, RUN, 1024, 64, gpu_memory=RESERVE + 1000))
    assert all(way.at_least for way in ways)
    for way in ways:
        assert way.memory.peak <= way.predicted(config).memory.peak
    made = plan(config, 1024, gpu_memory=RESERVE + 1000, run=RUN)
    whole = [way.name for way in made.training_options if not way.at_least]
    assert whole == ["4-bit LoRA", "PoSE window, 4-bit LoRA"]  # what needs least at the full length, and of all
    text = plan_text(made)
    assert "To rent: one 24 GB for PoSE window, 4-bit LoRA in blocks of 64" in text
    assert [line.split()[3] for line in text.splitlines() if line.startswith("as requested  ") and "over" in line] == [
        "over"
    ]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_is_counted_as_finetune_sets_it(recipe: str, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama(num_hidden_layers=1, max_position_embeddings=4096)
    run = FinetuneConfig.from_recipe(recipe, output_dir="unused", context_length=8192)
    in_4bit = bool(RECIPES[recipe].loading.get("load_in_4bit"))
    first = plan(model.config, 8192, gpu_memory="24GB", run=run).training_options[0]
    fitted = with_recipe(run, ModelFacts.of(RotaryModel(model)))
    assert first.seq_len == (fitted.seq_len or (8192 if fitted.position_schedule == "full" else 4096))
    assert (first.run, first.load_in_4bit) == (run, in_4bit)


@pytest.mark.parametrize("gpus", [1, 2])
def test_finetune_reads_the_command_of_each_way_as_that_way(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("hf_posenc.cli.finetune.launch_words", lambda launch, *_: started.append(launch))
    monkeypatch.setattr("hf_posenc.cli.finetune.run_finetune", lambda *given: started.append(given))
    made = plan(LlamaConfig(**TINY_SIZES), 1024, gpus=gpus, run=RUN)
    given = plan_text(made).splitlines()
    assert len({way.label for way in made.training_options}) == len(made.training_options) == (12 if gpus == 1 else 18)
    for way in made.training_options:
        started.clear()
        words = [*finetune_words(str(tiny_model_path()), 1024), *flags_of(way)]
        flags = shlex.join(flags_of(way))
        assert any(line.startswith(f"  {way.label} ") and line.endswith(flags or "none") for line in given[1:]) or any(
            line.endswith(f"--context-length 1024 {flags}".rstrip()) for line in given
        )
        assert main(words[1:]) == 0
        launch, (_, run, _, loading) = started
        assert run == dataclasses.replace(way.run, output_dir="OUT", context_length=1024)
        assert loading.load_in_4bit == way.load_in_4bit
        over = None if way.sharding is None else way.sharding.num_devices
        shared = "context_parallel_2gpu" if over and way.sharding.context_parallel else "fsdp2" if over else None
        assert (launch.accelerate_config, launch.num_processes) == (shared, over if shared == "fsdp2" else None)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {}),
        (
            "--token-budget 300k --original-max-position-embeddings 128",
            {"token_budget": 300_000, "original_max_position_embeddings": 128},
        ),
        ("--dtype bfloat16 --gpu-memory 24GB --packing false", {"packing": False}),
        ("--recipe qlora --token-budget 2M", {"recipe": "qlora", "token_budget": 2_000_000}),
        ("--recipe pose --gradient-accumulation-steps 4", {"gradient_accumulation_steps": 4}),
        ("--lora --bf16 true --per-device-train-batch-size 2", {"lora": True, "per_device_train_batch_size": 2}),
    ],
)
def test_the_commands_say_all_that_was_given_and_no_default(
    words: str,
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Read back by finetune's own parser; a flag whose value finetune takes anyway would be noise."""
    read: list[Any] = []
    monkeypatch.setattr("hf_posenc.cli.finetune.run_finetune", lambda *given: read.append(given))
    monkeypatch.setattr("hf_posenc.cli.finetune.launch_words", lambda *_: None)
    LlamaConfig(**{**TINY_SIZES, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--context-length", "1024", "--training", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    (command,) = [shlex.split(line) for line in lines if line.startswith("  hf-posenc finetune ")]
    begin = command[1 : command.index("--context-length") + 2]
    _, _, rest = "\n".join(lines).partition("with other flags after the context length:\n")
    others = [line.rsplit("  ", 1)[1] for line in rest.partition("\n\n")[0].splitlines()]

    def parsed(flags: list[list[str]]) -> Any:
        assert main([*begin, *itertools.chain(*flags)]) == 0
        return read.pop()

    for line in [command[len(begin) + 1 :], *(shlex.split(line) for line in others if line != "none")]:
        starts = [index for index, word in enumerate(line) if word.startswith("--")]
        flags = [line[first:last] for first, last in itertools.pairwise([*starts, len(line)])]
        _, run, _, loading = whole = parsed(flags)
        assert {name: getattr(run, name) for name in fields} == fields
        assert loading.dtype == ("bfloat16" if "--dtype" in words else "auto")
        for flag in flags:  # without it the run is another one
            assert parsed([one for one in flags if one is not flag]) != whole, flag


def test_reading_counts_the_weights_as_they_are_held_and_what_the_rule_keeps() -> None:
    config = LlamaConfig(
        **{**TINY_SIZES, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}, dtype="bfloat16"
    )
    made = plan(config, 256, gpu_memory="24GB")
    assert (made.training_options, made.fits, made.hours, made.advice.method) == ((), None, None, "dynamic_yarn")
    whole, eight, four = made.reading
    assert [row.weights_in for row in made.reading] == ["bfloat16", "8-bit", "4-bit"]
    assert (
        whole.weights == made.model.weight_bytes + 2 * 4 * 32
    )  # and the frequencies, as they are and were, in float32
    matrices, rows = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024), 2 * (3 * 256 + 2 * 128 + 2 * 1024)
    assert whole.weights - eight.weights == matrices * (2 - 1) - 4 * rows  # a float32 scale for each row
    assert whole.weights - four.weights == pytest.approx(matrices * (2 - 4.127 / 8), rel=0.01)
    cache = 2 * 2 * 2 * 64 * 256 * 2  # layers, keys and values, heads, dim, tokens, bytes
    assert {row.kv_cache for row in made.reading} == {cache} == {made.kv_cache}
    # A copy of the keys for the stage that the last tokens are in; the cosines and sines of one chunk's are float32.
    assert all(row.rule >= cache // 2 for row in made.reading)
    static = plan(config, 256, server=True)
    assert (static.advice.method, {row.rule for row in static.reading}) == ("yarn", {0})
    assert plan(config, 64).reading[0].rule == 0  # nothing is extended


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_longest_text_is_the_last_that_fits(gpus: int) -> None:
    config = LlamaConfig(**TINY_SIZES)
    memory = RESERVE + 2 * 10**6
    made = plan(config, 256, gpu_memory=memory, gpus=gpus)
    longest = [row.longest for row in made.reading]
    assert all(64 < length < 10**5 for length in longest)
    for index, length in enumerate(longest):
        assert plan(config, length, gpus=gpus).reading[index].fits(memory, gpus)
        assert not plan(config, length + 1, gpus=gpus).reading[index].fits(memory, gpus)
    if gpus == 2:
        row = made.reading[0]
        table = 128 * 64 * 4  # the embedding's bytes, as many as the head's
        assert row.per_device(2) == (row.weights - 2 * table + row.kv_cache + row.rule) // 2 + table + row.working
        assert longest[0] > plan(config, 256, gpu_memory=memory).reading[0].longest


def test_training_is_counted_where_it_is_requested(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(tiny_model_path()), "--context-length", "1k", "--gpu-memory", "24GB"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("Reading 1,024 tokens in 24.00 GB fits with bfloat16 weights (0.04 GB)")
    assert "Training: --training says what fits" in text
    assert "gradients" not in text
    assert main([*words, "--training"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Reading 1,024 tokens")
    assert "Training in blocks of 1,024 tokens fits 24.00 GB: as requested" in text
    assert text.index("reading 1k tokens, 1024 at a time:") < text.index("Training, each row")
    assert main([*words, "--gpus", "0"]) == 2
    assert "gpus must be a whole number of devices, at least 1, got 0" in capsys.readouterr().err


def test_devices_are_counted_from_the_parts() -> None:
    parts = {"weights": 400, "optimizer": 800, "gradients": 100, "half_weights": 0, "activations": 5000}
    given: dict[str, Any] = {"attention_matrices": 0, "logits": 0, "phase": "loss", "trained_parameters": 100}
    memory = TrainingMemory(**parts, **given, all_gradients=400)
    way = TrainingOption("no mask", RUN, 1024, False, memory)
    # Of 1600 bytes of weights, states and gradients a half or a quarter, two of two layers gathered, and the rest.
    assert fewest_devices(way, RESERVE + 1600 // 2 + 400 + 5000, 2) == Sharding(2, False, 6200)
    assert fewest_devices(way, RESERVE + 1600 // 4 + 400 + 5000 // 4, 2) == Sharding(4, True, 2050)
    assert fewest_devices(way, RESERVE + 400, 2) is None
    # However many there are, each holds the whole weights before they are shared out.
    heavy = TrainingOption("no mask", RUN, 1024, False, dataclasses.replace(memory, weights=6000))
    assert fewest_devices(heavy, RESERVE + 6000, 1000) == Sharding(4, True, 7200 // 4 + 12 + 5000 // 4)
    assert fewest_devices(heavy, RESERVE + 5999, 1000) is None


def test_hours_are_tokens_over_the_speed() -> None:
    config = LlamaConfig(**TINY_SIZES)
    given: dict[str, Any] = {"gpu_memory": "24GB", "token_budget": 3_600_000, "run": RUN}
    assert plan(config, 256, **given).hours is None
    assert plan(config, 256, tokens_per_second=500, **given).hours == 2
    made = plan(config, 256, tflops=0.001, **given)
    assert made.hours == pytest.approx(made.flops.total / 1e9 / 3600)
    with pytest.raises(ValueError, match="tokens_per_second"):
        plan(config, 256, tokens_per_second=500, tflops=1)
    with pytest.raises(ValueError, match="context_length"):
        plan(config, 0)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(tiny_model_path()), "--context-length", "1k", "--gpu-memory", "24GB"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "llama, 5.27M parameters (bfloat16), 6 layers of 256, 4 heads of 64" in text
    assert "trained on 256 tokens, reads 256; requested: 1k, factor 4" in text
    assert "method dynamic_yarn, no training" in text
    assert main([*words, "--json", "--tokens-per-second", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_cache"] == 6 * 2 * 4 * 64 * 1024 * 2
    assert found["hours"] == pytest.approx(1000 / 3600)
    assert found["training_options"][0]["fits"] is True
    assert found["training_options"][0]["memory"]["optimizer"] == 8 * found["model"]["parameters"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/at/all", "--context-length", "1k"], "there is no"),
        ([str(tiny_model_path())], "--context-length"),
        ([str(tiny_model_path()), "--context-length", "1k", "--gpu-memory", "24 apples"], "gpu-memory"),
        (
            [str(tiny_model_path()), "--context-length", "1k", "--tokens-per-second", "0"],
            "--tokens-per-second must be greater than 0",
        ),
    ],
)
def test_mistakes_have_a_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_adapter_is_no_model_to_plan_for(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter"):
        plan(tmp_path, 1024)


def test_a_gguf_file_is_planned_for(tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    pytest.importorskip("gguf", reason="pip install 'hf_posenc[smollm2]'")
    from gguf_files import write_gguf

    model = tiny_llama(num_hidden_layers=2)
    made = plan(write_gguf(tmp_path / "tiny.gguf", model), 128, gpu_memory="24GB", run=RUN)
    assert (made.model.parameters, made.model.original) == (model.num_parameters(), 64)
    with pytest.raises(ValueError, match="rotary positions"):
        plan(write_gguf(tmp_path / "scaled.gguf", model, type="linear", factor=4.0), 128)


def test_amounts_of_memory() -> None:
    assert [MemorySize(text) for text in ("24GB", "80 GiB", "512mb", "7")] == [24 * 10**9, 80 * 2**30, 512 * 10**6, 7]
    assert MemorySize(5) == 5
    for wrong in ("24 apples", "GB", "-1GB", "0GB"):
        with pytest.raises(ValueError, match="expected an"):
            MemorySize(wrong)


def test_it_is_public() -> None:
    assert hf_posenc.plan is plan
    assert hf_posenc.Plan is type(plan(LlamaConfig(**TINY_SIZES), 128, gpu_memory="24GB"))


@pytest.mark.parametrize("changes", [{"lora": True}, {"position_schedule": "pose"}])
def test_what_trains_no_weights_at_the_full_length_is_not_said_to_do_so(changes: dict[str, Any]) -> None:
    run = FinetuneConfig("unused", bf16=True, packing=False, **changes)
    made = plan(LlamaConfig(**TINY_SIZES), 1024, gpu_memory=RESERVE + 1000, run=run)
    assert made.all_weights is None
    assert made.sharding is None
    assert "all weights" not in plan_text(made)


@pytest.mark.parametrize(
    ("recipe", "flags", "changed"),
    [
        ("reach", (), {"lora": True}),
        ("reach", ("--lora", "false"), {"lora": False}),
        ("qlora", ("--gradient-checkpointing", "false"), {"lora": True, "gradient_checkpointing": False}),
    ],
)
def test_a_flag_overrides_a_recipe_where_it_is_the_usual_value_too(
    recipe: str, flags: tuple[str, ...], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[FinetuneConfig] = []

    def noted(*args: Any, run: FinetuneConfig, **kwargs: Any) -> None:
        planned.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_posenc.planning.planner.plan", noted)
    main(["plan", str(tiny_model_path()), "--context-length", "1k", "--recipe", recipe, *flags])
    usual = FinetuneConfig.from_recipe(recipe, output_dir="plan")
    for name in ("lora", "gradient_checkpointing", "packing", "per_device_train_batch_size"):
        assert getattr(planned[0], name) == changed.get(name, getattr(usual, name)), name
