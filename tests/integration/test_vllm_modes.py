"""The plugin of vLLM: short requests as an unextended server answers them, long ones as a static server does.

``engines.py`` says how to name an environment of vLLM that is there already; to make one takes up to 40 minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapted_models import fit_adapted
from engines import answers, vllm_serving
from folders import HELPERS, SMOLLM2
from hf_posenc import patch_model, save_extended
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.exports import export_command
from hf_posenc.serving import check_server
from tiny_models import STATIC_METHODS, load_tiny, method_options
from wheels import build_wheel

pytestmark = pytest.mark.slow

ORIGINAL, TARGET = 256, 1024
BATCHED = {"max_num_batched_tokens": 96}  # fewer than a prompt has, which is then read in parts
# Of 32 tokens each, for ten requests of up to 300 tokens.
FEW_BLOCKS = {"num_gpu_blocks_override": 40, "enable_prefix_caching": False}


def request(
    ids: list[int], max_tokens: int = 8, extension: str | None = None, *, scored: bool = True
) -> dict[str, Any]:
    extra_args = None if extension is None else {"extension": extension}
    return {"ids": ids, "max_tokens": max_tokens, "scored": scored, "extra_args": extra_args}


def plugin_site(root: Path) -> Path:
    """Return a folder with this package and what its metadata says, for vLLM's Python path."""
    site = root / "site"
    (root / "build").mkdir()
    copy = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
    subprocess.run([*copy, build_wheel(root / "build")], check=True)
    return site


