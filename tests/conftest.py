"""What every test gets: a fixed seed, few threads, no network, and tiny models made from configs."""

from __future__ import annotations

import gc
import json
import os

# Before anything imports the Hugging Face libraries: nothing here may reach for the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Threads that wait by spinning stall each other when test processes share two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny_llama import make_tiny_llama, make_tiny_tokenizer

# One that is alone has two threads; of processes that share two cores, two threads each take a tenth longer.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_collection_finish() -> None:
    """Leave what is imported and collected by now, a million objects, out of every later garbage collection.

    Trainer asks for one at each start, and half of a short run was spent in it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


# A file whose tests share a fixture that takes half a minute runs in one process; all other tests go to any.
IN_ONE_PROCESS = ("test_standard_saving.py",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return who shares the tests out; the marker that pytest-xdist 3.8 has for this has no effect in pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(IN_ONE_PROCESS) else nodeid

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _texts_to_retain(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what models write for a training out of the user's cache; of one model and seed it is written once."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """The factory: ``tiny_llama()`` or ``tiny_llama(max_position_embeddings=128)``; equal arguments, equal weights."""
    return make_tiny_llama


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words for the fine-tuning tests."""
    from tiny_runs import make_tokenizer  # here, as it imports all of training

    return make_tokenizer()


@pytest.fixture
def documents() -> list[torch.Tensor]:
    """Texts with something to learn, in the words of ``tokenizer``."""
    from tiny_runs import make_documents

    return make_documents()


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Path:
    """A folder with the tiny Llama and its tokenizer, as ``save_pretrained`` leaves it."""
    folder = tmp_path / "tiny-llama"
    make_tiny_llama().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def base_folder(tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Path:
    """The tiny Llama with an attention that is not nearly uniform, as it is at random's own size."""
    model = tiny_llama(tie_word_embeddings=True)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture(scope="session")
def run_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny Llama, its tokenizer and texts to fine-tune it on."""
    folder = tmp_path_factory.mktemp("run") / "base"
    make_tiny_llama().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    letters = torch.randint(97, 123, (24, 10), generator=torch.Generator().manual_seed(5)).tolist()
    rows = ({"text": "".join(map(chr, stretch)) * 20} for stretch in letters)
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def whole_run(run_base: Path) -> Path:
    """The fine-tuning run of ``killed_runs`` that nothing happened to."""
    from hf_posenc.cli.main import main
    from killed_runs import command

    assert main(command(run_base, run_base.with_name("whole"))) == 0
    return run_base.with_name("whole")


@pytest.fixture
def cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes PyTorch and oneDNN say that this CPU has instructions for bfloat16, or that it has not."""

    def fake(native: bool) -> None:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native, raising=False)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if native else "AVX2")
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)

    return fake
