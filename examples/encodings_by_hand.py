# %% [markdown]
# # Positional encodings by hand
#
# This notebook writes each common positional encoding in a few lines of PyTorch, and compares every one with the
# implementation in hf_posenc. It covers:
#
# 1. sinusoidal encodings, which are added to the embeddings;
# 2. rotary position embeddings (RoPE), in real and in complex numbers, and in both layouts of the pairs;
# 3. ALiBi, which subtracts a penalty from the attention scores;
# 4. the rules that change RoPE's frequencies to read longer texts: position interpolation (PI), NTK-aware scaling,
#    and YaRN.
#
# It needs no GPU and no download, and takes a few seconds.

# %%
import math

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import convert_layout, patched
from hf_posenc.assets import tiny_model_path
from hf_posenc.methods.encodings.alibi import alibi_slopes
from hf_posenc.methods.encodings.rope import rotate_complex, rotate_real
from hf_posenc.methods.encodings.sinusoidal import sinusoidal_table

# The tiny Llama in the package, so that nothing is downloaded. The name of any Llama, Mistral or Qwen model on the Hub
# works too, such as "HuggingFaceTB/SmolLM2-135M-Instruct", and so does the folder that scripts/fetch_smollm2 makes.
MODEL = tiny_model_path()
FACTOR = 4  # the model is to read texts 4 times as long as those it was trained on

