# %% [markdown]
# # Extend a model and measure the result
#
# A language model reads badly beyond the length it was trained on. This notebook
#
# 1. loads a model and measures its perplexity at several context lengths;
# 2. extends it with several methods, without any training, and measures each one;
# 3. generates text after a prompt that is longer than the trained length;
# 4. saves the extended model, and loads it in a process that does not have hf_posenc.
#
# It needs no GPU and no download. On two quiet CPU cores it takes less than a minute.

# %%
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import describe, load_extended, patch_model, patched, perplexity, save_extended, unpatch_model
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.evaluation import paired_interval
from hf_posenc.reporting import text_table

# The tiny Llama in the package, so that nothing is downloaded. The name of any Llama, Mistral or Qwen model on the Hub
# works too, such as "HuggingFaceTB/SmolLM2-135M-Instruct", and so does the folder that scripts/fetch_smollm2 makes.
MODEL = tiny_model_path()
FACTOR = 4  # the model is to read texts 4 times as long as those it was trained on
METHODS = ("linear", "ntk", "yarn", "dynamic_yarn", "dca")
DOCUMENTS = [load_novel("persuasion")]  # texts that the model was not trained on; put your own here
NUM_PIECES = 8  # pieces of the documents that are measured, each as long as the longest context length
OUTPUT = Path("outputs/extend_and_measure")

