# %% [markdown]
# # Fine-tune an extended model on your own text
#
# This notebook
#
# 1. takes a folder with text files and holds some of the text out;
# 2. asks what the training will cost, before anything is loaded;
# 3. extends a model with YaRN and trains it on a small budget of tokens;
# 4. compares the perplexity before and after;
# 5. reads the model card that was written, and loads the trained model.
#
# It needs no GPU and no download. On two quiet CPU cores it takes about a minute.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import FinetuneConfig, describe, finetune, plan
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.planning import plan_text

# The tiny Llama in the package, so that nothing is downloaded. The name of any Llama, Mistral or Qwen model on the Hub
# works too, such as "HuggingFaceTB/SmolLM2-135M-Instruct", and so does the folder that scripts/fetch_smollm2 makes.
# Then give LEARNING_RATE and TOKEN_BUDGET other values, and train on a GPU.
MODEL = tiny_model_path()
FACTOR = 4  # the model is to read texts 4 times as long as those it was trained on
TEXTS = Path("my_texts")  # a folder with .txt files
HELD_OUT = "persuasion.txt"  # the one of them that is not trained on
TOKEN_BUDGET = 32_768  # tokens to train on; 1 to 10 million is usual for larger models
LEARNING_RATE = 5e-4  # a model of 5 million parameters takes larger steps than the 2e-5 that are usual for 7 billion
OUTPUT = Path("outputs/fine_tune_on_your_text/yarn")

plt.rcParams.update({"figure.figsize": (7, 3.6), "figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})

# %% [markdown]
# ## 1. The texts
#
# Put your own `.txt` files into the folder `TEXTS` before you run this cell. If the folder does not exist, it is filled
# with three novels from the package. The tiny model was pretrained on two of them, but not on *Persuasion*, which is
# held out here.
#
# The file `HELD_OUT` is not trained on. The model is measured on it, because results on texts that it was trained on
# say nothing about how it reads other texts.

# %%
if not TEXTS.is_dir():
    TEXTS.mkdir()
    for name in ("emma", "prideprejudice", "persuasion"):
        (TEXTS / f"{name}.txt").write_text(load_novel(name), encoding="utf-8")
files = [path for path in sorted(TEXTS.glob("*.txt")) if path.name != HELD_OUT]
documents = [path.read_text(encoding="utf-8") for path in files]
held_out = [(TEXTS / HELD_OUT).read_text(encoding="utf-8")]
print("trained on:", ", ".join(path.name for path in files))
print("measured on:", HELD_OUT)

# %% [markdown]
# ## 2. What the training will cost
#
# `plan` reads only the config of the model. It says how much memory is needed to read and to train at the target
# length, what fits into the memory of a device (here a GPU with 24 GB), which method and recipe it advises, and which
# command trains the model. It runs nothing on the device.

# %%
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
original = model.config.max_position_embeddings
target = FACTOR * original
made = plan(model.config, target, gpu_memory="24GB", training=True, token_budget=TOKEN_BUDGET)
print(plan_text(made))

# %% [markdown]
# The plan advises PoSE for so small a budget: it trains in blocks of the original length whose positions skip. This
# notebook trains in blocks of the full target length, which is simpler and affordable for a model of this size.
#
# ## 3. The training
#
# `finetune` extends the model, packs the documents into blocks of the target length, trains, measures the perplexity of
# the held-out text, and writes the trained model with a model card. `FinetuneConfig` is a `TrainingArguments`: the
# options of Transformers' Trainer work under their own names.

# %%
config = FinetuneConfig(
    output_dir=str(OUTPUT),
    method="yarn",
    factor=FACTOR,
    token_budget=TOKEN_BUDGET,
    learning_rate=LEARNING_RATE,
    per_device_train_batch_size=2,
    eval_lengths=[original // 2, original, 2 * original, target],
    eval_documents=8,  # pieces of the held-out text, each as long as the longest length
    resume_from_checkpoint="true",  # if the run was interrupted, run this cell again: it goes on where it was
    logging_steps=4,  # steps between losses that are shown; the log file has every step
    report_to="none",
)
result = finetune(model, tokenizer, documents, config, eval_documents=held_out)
print(f"{result.steps} steps, {result.tokens_trained:,} tokens, mean loss {result.train_loss:.3f}")

# %% [markdown]
# The loss of every step is in `train_log.jsonl`.

# %%
log = [json.loads(line) for line in (OUTPUT / "train_log.jsonl").read_text().splitlines()]
plt.plot([line["tokens_trained"] for line in log], [line["loss"] for line in log], marker=".")
plt.xlabel("tokens trained on")
plt.ylabel("loss, in nats per token")
plt.title("Loss of each training step")
plt.show()

# %% [markdown]
# ## 4. Before and after
#
# The records are of three models: the base model without an extension (`none`), the extended model before the training,
# and the extended model after it. All are of the same tokens.

# %%
rows = {"base model": [], f"yarn x{FACTOR}, before training": [], f"yarn x{FACTOR}, trained": []}
for record in result.records:
    which = 0 if record.method == "none" else 2 if record.tokens_trained else 1
    list(rows.values())[which].append(record)
for name, records in rows.items():
    numbers = [f"{record.perplexity:.2f} at {record.context_length}" for record in records]
    print(f"{name}: perplexity {', '.join(numbers)}")

before, after = list(rows.values())[1:]
assert after[-1].perplexity < before[-1].perplexity

# %%
for (name, records), marker in zip(rows.items(), "osv", strict=True):
    plt.plot([one.context_length for one in records], [one.perplexity for one in records], marker=marker, label=name)
plt.axvline(original, color="gray", linestyle="--", linewidth=1, label="trained length of the base model")
plt.xscale("log", base=2)
lengths = [record.context_length for record in after]
plt.xticks(lengths, [str(length) for length in lengths])
plt.xlabel("context length, in tokens")
plt.ylabel("perplexity (lower is better)")
plt.title(f"Held-out text, {TOKEN_BUDGET:,} tokens of training")
plt.legend()
plt.show()

# %% [markdown]
# After these few tokens, the trained model reads the target length much better than both others. Up to its original
# length it is still worse than the base model: YaRN changes the frequencies at every length, and a larger token budget
# reduces this loss.
#
# In general, a part of what training gains is the kind of text and not the length: compare the gain at the target
# length with the gain at the original length. These are also one held-out text and one run. Train with several values
# of `seed` before you rely on a small difference.
#
# ## 5. The model card, and loading the model
#
# `README.md` in the output folder is a model card for the Hub. It says what was done and measured, and what was not.

# %%
card = (OUTPUT / "README.md").read_text(encoding="utf-8")
print(card.partition("\n---\n")[2].partition("## Loading")[0].strip())

# %% [markdown]
# `yarn` is a rule that Transformers knows: the trained model loads without hf_posenc, and servers can run it.

# %%
trained = AutoModelForCausalLM.from_pretrained(OUTPUT, dtype=torch.float32)
said = describe(trained)
print(f"{said['method']}, factor {said['factor']:g}: {said['original_max_position_embeddings']} to {target} tokens")
prompt = tokenizer(held_out[0])["input_ids"][: 3 * original]
output = trained.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
print(json.dumps(tokenizer.decode(output[0, len(prompt) :])))

# %% [markdown]
# The same from the shell:
#
# ```sh
# hf-posenc finetune MODEL --documents my_texts --method yarn --factor 4 --token-budget 1M --output-dir longer
# hf-posenc eval longer --documents held-out.txt --context-lengths 2k 8k --output results.jsonl
# ```
#
# Several GPUs: see [several_gpus.sh](several_gpus.sh).
