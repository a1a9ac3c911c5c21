"""lm-eval runs extended models: its own numbers on the same model, and none changed on short texts by staged scaling.

Slow, as lm-eval brings 340 MB that other tests do not need; see ``lm_eval_packages``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from folders import ROOT
from hf_posenc import load_extended, patch_model, perplexity, save_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.cli.main import main
from hf_posenc.training.lora import LoraSettings, add_lora
from lm_eval_packages import find_lm_eval
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    # numpy 2's words about rouge_score's and others' spelling, which the tests here do not run
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(rouge_score|sacrebleu|word2number|nltk).*"),
]

ORIGINAL, FACTOR = 64, 4
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: {kind}
{rest}
"""
CHOICE = """\
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]"""
ROLLING = """\
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]"""
GENERATE = """\
doc_to_text: "{{text}}"
doc_to_target: "{{question}}"
generation_kwargs: {max_gen_toks: 12, until: ["\\n"], do_sample: false}
metric_list: [{metric: exact_match}]"""


@pytest.fixture(scope="module", autouse=True)
def lm_eval() -> Path:
    return find_lm_eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_llama().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def sentence(dice: random.Random, length: int) -> str:
    return "".join(dice.choice("abcdefgh ijkl mnop") for _ in range(length)).strip() or "a"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks on short texts (up to 64 tokens, a token a character) and on long ones (up to 250)."""
    folder, dice = tmp_path_factory.mktemp("tasks"), random.Random(0)
    for size, longest in (("short", ORIGINAL - 8), ("long", 230)):
        lines = []
        for _ in range(10):
            question = sentence(dice, dice.randint(longest // 2, longest - 14))
            choices = [sentence(dice, dice.randint(1, 6)) for _ in range(3)]
            text = sentence(dice, dice.randint(longest // 2, longest - 6))
            lines.append({"question": question, "choices": choices, "gold": dice.randrange(3), "text": text})
        data = folder / f"{size}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kinds = {"multiple_choice": CHOICE, "loglikelihood_rolling": ROLLING, "generate_until": GENERATE}
        for kind, rest in kinds.items():
            name = f"{size}_{kind}"
            request = {"name": name, "data": data, "cache": folder / "cache", "kind": kind, "rest": rest}
            (folder / f"{name}.yaml").write_text(TASK.format(**request))
    return folder


def run(model: Any, tasks: Path, size: str, **model_args: Any) -> dict[str, Any]:
    """Run the three tasks of a size and return lm-eval's results."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import hf_posenc.evaluation.lm_eval_model  # noqa: F401  # registers the class

    results = simple_evaluate(
        model=model,
        model_args={"dtype": "float32", "device": "cpu", **model_args} if isinstance(model, str) else None,
        tasks=[f"{size}_{kind}" for kind in ("multiple_choice", "loglikelihood_rolling", "generate_until")],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return results


def answers(results: dict[str, Any]) -> dict[str, list[Any]]:
    """What the model said to every request of every sample: log-likelihoods to the bit, and texts."""
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in results["samples"].items()
    }


def scores(results: dict[str, Any]) -> dict[str, Any]:
    return {
        task: {name: value for name, value in row.items() if isinstance(value, float)}
        for task, row in results["results"].items()
    }


@pytest.mark.parametrize("size", ["short", "long"])
def test_without_a_method_it_is_lm_evals_own_model(checkpoint: Path, tasks: Path, size: str) -> None:
    ours = run("hf_posenc", tasks, size, pretrained=str(checkpoint))
    own = run("hf", tasks, size, pretrained=str(checkpoint))
    assert answers(ours) == answers(own)
    assert scores(ours) == scores(own)
    assert len(answers(ours)[f"{size}_multiple_choice"]) == 10


