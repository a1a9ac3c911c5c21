"""Train an extended model with TRL's SFTTrainer, watch its perplexity at long contexts, save it and load it back.

python examples/train_with_trl.py --output-dir outputs/trl

The defaults run on a CPU: the tiny model of the package and pieces of its novels. Most Llama, Mistral and Qwen models
of the Hub work in its place (--model), and any data that SFTTrainer takes.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_posenc import PerplexityCallback, describe, load_extended, patch_model
from hf_posenc.assets import load_novel, tiny_model_path


def main() -> None:
    """Extend, train, save and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(tiny_model_path()), help="name on the Hub, or a folder")
    parser.add_argument("--method", default="yarn", help="see hf-posenc list methods")
    parser.add_argument("--factor", type=float, default=4, help="target length / original length")
    parser.add_argument("--max-steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="2e-5 is usual for a model of 7 billion")
    parser.add_argument("--output-dir", default="outputs/trl", help="folder of the trained model")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    original = model.config.max_position_embeddings
    patch_model(model, method=args.method, factor=args.factor)  # before the trainer is made
    target = describe(model)["context_length"]

    # SFTTrainer takes texts, chats, and prompts with completions. These are texts.
    train_dataset = Dataset.from_dict({"text": pieces(load_novel("emma"), 3 * target)[:32]})
    held_out = pieces(load_novel("persuasion"), 8 * target)[:4]

    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output_dir,
            max_length=target,  # tokens of a block; TRL cuts at 1024 by default
            packing=True,
            max_steps=args.max_steps,
            per_device_train_batch_size=2,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            eval_strategy="steps",  # PerplexityCallback measures whenever the trainer evaluates
            eval_steps=max(args.max_steps // 2, 1),
            per_device_eval_batch_size=1,
            save_strategy="no",
            logging_steps=1,
            bf16=torch.cuda.is_available(),  # TRL's default is bfloat16 everywhere, which a CPU is refused
            report_to="none",
        ),
        train_dataset=train_dataset,
        eval_dataset=Dataset.from_dict({"text": held_out[:1]}),
        processing_class=tokenizer,
    )
    # Adds the metrics eval_perplexity_256 and eval_perplexity_1024 (for these lengths), which trackers show and which
    # metric_for_best_model can name.
    trainer.add_callback(PerplexityCallback(trainer, held_out, [original, target]))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for length in (original, target):
        name = f"eval_perplexity_{length}"
        print(f"{length} tokens: perplexity {before[name]:.2f} before training, {after[name]:.2f} after")

    # Transformers' own save_pretrained, which save_model calls, writes the extension too.
    trainer.save_model(args.output_dir)
    loaded = load_extended(args.output_dir)
    said = describe(loaded)
    print(f"loaded: {said['method']}, factor {said['factor']:g}, {original} to {said['context_length']} tokens")


def pieces(text: str, characters: int) -> list[str]:
    """Cut a text into pieces of so many characters.

    Args:
        text: The text.
        characters: Of each piece; the rest of the text is left out.
    """
    return [text[begin : begin + characters] for begin in range(0, len(text) - characters + 1, characters)]


if __name__ == "__main__":
    main()