class Served:
    """What three servers answer: of the base model, of each extended folder, and of each with the plugin.

    Attributes:
        ids: A long text.
    """

    def __init__(self, root: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
        self.root, self.ids = root, tokenizer(load_novel("persuasion")[:6000], verbose=False)["input_ids"]
        base = load_tiny()
        base.save_pretrained(root / "base")
        tokenizer.save_pretrained(root / "base")
        for key in STATIC_METHODS:
            model = load_tiny()
            method, options = method_options(key, model)
            if "short_factor" in options:  # two lists are refused
                options["short_factor"] = options["long_factor"]
            patch_model(model, method, TARGET / ORIGINAL, **options)
            save_extended(model, root / key, tokenizer, base_model=str(root / "base"))
        ids = self.ids
        mixed = [request(ids[:200]), request(ids[:500]), request(ids[600:700]), request(ids[300:1000])]
        again = [[request(ids[:200], scored=False)], [request(ids[:200], scored=False)]]
        again += [[request(ids[:200], 8, "on", scored=False)], [request(ids[:500], scored=False)]]
        again += [[request(ids[:200], scored=False)]]
        many = [request(ids[at : at + 100], 50 if at % 200 else 200) for at in range(0, 1000, 100)]
        # Each batch, with the engine that it is put to.
        alone = [mixed[0]]  # as a server of the base model gets it too: rounding depends on what else is in a batch
        self.jobs: dict[str, Any] = {key: ({}, key, [mixed, alone]) for key in STATIC_METHODS}
        self.jobs |= {"again": ({}, "yarn", again), "in parts": (BATCHED, "longrope", [mixed])}
        self.jobs |= {"preempted": (FEW_BLOCKS, "yarn", [many])}
        self.jobs |= {"forced": ({}, "yarn", [[request(ids[:200], 8, "on"), request(ids[:200], 8, "off")]])}
        self.site = plugin_site(root)
        short = {
            name: {"engine": self._engine("base", {}), "batches": [self._short(batch) for batch in batches]}
            for name, (_, _, batches) in self.jobs.items()
        }
        with_rule = {
            name: {"engine": self._engine(key, options), "batches": batches}
            for name, (options, key, batches) in self.jobs.items()
        }
        self.base = self._ask(short)
        self.static = self._ask(with_rule, VLLM_PLUGINS="")
        self.plugin = self._ask(with_rule, PYTHONPATH=str(self.site))

    def _engine(self, key: str, options: dict[str, Any]) -> dict[str, Any]:
        length = ORIGINAL if key == "base" else TARGET
        return {"model": str(self.root / key), "max_model_len": length, "block_size": 32, **options}

    @staticmethod
    def _short(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for one in batch if len(one["ids"]) + one["max_tokens"] <= ORIGINAL]

    def _ask(self, jobs: dict[str, Any], **variables: str) -> Any:
        return answers("vllm", HELPERS / "vllm_requests_program.py", self.root, jobs, **variables)


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two answers, in nats."""
    found, wanted = one["log_probabilities"], other["log_probabilities"]
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("modes"))


@pytest.mark.parametrize("job", [*STATIC_METHODS, "in parts", "preempted"])
def test_short_requests_are_read_without_the_extension_and_long_ones_with_it(job: str, served: Served) -> None:
    """All of them in one batch, and both in the same server."""
    found, static = served.plugin[job]["batches"][0], served.static[job]["batches"][0]
    base = iter(served.base[job]["batches"][0])
    requests = served.jobs[job][2][0]
    modes = set()
    for one, by_rule, asked in zip(found, static, requests, strict=True):
        is_short = len(asked["ids"]) + asked["max_tokens"] <= ORIGINAL
        modes.add(is_short)
        if is_short:
            assert apart(one, next(base)) < 1e-5
            assert apart(one, by_rule) > 1e-2  # the same comparison with the other mode
        else:
            assert apart(one, by_rule) < 1e-5
    assert modes == {True, False}
    for (one,), (unextended,) in zip(served.plugin[job]["batches"][1:], served.base[job]["batches"][1:], strict=True):
        assert apart(one, unextended) < 1e-6
    if job == "preempted":
        assert served.plugin[job]["preemptions"] > 0


def test_the_prefix_cache_is_shared_within_a_mode_only(served: Served) -> None:
    found = [one for (one,) in served.plugin["again"]["batches"]]
    assert [one["cached"] for one in found] == [0, 192, 0, 192, 192]
    static, base = (
        [one for batch in server["again"]["batches"] for one in batch] for server in (served.static, served.base)
    )
    short = [found[0], found[1], found[4]]
    assert max(apart(one, base[0]) for one in short) < 1e-6
    assert max(apart(found[at], static[at]) for at in (2, 3)) < 1e-5


def test_a_request_may_say_which_mode_it_wants(served: Served) -> None:
    ((on, off),) = served.plugin["forced"]["batches"]
    ((static, _),) = served.static["forced"]["batches"]
    assert apart(on, static) < 1e-5
    assert apart(off, served.base["forced"]["batches"][0][0]) < 1e-6


def test_a_server_in_several_processes_tells_what_it_refuses(served: Served, tmp_path: Path) -> None:
    folder, ids = served.root / "yarn", served.ids

    def complete(address: str, extension: str, max_tokens: int) -> tuple[int, Any]:
        body = {"model": str(folder), "prompt": ids[:200], "max_tokens": max_tokens}
        data = json.dumps({**body, "vllm_xargs": {"extension": extension}}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    with vllm_serving(folder, tmp_path / "log", "--max-model-len", str(TARGET), PYTHONPATH=str(served.site)) as address:
        check = check_server(folder, address, server_dtype="float32", dtype="float32")
        assert check.agrees, str(check)
        assert check.short_rule == "unscaled"
        code, said = complete(address, "off", 57)
        assert code == 400
        assert "reads up to 256 tokens, and this request may get 257, 200 of them in the prompt" in str(said)
        code, said = complete(address, "maybe", 1)
        assert code == 400
        assert "must be 'auto', 'on' or 'off', got 'maybe'" in str(said)
        assert complete(address, "off", 56)[0] == 200
    assert "at most 256 tokens are read without the extension" in (tmp_path / "log").read_text()


def test_smollm2_reads_a_short_and_a_long_request_in_one_batch(tmp_path: Path) -> None:
    assert SMOLLM2.is_dir(), "scripts/fetch_smollm2 makes it"
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    patch_model(model, preset="smollm2-135m-fitted-4x")
    save_extended(model, tmp_path / "fitted", tokenizer, base_model=str(SMOLLM2))
    ids = tokenizer(load_novel("persuasion")[:60_000], verbose=False)["input_ids"]
    short, long = request(ids[:2048]), request(ids[:9216])  # the original length is 8192

    def ask(folder: Path, batches: list[Any], length: int, **variables: str) -> Any:
        jobs = {"all": {"engine": {"model": str(folder), "max_model_len": length}, "batches": batches}}
        program = HELPERS / "vllm_requests_program.py"
        return answers("vllm", program, tmp_path, jobs, VLLM_CPU_KVCACHE_SPACE="2", **variables)["all"]["batches"]

    ((alone,),) = ask(SMOLLM2, [[short]], 8192)
    ((by_rule, static),) = ask(tmp_path / "fitted", [[short, long]], 9728, VLLM_PLUGINS="")
    found = ask(tmp_path / "fitted", [[short], [short, long]], 9728, PYTHONPATH=str(plugin_site(tmp_path)))
    ((unmixed,), (mixed, extended)) = found
    assert apart(unmixed, alone) < 1e-6
    assert apart(mixed, alone) < 1e-4  # what else is in a batch changes how a CPU rounds
    assert apart(by_rule, alone) > 1e-2
    assert apart(extended, static) < 1e-5


def test_long_requests_get_an_adapter_with_its_rule_and_short_ones_neither(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    ids = tokenizer(load_novel("persuasion")[:6000], verbose=False)["input_ids"]
    result, wrapped = fit_adapted(tokenizer, TARGET)
    adapter = save_extended(wrapped, tmp_path / "adapter", tokenizer, fitted_on=result.facts)
    merged = save_extended(wrapped.merge_and_unload(), tmp_path / "merged", tokenizer, fitted_on=result.facts)
    whole, with_adapter = words_for_vllm(merged)[0], words_for_vllm(adapter)[-1]
    requests = [request(ids[:200]), request(ids[:500]), request(ids[600:700]), request(ids[300:1000])]

    def ask(words: list[str], requests: list[dict[str, Any]], **variables: str) -> Any:
        jobs = {"all": {"engine": engine_of(words), "batches": [requests]}}
        program = HELPERS / "vllm_requests_program.py"
        return answers("vllm", program, tmp_path, jobs, **variables)["all"]["batches"][0]

    site = str(plugin_site(tmp_path))
    found = ask(with_adapter, requests, PYTHONPATH=site)
    by_merged = ask(whole, requests, VLLM_PLUGINS="")
    base = ask([str(tiny_model_path()), "--max-model-len", str(ORIGINAL)], [requests[0], requests[2]])
    assert max(apart(found[0], base[0]), apart(found[2], base[1])) < 1e-5
    assert max(apart(found[1], by_merged[1]), apart(found[3], by_merged[3])) < 1e-4
    assert apart(found[0], by_merged[0]) > 1e-2

    with vllm_serving(Path(with_adapter[0]), tmp_path / "log", *with_adapter[1:], PYTHONPATH=site) as address:
        check = check_server(adapter, address, server_dtype="float32", dtype="float32")
        assert (check.verdict, check.short_rule) == ("agrees", "unscaled"), str(check)
    named = words_for_vllm(adapter)[0]
    with vllm_serving(Path(named[0]), tmp_path / "log", *named[1:], VLLM_PLUGINS="") as address:
        settings = {"server_dtype": "float32", "dtype": "float32"}
        assert check_server(adapter, address, server_model="extended", **settings).agrees
        of_base = check_server(adapter, address, server_model=named[0], **settings)
        assert (of_base.verdict, of_base.rule) == ("another", "llama3 without the adapter")


def words_for_vllm(folder: Path) -> list[list[str]]:
    """Return the words after ``vllm serve`` of each printed command."""
    lines = export_command(folder, "vllm").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("vllm serve")]


def engine_of(words: list[str]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that words of a command line mean."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-target-modules", nargs="+")
    for name in ("--max-model-len", "--max-loras", "--max-lora-rank"):
        parser.add_argument(name, type=int)
    for name in ("--hf-overrides", "--additional-config"):
        parser.add_argument(name, type=json.loads)
    return {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
