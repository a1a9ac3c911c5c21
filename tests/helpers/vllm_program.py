"""Log-probabilities by vLLM on the CPU; ``engines.py`` runs this by the Python of an environment that has it."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(asked: str, answered: str) -> None:
    request = json.loads(Path(asked).read_text())
    ids, found = request["ids"], {}
    for name, (model, *words) in request["jobs"].items():  # as ``vllm serve`` takes them
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        adapter = None
        if "--lora-modules" in words:  # an option of the server, not of the engine
            at = words.index("--lora-modules")
            named, folder = words[at + 1].split("=", 1)
            adapter, words = LoRARequest(named, 1, folder), words[:at] + words[at + 2 :]
        given = ["--model", model, *words, "--dtype", "float32", "--enforce-eager"]
        engine = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(given)))
        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], wanted, use_tqdm=False, lora_request=adapter)
        found[name] = [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        del engine, output
        cleanup_dist_env_and_memory()
        gc.collect()
    Path(answered).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
