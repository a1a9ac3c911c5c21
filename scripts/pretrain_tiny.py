"""Train the tiny Llama of ``hf_posenc/assets/tiny`` from nothing, on five Austen novels at context 256 (or longer).

The sixth novel is held out. The model and the gradients are bfloat16 where the hardware has instructions for it, which
two such CPU cores do about twice as fast as float32, and float32 elsewhere; AdamW steps on a float32 copy, so that
small updates are not rounded away. The model is saved in bfloat16. The same seed, thread count and machine give
the same weights, also of a run that was killed and started again.

    python scripts/pretrain_tiny.py --output-dir hf_posenc/assets/tiny
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel
from hf_posenc.utils.dtypes import computes_natively
from hf_posenc.utils.files import write_whole

CONTEXT = 256  # of the model in the package
VOCAB_SIZE = 2048
EOS = "<|endoftext|>"
FACTS = "training.json"  # written last; a folder that has it is an earlier output
SAVE_STEPS = 100  # after so many a killed run goes on


def train_tokenizer(texts: list[str], context_length: int = CONTEXT) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text can be read back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, model_max_length=context_length
    )


def build_model(context_length: int = CONTEXT, device: str = "cpu") -> LlamaForCausalLM:
    """Return the model with random weights, in bfloat16 if the device computes that natively, else in float32."""
    dtype = torch.bfloat16 if computes_natively(torch.bfloat16, device) else torch.float32
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=context_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype=dtype,
        attn_implementation="eager" if context_length <= CONTEXT else "sdpa",  # the faster one on a CPU
    )
    return LlamaForCausalLM(config).to(device, dtype)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]


@torch.no_grad()
def held_out_perplexity(model: LlamaForCausalLM, ids: torch.Tensor, length: int, num_starts: int = 24) -> float:
    starts = torch.linspace(0, len(ids) - length - 1, num_starts).long().tolist()
    nll = 0.0
    for start in starts:
        window = ids[start : start + length].unsqueeze(0).to(model.device)
        logits = model(window).logits[0, :-1].float()
        nll += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    return math.exp(nll / (num_starts * (length - 1)))


def train(model: LlamaForCausalLM, stream: torch.Tensor, args: argparse.Namespace, unfinished: Path) -> None:
    """Train a model in place.

    Args:
        model: From ``build_model``.
        stream: Token ids, one text after the other.
        args: Those of this script.
        unfinished: The file that a killed run goes on from; remove it once the model is saved.

    Raises:
        SystemExit: The file is of a run with other settings.
    """
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    decayed = [m for m in masters if m.ndim > 1]
    plain = [m for m in masters if m.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    context, batch_size = args.context_length, max(1, args.step_tokens // args.context_length)
    num_steps = args.tokens // (batch_size * context)
    settings = {name: str(value) for name, value in vars(args).items() if name != "output_dir"}
    settings["dtype"] = str(model.dtype)
    first = go_on(unfinished, settings, masters, optimizer)
    with torch.no_grad():
        for param, master in zip(model.parameters(), masters, strict=True):
            param.copy_(master)
    began = time.perf_counter()
    for step in range(first, num_steps):
        warmup = min(1.0, (step + 1) / 100)
        lr = args.learning_rate * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        starts = torch.randint(0, len(stream) - context, (batch_size,))
        batch = torch.stack([stream[s : s + context] for s in starts.tolist()]).to(args.device)
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float() if param.grad is not None else None
            param.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        if step % 50 == 0 or step == num_steps - 1:
            rate = (step + 1 - first) * batch_size * context / (time.perf_counter() - began)
            print(f"step {step + 1}/{num_steps} loss {loss.item():.3f} lr {lr:.2e} {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % SAVE_STEPS == 0:
            state = {"masters": [master.data for master in masters], "optimizer": optimizer.state_dict()}
            save_state(unfinished, {"settings": settings, "step": step + 1, "rng": torch.get_rng_state(), **state})


def go_on(unfinished: Path, settings: dict[str, str], masters: list[torch.Tensor], optimizer: Any) -> int:
    """Put weights, optimizer and random numbers back to where a killed run was; return the steps that it did."""
    if not unfinished.is_file():
        return 0
    state = torch.load(unfinished, weights_only=True)
    if state["settings"] != settings:
        raise SystemExit(f"{unfinished} is of a run with other settings. Remove it, or give them again.")
    with torch.no_grad():
        for master, value in zip(masters, state["masters"], strict=True):
            master.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    print(f"going on after step {state['step']}", flush=True)
    return int(state["step"])


def save_state(unfinished: Path, state: dict[str, Any]) -> None:
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(unfinished, buffer.getvalue())


def unfinished_of(folder: Path) -> Path:
    """Return the file beside a model's folder that a killed training of it goes on from."""
    return folder.with_name(f".{folder.name}.unfinished")


def check_output(folder: Path) -> None:
    """Refuse to write among files that this script did not write.

    Raises:
        SystemExit: The folder holds something else than an earlier output.
    """
    if folder.exists() and not folder.is_dir():
        raise SystemExit(f"{folder} is a file. Give the folder to write the model to.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FACTS).is_file():
        raise SystemExit(f"{folder} is not empty and no earlier output ({FACTS} is not in it). Give a new folder.")


def save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, facts: dict[str, object]) -> None:
    """Write everything beside the folder first, then move it in, file by file; other files are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (Path(partial) / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == FACTS):
            os.replace(file, folder / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens trained on (default: %(default)s)")
    parser.add_argument("--context-length", type=int, default=CONTEXT, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--step-tokens", type=int, default=4096, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    check_output(args.output_dir)
    torch.manual_seed(args.seed)

    texts = [load_novel(name) for name in TRAIN_NOVELS]
    tokenizer = train_tokenizer(texts, args.context_length)
    stream = torch.tensor([token for text in texts for token in encode(tokenizer, text)])
    held_out = torch.tensor(encode(tokenizer, load_novel(HELD_OUT_NOVEL)))
    model = build_model(args.context_length, args.device)
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{num_params:,} parameters, {len(stream):,} training tokens, {len(held_out):,} held out", flush=True)

    began = time.perf_counter()
    train(model, stream, args, unfinished_of(args.output_dir))
    minutes = (time.perf_counter() - began) / 60
    perplexities = {n: round(held_out_perplexity(model, held_out, n), 2) for n in (256, 512, 1024, 2048)}
    print(f"{minutes:.1f} minutes; held-out perplexity by length: {perplexities}")

    facts = {
        "context_length": args.context_length,
        "tokens": args.tokens,
        "seed": args.seed,
        "minutes": round(minutes, 1),
        "perplexity": perplexities,
    }
    save(args.output_dir, model.to(torch.bfloat16), tokenizer, facts)
    unfinished_of(args.output_dir).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
