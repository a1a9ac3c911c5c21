"""One process of distributed fine-tuning runs on the CPU: ``torchrun one_of_several.py FILE``.

The file lists the runs as JSON (see ``distributed_runs.Run``); they are done one after the other: starting costs more
than a run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate.state
import pytest
import torch
from torch.distributed.nn.functional import all_gather
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distributed_runs import Run


def shard_on_the_cpu() -> None:
    """Let accelerate take its FSDP2 or DeepSpeed path on a CPU, as on an accelerator; it falls back to DDP there.

    Everything that shards then runs for real: torch's fully_shard and its collectives, over gloo.
    """
    make = accelerate.state.AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not accelerate.state.AcceleratorState._shared_state:
            partial = accelerate.state.PartialState(cpu=True)
            partial._shared_state["distributed_type"] = accelerate.state.DistributedType.MULTI_GPU
        make(self, *args, **{**kwargs, "cpu": False})

    accelerate.state.AcceleratorState.__init__ = init


def attention_over_all(see_all: bool) -> Any:
    """Return an attention for torch's context parallelism, whose own has no CPU kernel.

    torch cuts a sequence in twice as many chunks as there are processes; process p gets chunks p and 2n - 1 - p.

    Args:
        see_all: Gather the keys of all processes; else each token sees its own process' only, which is wrong.
    """
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        if not kwargs.get("is_causal"):  # not while sequences are shared: accelerate's hook says is_causal
            return own(module, query, key, value, mask, scaling=scaling, **kwargs)
        rank, count, length = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), query.shape[2]

        def positions_of(process: int) -> torch.Tensor:
            half = torch.arange(length // 2)
            return torch.cat([half + chunk * (length // 2) for chunk in (process, 2 * count - 1 - process)])

        there = [rank]
        if see_all:
            there = list(range(count))
            key, value = (torch.cat(all_gather(tensor.contiguous()), dim=2) for tensor in (key, value))
        sees = positions_of(rank)[:, None] >= torch.cat([positions_of(process) for process in there])
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~sees, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attend


def do(run: Run) -> None:
    """Do a run; what it returned, or the message of what it raised, goes to its folder."""
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.data.tokens import MaskedTokens
    from hf_posenc.training import finetune
    from tiny_llama import make_tiny_llama
    from tiny_runs import Killed, config, kill_at, make_documents, make_tokenizer

    model: Any = None
    if "path" in run.model:
        model, tokenizer = load_model(run.model["path"], device="cpu")
        documents: Any = [Path(run.model["text"]).read_text()]
    else:
        model, tokenizer = make_tiny_llama(**run.model), make_tokenizer()
        generator = torch.Generator().manual_seed(7)
        documents = [torch.randint(1, 20, (n,), generator=generator) for n in run.documents] or make_documents()
    if run.masked:
        documents = [torch.cat([document, torch.tensor([tokenizer.eos_token_id])]) for document in documents]
        shares = [torch.arange(len(one)) % 120 < 30 * (1 + index % 3) for index, one in enumerate(documents)]
        documents = [MaskedTokens(*pair) for pair in zip(documents, shares, strict=True)]
    folder, rank = Path(run.folder), os.environ.get("RANK", "0")
    with pytest.MonkeyPatch.context() as patch:
        if run.attention != "own":
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention_over_all(run.attention == "gathered"))
        if run.killed_at:
            kill_at(patch, run.killed_at)
        try:
            result = finetune(model.to(getattr(torch, run.dtype)), tokenizer, documents, config(folder, **run.settings))
            hooks = sum(len(module._forward_pre_hooks) for module in result.model.modules())
            seen = {"kind": type(result.model).__name__, "hooks": hooks, "weights": result.model.state_dict()}
            torch.save(seen, folder / f"returned-{rank}.pt")
        except Killed:
            pass
        except (ValueError, RuntimeError) as error:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"raised-{rank}").write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        shard_on_the_cpu()
    for run in json.loads(Path(sys.argv[1]).read_text()):
        do(Run(**run))
