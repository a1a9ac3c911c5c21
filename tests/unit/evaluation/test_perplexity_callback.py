"""Perplexity by length as a metric of Trainer: the numbers, who sees them, and that training does not notice."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from callback_runs import HELD_OUT, LENGTHS, make_trainer
from distributed_runs import FSDP2, LAUNCHER
from folders import HELPERS, ROOT
from hf_posenc import PerplexityCallback, patch_model, perplexity
from tiny_llama import make_tiny_llama


class Tracker(TrainerCallback):
    """What a tracker gets."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append({**logs, "step": state.global_step})


def values(log: list[dict[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in log if name in entry]


def test_numbers_reach_metrics_log_and_trackers(tmp_path: Path) -> None:
    tracker = Tracker()
    trainer = make_trainer(tmp_path, callbacks=[tracker])
    callback = PerplexityCallback(trainer, HELD_OUT, LENGTHS)
    trainer.add_callback(callback)
    trainer.train()
    expected = {
        f"eval_perplexity_{record.context_length}": record.perplexity
        for record in perplexity(trainer.model, HELD_OUT, LENGTHS, progress=False)
    }
    assert [record.label for record in callback.records] == ["step 6", "step 6"]
    metrics = trainer.evaluate()
    for name, value in expected.items():
        assert metrics[name] == value
        assert values(trainer.state.log_history, name)[-1] == value
        assert values(tracker.logged, name) == values(trainer.state.log_history, name)
        assert [entry["step"] for entry in tracker.logged if name in entry] == [2, 4, 6, 6]
    first, *_, last = values(tracker.logged, "eval_perplexity_32")
    assert last < first  # it follows the training


def test_numbers_are_exp_of_a_loss_computed_with_whole_logits(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, LENGTHS))
    metrics = trainer.evaluate()
    for length in LENGTHS:
        ids = torch.stack([row[:length] for row in HELD_OUT])
        with torch.no_grad():
            loss = trainer.model.eval()(input_ids=ids, labels=ids).loss.double()
        assert metrics[f"eval_perplexity_{length}"] == pytest.approx(math.exp(loss), rel=1e-5)


def peft_model(model: Any) -> Any:
    from hf_posenc.training.lora import LoraSettings, add_lora

    return add_lora(model, LoraSettings(4, 8))


@pytest.mark.parametrize("kind", ["plain", "yarn", "dynamic_yarn", "peft"])
def test_training_does_not_notice(tmp_path: Path, kind: str) -> None:
    runs = []
    for measured in (False, True):
        model: Any = make_tiny_llama(attention_dropout=0.1)
        if kind in ("yarn", "dynamic_yarn"):
            patch_model(model, kind, 2)
        elif kind == "peft":
            torch.manual_seed(1)
            model = peft_model(patch_model(model, "yarn", 2))
        trainer = make_trainer(tmp_path, model)
        if measured:
            trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, LENGTHS))
        trainer.train()
        runs.append((trainer, torch.random.get_rng_state()))
    (plain, plain_rng), (watched, watched_rng) = runs
    losses = values(plain.state.log_history, "loss")
    assert len(losses) == 6
    assert values(watched.state.log_history, "loss") == losses
    assert torch.equal(plain_rng, watched_rng)
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(values(watched.state.log_history, "eval_perplexity_128")) == 3
    with torch.no_grad():
        expected = perplexity(watched.model, HELD_OUT, [128], progress=False)[0]
    assert values(watched.state.log_history, "eval_perplexity_128")[-1] == expected.perplexity
    assert expected.method == {"plain": "none", "peft": "yarn"}.get(kind, kind)


def test_modes_come_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    callback = PerplexityCallback(trainer, HELD_OUT, LENGTHS)
    trainer.model.train()
    trainer.model.model.layers[1].eval()
    before = [module.training for module in trainer.model.modules()]
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics={})
    assert [module.training for module in trainer.model.modules()] == before
    assert callback.records