plt.rcParams.update({"figure.figsize": (7, 4), "figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})

# %% [markdown]
# ## 1. The model as it is
#
# On a CPU this notebook computes in float32, so that the numbers are the same on every machine. On a GPU, leave `dtype`
# out: the model is then loaded in the dtype of the checkpoint.

# %%
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
original = model.config.max_position_embeddings
target = FACTOR * original
lengths = [original // 4, original // 2, original, 2 * original, target]
print(f"The model was trained on {original} tokens. It is to read {target}.")

# %% [markdown]
# **Perplexity** is the exponential of the mean loss per token: lower is better. `perplexity` feeds each piece of the
# documents to the model once, at the longest length. The losses of the first $N$ tokens of each piece give the number
# for context length $N$ (the protocol `truncated`). The numbers at different lengths are therefore of different tokens:
# compare the methods at one length, not the lengths with each other. Each record also holds a 95 % bootstrap interval
# over the pieces.

# %%


def measure():
    return perplexity(
        model, DOCUMENTS, lengths, tokenizer=tokenizer, cut=True, max_documents=NUM_PIECES, progress=False
    )


records = {"unpatched": measure()}
for record in records["unpatched"]:
    interval = f"{record.ci_low:.1f} to {record.ci_high:.1f}"
    print(f"{record.context_length:6} tokens: perplexity {record.perplexity:6.2f} (95 % interval {interval})")

# %% [markdown]
# ## 2. The model with each method
#
# `patched` extends the model for as long as its block lasts, and then restores it exactly. Before the block begins, the
# frequencies in the model are verified against an independent computation. Nothing is trained here.

# %%
for method in METHODS:
    with patched(model, method=method, factor=FACTOR):
        records[method] = measure()
print(text_table([record for rows in records.values() for record in rows]))

# %%
markers = iter("os^vDP")
for name, rows in records.items():
    x, y = [row.context_length for row in rows], [row.perplexity for row in rows]
    plt.plot(x, y, marker=next(markers), label=name, color="black" if name == "unpatched" else None)
plt.axvline(original, color="gray", linestyle="--", linewidth=1, label="trained length")
plt.xscale("log", base=2)
plt.xticks(lengths, [str(length) for length in lengths])
plt.xlabel("context length, in tokens")
plt.ylabel("perplexity (lower is better)")
plt.title(f"{FACTOR} times the trained length, without training")
plt.legend()
plt.show()

# %% [markdown]
# What the figure shows:
#
# - The unpatched model gets worse beyond the length that it was trained on.
# - `linear` is bad at every length. It is meant to be fine-tuned.
# - `ntk` and `yarn` read the target length much better than `linear`, but lose quality on short texts. They change the
#   frequencies at every length.
# - Up to the trained length, `dynamic_yarn` is the unpatched model, and `dca` is almost equal to it. At the target
#   length both are better than the other methods. Only hf_posenc runs them: Transformers and servers do not know these
#   rules.
#
# `paired_interval` says whether a difference between two methods is more than chance. It compares them on the same
# tokens, and gives the percentage by which the perplexity of the first is higher (+) or lower (-) than that of the
# second, with a 95 % interval.

# %%
for first, second in (("yarn", "unpatched"), ("dynamic_yarn", "yarn"), ("dca", "dynamic_yarn")):
    print(f"at {target} tokens, {first} against {second}: {paired_interval(records[first][-1], records[second][-1])}")

# %% [markdown]
# ## 3. Generate text after a long prompt
#
# The prompt is three times as long as the trained length. The model is small and was trained on novels by Jane Austen,
# so do not expect sense: look at whether it still writes words.

# %%
prompt = tokenizer(DOCUMENTS[0])["input_ids"][: 3 * original]
for method in (None, "yarn", "dynamic_yarn"):
    with patched(model, method=method, factor=FACTOR) if method else nullcontext():
        output = model.generate(torch.tensor([prompt]).to(model.device), max_new_tokens=40, do_sample=False)
    written = tokenizer.decode(output[0, len(prompt) :])
    print(f"{method or 'unpatched'}: {json.dumps(written)}\n")

# %% [markdown]
# ## 4. Save, and load in plain Transformers
#
# `patch_model` extends the model until `unpatch_model` restores it. `save_extended` writes the rule into `config.json`
# in the form that Transformers reads, and a manifest (`context_extension.json`) that says what was done.

# %%
patch_model(model, method="yarn", factor=FACTOR)
folder = save_extended(model, OUTPUT / "yarn", tokenizer)
print(*sorted(path.name for path in folder.iterdir()), sep="\n")
print(json.dumps(json.loads((folder / "config.json").read_text())["rope_parameters"], indent=2))

# %% [markdown]
# This process has hf_posenc imported. To show that it is not needed, another process loads the folder with Transformers
# alone, and computes the loss of the same text.

# %%
PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.tensor([tokenizer(open(sys.argv[2], encoding="utf-8").read())["input_ids"]])
with torch.no_grad():
    print(model(input_ids=ids, labels=ids).loss.item(), "hf_posenc" in sys.modules)
"""
text = OUTPUT / "text.txt"
text.write_text(tokenizer.decode(prompt), encoding="utf-8")
ids = torch.tensor([tokenizer(text.read_text(encoding="utf-8"))["input_ids"]]).to(model.device)
with torch.no_grad():
    loss = model(input_ids=ids, labels=ids).loss.item()
done = subprocess.run([sys.executable, "-c", PROGRAM, folder, text], capture_output=True, text=True, check=True)
loss_elsewhere, imported = done.stdout.split()
assert abs(loss - float(loss_elsewhere)) < 1e-4
print(f"loss here {loss:.4f}, in plain Transformers {float(loss_elsewhere):.4f}; hf_posenc imported there: {imported}")

# %% [markdown]
# The methods that only hf_posenc runs are saved too, but `config.json` stays that of the base model: plain Transformers
# reads such a folder as the base model. `load_extended` reads the manifest and applies the method.

# %%
unpatch_model(model)  # two methods at the same time are refused
patch_model(model, method="dynamic_yarn", factor=FACTOR)
save_extended(model, OUTPUT / "dynamic_yarn", tokenizer)
loaded = load_extended(OUTPUT / "dynamic_yarn", dtype=torch.float32)
for key in ("method", "factor", "original_max_position_embeddings", "context_length"):
    print(f"{key}: {describe(loaded)[key]}")

# %% [markdown]
# The next notebook, [fine_tune_on_your_text](fine_tune_on_your_text.ipynb), trains an extended model.