torch.manual_seed(0)
plt.rcParams.update({"figure.figsize": (7, 3.4), "figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})

# %% [markdown]
# ## 1. Sinusoidal encodings
#
# The transformer of Vaswani et al. (2017, section 3.5) adds a vector to the embedding of each token. The vector
# depends only on the position $p$ of the token. Features $2i$ and $2i + 1$ of a vector with $d$ features are
#
# $$\sin\left(p \cdot 10000^{-2i/d}\right) \quad \text{and} \quad \cos\left(p \cdot 10000^{-2i/d}\right).$$
#
# The first pair of features repeats after $2\pi$ tokens, and the last after almost $10000 \cdot 2\pi$ tokens.

# %%


def sinusoids(length, width):
    positions = torch.arange(length, dtype=torch.float64)
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions[:, None] * frequencies
    table = torch.empty(length, width, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


table = sinusoids(256, 64)
assert torch.allclose(table, sinusoidal_table(torch.arange(256), 64))
print("The table by hand is equal to that of hf_posenc.")

# %%
plt.imshow(table.T, aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
plt.colorbar(label="value")
plt.xlabel("position of the token")
plt.ylabel("feature")
plt.title("Sinusoidal encodings: the first features repeat often, the last hardly change")
plt.grid(False)
plt.show()

# %% [markdown]
# The dot product of two of these vectors depends only on the distance between their positions. The reason is
# $\sin a \sin b + \cos a \cos b = \cos(a - b)$.

# %%
for first, second in ((10, 3), (110, 103), (210, 203)):
    print(f"positions {first} and {second}: dot product {table[first] @ table[second]:.6f}")

# %% [markdown]
# ## 2. Rotary position embeddings (RoPE)
#
# RoPE (Su et al. 2021) adds nothing to the embeddings. In each layer it takes the features of a query or key in
# pairs, and rotates each pair by an angle: the position times the frequency of the pair. The frequency of pair $i$ is
# $\theta^{-2i/d}$, where $\theta$ is the base (`rope_theta` in a config, usually 10,000 or more) and $d$ the number of
# features of an attention head.
#
# ### In real numbers
#
# A pair $(x, y)$ that is rotated by the angle $a$ becomes $(x \cos a - y \sin a,\; y \cos a + x \sin a)$.
#
# Two layouts are in use. The paper, Meta's Llama code and GPT-J pair neighbouring features: (0, 1), (2, 3), and so on
# (*interleaved*). GPT-NeoX and Transformers' Llama pair feature $i$ with feature $i + d/2$ (*half-split*).

# %%


def rope_frequencies(width, theta=10000.0):
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def rotate_interleaved(x, angles):
    first, second = x[..., 0::2], x[..., 1::2]
    rotated = torch.empty_like(x)
    rotated[..., 0::2] = first * angles.cos() - second * angles.sin()
    rotated[..., 1::2] = second * angles.cos() + first * angles.sin()
    return rotated


def rotate_half_split(x, angles):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


states = torch.randn(256, 64, dtype=torch.float64)  # one head: 256 tokens of 64 features
angles = torch.arange(256, dtype=torch.float64)[:, None] * rope_frequencies(64)
assert torch.allclose(rotate_interleaved(states, angles), rotate_real(states, angles, interleaved=True))
assert torch.allclose(rotate_half_split(states, angles), rotate_real(states, angles, interleaved=False))
print("Both layouts by hand are equal to those of hf_posenc.")

# %% [markdown]
# ### In complex numbers
#
# If a pair $(x, y)$ is read as the complex number $x + iy$, rotating it by the angle $a$ is one multiplication by
# $e^{ia}$. Meta's Llama code does it this way.

# %%


def rotate_as_complex(x, angles):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # neighbouring features: the interleaved layout
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


assert torch.allclose(rotate_as_complex(states, angles), rotate_interleaved(states, angles))
assert torch.allclose(rotate_as_complex(states, angles), rotate_complex(states, angles, interleaved=True))
print("Complex and real numbers give the same rotation.")

# %% [markdown]
# ### Only the distance counts
#
# The score of a query at position $m$ and a key at position $n$ depends only on $m - n$: rotating both by the same
# angle changes nothing. A rotation also keeps the length of a vector.

# %%
query, key = torch.randn(2, 64, dtype=torch.float64)
for m, n in ((10, 3), (110, 103), (5010, 5003)):
    rotated_query = rotate_half_split(query, m * rope_frequencies(64))
    rotated_key = rotate_half_split(key, n * rope_frequencies(64))
    print(f"query at {m}, key at {n}: score {rotated_query @ rotated_key:.6f}")

# %% [markdown]
# ### The layouts are not interchangeable
#
# Weights that were trained with one layout give a different, worse model with the other. To change the layout, the rows
# of the query and key projections have to be reordered too. `convert_layout` does both, and the model computes the
# same as before.

# %%
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
ids = tokenizer("It is a truth universally acknowledged, that a single man", return_tensors="pt")["input_ids"]
with torch.no_grad():
    half_split = model(ids).logits
    interleaved = convert_layout(model)(ids).logits
convert_layout(model, to="half_split")
print(f"largest difference of the logits below 0.001: {(half_split - interleaved).abs().max().item() < 1e-3}")

# %% [markdown]
# ## 3. ALiBi
#
# ALiBi (Press et al. 2021) rotates nothing. From each attention score it subtracts a slope times the distance between
# query and key. Each of the $n$ heads has its own slope: head $h$ (counted from 1) has $2^{-8h/n}$, if $n$ is a power
# of two.

# %%


def slopes_by_hand(num_heads):
    return torch.tensor([2 ** (-8 * head / num_heads) for head in range(1, num_heads + 1)], dtype=torch.float64)


def alibi_by_hand(num_heads, length):
    positions = torch.arange(length)
    distance = positions[:, None] - positions[None, :]  # query minus key; the causal mask hides the negative ones
    return -slopes_by_hand(num_heads)[:, None, None] * distance


assert torch.equal(slopes_by_hand(8), alibi_slopes(8))
print("the bias of the first head, for a query at position 4:", alibi_by_hand(8, 5)[0, -1].tolist())

# %%
distances = torch.arange(0, 200)
for head, slope in enumerate(slopes_by_hand(8).tolist(), 1):
    if head % 2:
        plt.plot(distances, torch.exp(-slope * distances), label=f"head {head}, slope {slope:.3g}")
plt.xlabel("distance between query and key, in tokens")
plt.ylabel("factor of the attention weight")
plt.title("ALiBi: each head looks back a fixed distance")
plt.legend()
plt.show()

# %% [markdown]
# No distance is new to a head in a longer text: what is far away already has a weight of almost zero. This is why
# models that were trained with ALiBi read texts longer than those they were trained on, and also why they use little of
# what is far away.
#
# ## 4. Reading longer texts with RoPE: PI, NTK and YaRN
#
# A model with RoPE that was trained on texts of length $L$ has seen each pair at angles up to $L$ times its frequency.
# In a text of $s \cdot L$ tokens ($s$ is the *factor*), the slow pairs reach angles that the weights have never seen,
# and the model reads badly. The following rules change the frequencies.

# %%
config = model.config
original = config.max_position_embeddings  # L, the length the model was trained on
theta = config.rope_parameters["rope_theta"]
width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
plain = rope_frequencies(width, theta)
print(f"trained on {original} tokens, base {theta:g}, {width} features in each head, factor {FACTOR}")

# %% [markdown]
# **Position interpolation (PI)**, called `linear` in Transformers, divides every frequency by the factor (Chen et al.
# 2023). No pair reaches a new angle, but neighbouring tokens are closer together than in any text the model has seen.

# %%


def pi_frequencies(plain, factor):
    return plain / factor


# %% [markdown]
# **NTK-aware scaling** raises the base instead, so that the fastest pair keeps its frequency and the slowest is divided
# by exactly the factor (Peng et al. 2023, section 3.1).

# %%


def ntk_frequencies(theta, width, factor):
    return rope_frequencies(width, theta * factor ** (width / (width - 2)))


# %% [markdown]
# **YaRN** decides for each pair by the number of full rotations that it makes within $L$ tokens (Peng et al. 2023,
# sections 3.2 and 3.4). Pairs with 32 rotations or more keep their frequency, pairs with less than one are divided by
# the factor, and between them a linear ramp over the index of the pair mixes both. YaRN also multiplies the attention
# scores: cosines and sines are multiplied by $0.1 \ln s + 1$.

# %%


def yarn_frequencies(plain, theta, original, factor):
    width = 2 * len(plain)

    def pair_with(rotations):  # the index, not rounded, of the pair that rotates so many times in the original length
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_with(32)), 0), min(math.ceil(pair_with(1)), width - 1)
    divided = ((torch.arange(len(plain), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / factor * divided + plain * (1 - divided), 0.1 * math.log(factor) + 1


# %% [markdown]
# `patched` puts a rule into the model for as long as its block lasts. The model's own rotary module then holds the
# frequencies that Transformers itself computes for the rule. They agree with those by hand:

# %%
yarn, attention_factor = yarn_frequencies(plain, theta, original, FACTOR)
by_hand = {
    "linear": (pi_frequencies(plain, FACTOR), 1.0),
    "ntk": (ntk_frequencies(theta, width, FACTOR), 1.0),
    "yarn": (yarn, attention_factor),
}
for method, (frequencies, scaling) in by_hand.items():
    with patched(model, method=method, factor=FACTOR):
        rotary = model.model.rotary_emb
        assert torch.allclose(rotary.inv_freq.double(), frequencies, rtol=1e-5)
        assert math.isclose(rotary.attention_scaling, scaling)
    print(f"{method}: equal, attention factor {scaling:.4f}")

# %%
for method, (frequencies, _) in by_hand.items():
    plt.plot(plain / frequencies, marker=".", label=method)
plt.axhline(1, color="gray", linewidth=1)
plt.xlabel("pair of features, from the fastest to the slowest")
plt.ylabel("plain frequency / new frequency")
plt.title(f"By how much each rule slows each pair down, factor {FACTOR}")
plt.legend()
plt.show()

# %% [markdown]
# The notebook [extend_and_measure](extend_and_measure.ipynb) measures what these rules do to the perplexity of a model.