def test_the_best_model_is_kept_and_training_stops_early(tmp_path: Path) -> None:
    settings = {
        "max_steps": 40,
        "learning_rate": 0.05,  # soon too much: the perplexity falls, then rises
        "metric_for_best_model": "perplexity_128",
        "greater_is_better": False,
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = make_trainer(tmp_path, callbacks=[EarlyStoppingCallback(2)], **settings)
    trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, LENGTHS))
    trainer.train()
    seen = values(trainer.state.log_history, "eval_perplexity_128")
    best = min(seen)
    assert trainer.state.global_step < 40
    assert seen.index(best) == len(seen) - 3  # two without a better one, then the end
    assert trainer.state.best_metric == best
    assert trainer.state.best_global_step == 2 * (seen.index(best) + 1)
    assert perplexity(trainer.model, HELD_OUT, [128], progress=False)[0].perplexity == pytest.approx(best, rel=1e-6)


def test_several_eval_datasets_are_one_measurement_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    rows = [{"input_ids": row[:48], "labels": row[:48]} for row in HELD_OUT]
    trainer = make_trainer(tmp_path, eval_dataset={"one": rows[:2], "two": rows[2:]})
    callback = PerplexityCallback(trainer, HELD_OUT, LENGTHS)
    measure = callback._measure
    monkeypatch.setattr(callback, "_measure", lambda state: measured.append(state.global_step) or measure(state))
    trainer.add_callback(callback)
    for _ in range(2):  # a second run measures its own steps again
        trainer.train()
    assert measured == [2, 4, 6] * 2
    assert len(values(trainer.state.log_history, "eval_two_loss")) == 3


def test_mixed_precision_is_measured_as_trainer_evaluates(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, bf16=True)
    trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, [128]))
    metrics = trainer.evaluate()
    with torch.autocast("cpu", torch.bfloat16):
        expected = perplexity(trainer.model, HELD_OUT, [128], progress=False)[0].perplexity
    assert metrics["eval_perplexity_128"] == expected
    assert expected != perplexity(make_tiny_llama(), HELD_OUT, [128], progress=False)[0].perplexity


def test_a_model_that_accelerate_wrapped_in_autocast_is_measured_as_it_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, bf16=True)
    trainer.evaluate()  # wraps the forward, and not the body
    (found,) = perplexity(trainer.model, HELD_OUT, [128], progress=False)
    (expected,) = perplexity(make_tiny_llama(), HELD_OUT, [128], progress=False)
    assert (found.perplexity, found.dtype) == (expected.perplexity, "float32")


def test_mistakes_are_found_before_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, metric_for_best_model="eval_perplexity_128")
    with pytest.raises(ValueError, match=r"4.*4096"):
        PerplexityCallback(trainer, HELD_OUT, [4096])
    with pytest.raises(TypeError, match="'output'"):
        PerplexityCallback(trainer, HELD_OUT, LENGTHS, output="r.jsonl")
    with pytest.raises(ValueError, match=r"last_k, sliding_window,.*'yarn'"):
        PerplexityCallback(trainer, HELD_OUT, LENGTHS, protocol="yarn")
    with pytest.raises(ValueError, match="last_k"):
        PerplexityCallback(trainer, HELD_OUT, LENGTHS, protocol="last_k")  # 256 of 32 tokens
    with pytest.raises(TypeError, match="tokenizer="):
        PerplexityCallback(trainer, ["a text"], LENGTHS)
    trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, LENGTHS))
    with pytest.raises(ValueError, match=r"TrainingArguments\(greater_is_better=False\)"):
        trainer.train()
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"FSDP.*ZeRO-3"):
        PerplexityCallback(trainer, HELD_OUT, LENGTHS)


def test_no_evaluation_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="no", max_steps=1)
    trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, LENGTHS))
    trainer.train()
    assert "eval_strategy is 'no'" in caplog.text


