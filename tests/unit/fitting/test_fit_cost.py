"""What a fit needs, said before it begins: in memory, on disk, and as `hf-posenc plan` has it."""

from __future__ import annotations

from typing import Any

from attention_models import sharp_model
from hf_posenc import plan
from hf_posenc.evaluation.memory import predict_memory, shape_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.config import FitConfig
from hf_posenc.fitting.cost import FitCost, fit_cost, teacher_extension
from model_types import tiny_model
from tiny_llama import make_tiny_llama

TARGET = 1024


def cost(**settings: Any) -> FitCost:
    model, config = sharp_model("Llama"), FitConfig(context_length=TARGET, **settings)  # type: ignore[arg-type]  # an int
    return fit_cost(
        shape_of(model), config, texts=2, original=256, teacher=teacher_extension(RotaryModel(model), config)
    )


def test_the_teachers_own_tensors_count() -> None:
    """Those of dca's regions; a static rule and the unextended model have none."""
    shape = shape_of(sharp_model("Llama"))
    plain = predict_memory(shape, TARGET).peak
    for teacher in ("none", "yarn"):
        assert cost(teacher=teacher).teacher == predict_memory(shape, TARGET)
    found = cost(teacher="dca").teacher
    assert found is not None
    assert found.rule > 0
    assert found.peak == plain + found.rule
    assert cost(objectives=["full_length"]).teacher is None


def test_the_kv_cache_that_hidden_numbers_are_asked_over_counts() -> None:
    shape = shape_of(sharp_model("Llama"))
    cache = 2 * TARGET * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4  # keys and values in float32
    read = predict_memory(shape, TARGET).peak
    assert cost().measuring == read + cache
    assert cost(held_out_numbers=0).measuring == read
    assert cost(held_out=0).measuring == 0
    assert cost().peak >= read + cache


def test_room_on_disk() -> None:
    """Of each text and layer: keys, values, and 2048 queries with their outputs."""
    shape = shape_of(sharp_model("Llama"))
    keys, queries = shape.num_kv_heads * shape.head_dim, shape.num_heads * shape.head_dim
    assert cost().disk == 2 * shape.num_layers * 4 * (2 * TARGET * keys + 2 * 2048 * queries)
    assert cost(objectives=["full_length"]).disk == 0


def test_a_plan_has_it() -> None:
    config = make_tiny_llama().config
    fitting = plan(config, TARGET, dtype="float32").fitting
    assert fitting is not None
    model, settings = make_tiny_llama(), FitConfig(context_length=TARGET)  # type: ignore[arg-type]  # an int
    wanted = fit_cost(
        shape_of(model), settings, texts=1, original=256, teacher=teacher_extension(RotaryModel(model), settings)
    )
    assert (fitting.memory, fitting.disk) == (wanted.peak, wanted.disk)
    adapted = FitConfig(context_length=TARGET, adapt_options={})  # type: ignore[arg-type]  # an int
    wanted = fit_cost(
        shape_of(model), adapted, texts=1, original=256, teacher=teacher_extension(RotaryModel(model), adapted)
    )
    assert fitting.adapted_memory == wanted.peak > fitting.memory


def test_a_plan_has_none_of_a_family_that_is_refused() -> None:
    config = tiny_model("deepseek_v3").config
    assert plan(config, 4 * config.max_position_embeddings).fitting is None


def test_a_plan_has_none_of_a_model_that_is_extended() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    config = make_tiny_llama(rope_parameters=rope).config
    assert plan(config, TARGET, original_max_position_embeddings=32).fitting is None