def test_yarn_is_lm_evals_own_model_on_the_saved_checkpoint(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    saved = save_extended(patch_model(make_tiny_llama(), "yarn", FACTOR), tmp_path / "yarn", make_tiny_tokenizer())
    ours = run("hf_posenc", tasks, "long", pretrained=str(checkpoint), method="yarn", factor=FACTOR)
    own = run("hf", tasks, "long", pretrained=str(saved))
    assert answers(ours) == answers(own)
    assert scores(ours) == scores(own)
    assert answers(ours) != answers(run("hf", tasks, "long", pretrained=str(checkpoint)))
    again = run("hf_posenc", tasks, "long", pretrained=str(saved))
    assert answers(again) == answers(own)


def test_staged_scaling_does_not_change_a_short_task(checkpoint: Path, tasks: Path) -> None:
    for method in ("dynamic_yarn", "dynamic"):
        for size, same in (("short", True), ("long", False)):
            before = run("hf", tasks, size, pretrained=str(checkpoint), max_length=ORIGINAL * FACTOR)
            after = run("hf_posenc", tasks, size, pretrained=str(checkpoint), method=method, factor=FACTOR)
            assert (answers(before) == answers(after)) is same, (method, size)
    yarn = run("hf_posenc", tasks, "short", pretrained=str(checkpoint), method="yarn", factor=FACTOR)
    assert answers(yarn) != answers(run("hf", tasks, "short", pretrained=str(checkpoint)))  # a static rule does


def log_likelihood(model: Any, context: str, continuation: str) -> float:
    """Of one continuation, alone in its batch and in float64 from the logits on."""
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    with torch.no_grad():
        log_probs = model(ids[:, :-1]).logits.double().log_softmax(-1)
    chosen = log_probs[0].gather(1, ids[0, 1:, None])[:, 0]
    return float(chosen[-len(tokenizer(continuation).input_ids) :].sum())


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
def test_batches_and_padding_change_nothing(checkpoint: Path, tasks: Path, method: str, batch_size: int) -> None:
    """Multiple choice is padded on the right, generation on the left."""
    results = run(
        "hf_posenc", tasks, "long", pretrained=str(checkpoint), method=method, factor=FACTOR, batch_size=batch_size
    )
    model = patch_model(make_tiny_llama(), method, FACTOR)
    lines = [json.loads(line) for line in (tasks / "long.jsonl").read_text().splitlines()]
    said = answers(results)
    for line, resps in zip(lines, said["long_multiple_choice"], strict=True):
        expected = [log_likelihood(model, line["question"], f" {choice}") for choice in line["choices"]]
        assert [float(resp[0][0]) for resp in resps] == pytest.approx(expected, abs=2e-4)
    for line, resps in zip(lines, said["long_loglikelihood_rolling"], strict=True):
        expected = log_likelihood(model, "<eos>", line["text"])
        assert float(resps[0][0]) == pytest.approx(expected, abs=2e-3)
    tokenizer = make_tiny_tokenizer()
    for line, resps in zip(lines, said["long_generate_until"], strict=True):
        ids = tokenizer(line["text"], return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert resps[0][0] == tokenizer.decode(new, skip_special_tokens=True).split("\n")[0]


def test_rolling_log_likelihood_is_our_perplexity(checkpoint: Path, tasks: Path) -> None:
    """One window over the whole text, every token scored, a BOS token before it: two programs, one number."""
    request = {"method": "dynamic_yarn", "factor": FACTOR}
    said = answers(run("hf_posenc", tasks, "long", pretrained=str(checkpoint), **request))["long_loglikelihood_rolling"]
    model, tokenizer = patch_model(make_tiny_llama(), **request), make_tiny_tokenizer()
    lines = [json.loads(line) for line in (tasks / "long.jsonl").read_text().splitlines()]
    for line, resps in zip(lines, said, strict=True):
        length = len(tokenizer(line["text"]).input_ids) + 1
        (record,) = perplexity(model, [line["text"]], [length], tokenizer=tokenizer, bos="prepended", progress=False)
        assert float(resps[0][0]) == pytest.approx(-record.nll_sum, rel=1e-6)


def test_a_folder_brings_its_rule(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    staged = patch_model(make_tiny_llama(), "dynamic_yarn", FACTOR)
    saved = save_extended(staged, tmp_path / "staged", make_tiny_tokenizer(), tokens_trained=123)
    loaded = run("hf_posenc", tasks, "long", pretrained=str(saved))
    patched = run("hf_posenc", tasks, "long", pretrained=str(checkpoint), method="dynamic_yarn", factor=FACTOR)
    assert answers(loaded) == answers(patched)
    assert loaded["config"]["hf_posenc"] == {**patched["config"]["hf_posenc"], "tokens_trained": 123}
    # Where hf_posenc is imported, from_pretrained puts the method in; config.json describes the base model.
    assert answers(loaded) == answers(run("hf", tasks, "long", pretrained=str(saved)))
    window = ORIGINAL * FACTOR
    assert answers(loaded) != answers(run("hf", tasks, "long", pretrained=str(checkpoint), max_length=window))
    with pytest.raises(ValueError, match=r"\(dynamic_yarn,.*4\),"):
        run("hf_posenc", tasks, "long", pretrained=str(saved), method="yarn", factor=2)
    request = {"method": "yarn", "factor": 2, "on_scaled": "replace"}
    replaced = run("hf_posenc", tasks, "long", pretrained=str(saved), **request)
    assert answers(replaced) == answers(run("hf_posenc", tasks, "long", pretrained=str(checkpoint), **request))


def test_adapters(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from hf_posenc.checkpoint.loading import load_model

    base, _ = load_model(checkpoint, device="cpu")
    adapted = add_lora(patch_model(base, "dynamic_yarn", FACTOR), LoraSettings(4, 8))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_extended(adapted, tmp_path / "adapter", tokens_trained=7)
    expected = run(HFLM(adapted.eval(), tokenizer=make_tiny_tokenizer(), max_length=256), tasks, "long")
    alone = run("hf_posenc", tasks, "long", pretrained=str(tmp_path / "adapter"))
    beside = run("hf_posenc", tasks, "long", pretrained=str(checkpoint), peft=str(tmp_path / "adapter"))
    for results in (alone, beside):
        assert answers(results) == answers(expected)
        assert results["config"]["hf_posenc"]["method"] == "dynamic_yarn"
        assert results["config"]["hf_posenc"]["tokens_trained"] == 7
    assert answers(expected) != answers(
        run("hf_posenc", tasks, "long", pretrained=str(checkpoint), method="dynamic_yarn", factor=FACTOR)
    )


def test_longer_texts_are_not_cut_and_results_say_what_was_measured(checkpoint: Path, tasks: Path) -> None:
    from hf_posenc.evaluation.lm_eval_model import ExtendedLM

    request = {"method": "yarn", "context_length": "256", "options": {"beta_fast": 16}}
    assert ExtendedLM(str(checkpoint), device="cpu").max_length == ORIGINAL
    extended = ExtendedLM(str(checkpoint), device="cpu", **request)
    assert extended.max_length == extended.tokenizer.model_max_length == 256  # the latter is for truncation=True
    assert ExtendedLM(str(checkpoint), device="cpu", **request, max_length=100).max_length == 100
    config = run("hf_posenc", tasks, "short", pretrained=str(checkpoint), **request)["config"]
    assert config["hf_posenc"] == {
        "version": hf_posenc.__version__,
        "method": "yarn",
        "factor": 4.0,
        "options": {"beta_fast": 16.0},
        "original_max_position_embeddings": ORIGINAL,
        "context_length": 256,
        "tokens_trained": 0,
        "max_length": 256,
    }


def test_a_loaded_model_is_taken_as_it_is(checkpoint: Path, tasks: Path) -> None:
    from hf_posenc.evaluation.lm_eval_model import ExtendedLM

    model = patch_model(make_tiny_llama(), "yarn", FACTOR)
    lm = ExtendedLM(model, tokenizer=make_tiny_tokenizer())
    assert lm.max_length == 256
    expected = run("hf_posenc", tasks, "long", pretrained=str(checkpoint), method="yarn", factor=FACTOR)
    assert answers(run(lm, tasks, "long")) == answers(expected)
    with pytest.raises(ValueError, match="patch_model"):
        ExtendedLM(model, method="yarn")


REFUSED = [
    ({"trust_remote_code": True}, "a checkpoint's own Python code is not run"),
    ({"tp_plan": "auto"}, "takes no tp_plan"),
    ({"factor": 4}, "need a --method, such as yarn, or a --preset"),
    ({"method": "yran"}, "unknown method 'yran'"),
    ({"method": "yarn", "factor": 2, "context_length": "8k"}, "not both"),
    ({"method": "yarn", "context_length": "long"}, "expected a number of tokens such as 32768 or 32k, got 'long'"),
    (
        {"method": "yarn", "dtype": "float31"},
        "unknown dtype 'float31'. Did you mean 'float32'\\? Known: auto, checkpoint, float32",
    ),
    ({"device": "abacus"}, "device 'abacus' cannot be used here"),
    ({"pretrained": "./nowhere"}, "there is no file or folder './nowhere'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_cannot_be_is_refused(checkpoint: Path, arguments: dict[str, Any], message: str) -> None:
    from lm_eval.api.registry import get_model

    import hf_posenc.evaluation.lm_eval_model  # noqa: F401  # registers the model class

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        get_model("hf_posenc").create_from_arg_obj({"pretrained": str(checkpoint), "device": "cpu", **arguments})


def test_the_command(
    checkpoint: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--tasks", "short_multiple_choice", "--include_path", str(tasks), "--batch_size", "4"]
    words += ["--output_path", "out", "--log_samples", "--device", "cpu"]
    before = list(sys.argv)
    request = ["--method", "dynamic_yarn", "--factor", "4", "--dtype", "float32"]
    assert main(["lm-eval", str(checkpoint), *request, *words]) == 0
    assert sys.argv == before
    assert "short_multiple_choice" in capsys.readouterr().out
    (written,) = Path("out").rglob("results_*.json")
    saved = json.loads(written.read_text())
    own = run("hf", tasks, "short", pretrained=str(checkpoint), batch_size=4)
    assert saved["results"]["short_multiple_choice"]["acc,none"] == scores(own)["short_multiple_choice"]["acc,none"]
    assert saved["config"]["hf_posenc"]["method"] == "dynamic_yarn"
    assert saved["config"]["hf_posenc"]["version"] == hf_posenc.__version__
    assert saved["config"]["model_args"]["method"] == "dynamic_yarn"
    assert main(["lm-eval", str(checkpoint), "--device", "cpu", "--tasks", "no_such_task"]) == 2
    assert "no_such_task" in capsys.readouterr().err


def test_lm_evals_own_command_knows_the_model_once_it_is_imported(
    checkpoint: Path, tasks: Path, tmp_path: Path, lm_eval: Path
) -> None:
    """In a process of its own, offline, with the arguments as words."""
    program = "import hf_posenc.evaluation.lm_eval_model; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    words = ["--model", "hf_posenc", "--model_args", f"pretrained={checkpoint},method=yarn,context_length=256"]
    words += ["options={'beta_fast': 16}", "--tasks", "short_multiple_choice", "--include_path", str(tasks)]
    words += ["--output_path", "out", "--device", "cpu"]
    path = os.pathsep.join([str(ROOT), str(lm_eval)])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("results_*.json")
    measured = json.loads(written.read_text())["config"]["hf_posenc"]
    assert (measured["method"], measured["factor"], measured["options"]) == ("yarn", 4.0, {"beta_fast": 16.0})


def test_a_trained_folder_says_how_long(tmp_path: Path) -> None:
    """The manifest's number is what the results have."""
    from hf_posenc.evaluation.lm_eval_model import ExtendedLM

    saved = save_extended(
        patch_model(make_tiny_llama(), "ntk", 2), tmp_path / "ntk", make_tiny_tokenizer(), tokens_trained=99
    )
    assert (read_manifest(saved) or {})["tokens_trained"] == 99
    info = ExtendedLM(str(saved), device="cpu").get_model_info()
    assert info["hf_posenc"]["tokens_trained"] == 99
    assert info["hf_posenc"]["method"] == "ntk"
    assert load_extended(saved).config.max_position_embeddings == info["hf_posenc"]["max_length"] == 128