TWO_PROCESSES = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from transformers import EarlyStoppingCallback
from hf_posenc import PerplexityCallback, patch_model, perplexity
from hf_posenc.evaluation import perplexity_callback
from callback_runs import HELD_OUT, LENGTHS, make_trainer
from tiny_llama import make_tiny_llama

folder, rank, chosen = Path(sys.argv[1]), os.environ["RANK"], {}
measuring = sys.modules[perplexity.__module__]
losses, fed = measuring.window_losses, []
def noted(model, ids, *args, **kwargs):
    fed.append(next(n for n, row in enumerate(HELD_OUT) if row[:len(ids)].equal(ids)))
    return losses(model, ids, *args, **kwargs)
def uneven(*args, **kwargs):  # as if another GPU computed another last bit
    records = perplexity(*args, **kwargs)
    return [type(one)(**{**vars(one), "perplexity": one.perplexity * (1 + 1e-12 * int(rank))}) for one in records]
measuring.window_losses = noted
settings = {"metric_for_best_model": "perplexity_128", "greater_is_better": False, "load_best_model_at_end": True,
            "save_strategy": "steps", "save_steps": 2, "max_steps": 30, "learning_rate": 0.05}
for run in ("alike", "differing"):
    if run == "differing":
        perplexity_callback.hash_weights, perplexity_callback.perplexity = lambda model: rank, uneven
    model = patch_model(make_tiny_llama(), "dynamic_yarn", 2)
    trainer = make_trainer(folder / run, model, [EarlyStoppingCallback(1)], **settings)
    trainer.add_callback(PerplexityCallback(trainer, HELD_OUT, LENGTHS))
    fed.clear()
    trainer.train()
    documents = sorted(fed)
    seen = [entry["eval_perplexity_128"] for entry in trainer.state.log_history if "eval_perplexity_128" in entry]
    alone = perplexity(trainer.model, HELD_OUT, LENGTHS, progress=False)[1].perplexity
    chosen[run] = [trainer.args.world_size, trainer.state.global_step, seen, alone, documents]
(folder / f"{rank}.json").write_text(json.dumps(chosen))
"""


@pytest.mark.slow
def test_two_processes_share_the_documents_agree_and_stop_together(tmp_path: Path) -> None:
    in_two_processes(tmp_path, TWO_PROCESSES)
    chosen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for run in ("alike", "differing"):
        (world, step, seen, alone, fed), (*other, other_fed) = (one[run] for one in chosen)
        assert [world, step, seen, alone] == other  # to the bit, although they measured different last bits
        assert world == 2
        assert len(seen) == step // 2
        assert step < 30
        assert min(seen) == pytest.approx(alone, rel=1e-9)  # the best model is loaded, and measured by one process
        shares = ([0, 2], [1, 3]) if run == "alike" else (range(4), range(4))
        assert fed == sorted([*shares[0]] * len(seen))
        assert other_fed == sorted([*shares[1]] * len(seen))


SHARDED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from one_of_several import shard_on_the_cpu
shard_on_the_cpu()
from hf_posenc import PerplexityCallback
from callback_runs import HELD_OUT, LENGTHS, make_trainer

trainer = make_trainer(Path(sys.argv[1]), use_cpu=False)
try:
    PerplexityCallback(trainer, HELD_OUT, LENGTHS)
except ValueError as error:
    Path(sys.argv[1], "refused").write_text(str(error))
"""


@pytest.mark.slow
def test_fsdp2_is_refused(tmp_path: Path) -> None:
    in_two_processes(tmp_path, SHARDED, FSDP2)
    assert "needs the whole model in every process, which FSDP" in (tmp_path / "refused").read_text()


def in_two_processes(folder: Path, text: str, environment: dict[str, str] | None = None) -> None:
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    command = [*LAUNCHER, str(script), str(folder), str(HELPERS)]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-5000:]
