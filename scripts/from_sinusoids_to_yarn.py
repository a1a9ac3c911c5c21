# %% [markdown]
# # From sinusoids to YaRN
#
# How a model gets the positions of its tokens, why RoPE replaced sinusoids, why ALiBi works beyond the trained length
# and RoPE does not, and what YaRN does about it.
#
# A notebook in plain Python: run it as a script (20 seconds), or cell by cell in VS Code or Jupyter. The output of a
# line is written after its `# ->`, and `tests/integration/test_walkthrough.py` checks it.

# %%
import math

import torch

from hf_posenc import convert_layout, patch_model, patched, perplexity, unpatch_model
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.methods.encodings.alibi import alibi_slopes
from hf_posenc.methods.encodings.rope import join_pairs, rope_decay_bound, rotate_complex, rotate_real, split_pairs
from hf_posenc.methods.encodings.sinusoidal import sinusoidal_shift, sinusoidal_table

torch.manual_seed(0)

# %% [markdown]
# ## 1. Attention does not know order
#
# A sum over keys is the same in any order. Only the causal mask tells a model without positions that some tokens come
# before others. Take the positions away from one layer, swap two earlier words, and the last token sees the same set.

# %%
query, keys, values = torch.randn(8), torch.randn(5, 8), torch.randn(5, 8)


def attend(query, keys, values, bias=0.0):
    return (keys @ query / 8**0.5 + bias).softmax(0) @ values


swapped = [1, 0, 2, 3, 4]
print(torch.allclose(attend(query, keys, values), attend(query, keys[swapped], values[swapped])))  # -> True

# %% [markdown]
# ## 2. Sinusoids: each position gets a vector
#
# Feature `2i` of position p is `sin(p / 10000 ** (2i / d))`, feature `2i + 1` the cosine (Vaswani et al. 2017, 3.5).
#
# *A slip*: some tutorials lose the minus sign of the exponent. The fastest wavelength is 2 pi tokens and the slowest
# some 47,000 here; with the other sign, the last pair would rotate a thousand times between two neighbouring tokens.

# %%
width = 64
wavelengths = [2 * math.pi * 10000 ** (2 * i / width) for i in range(width // 2)]
print(f"{wavelengths[0]:.2f} to {wavelengths[-1]:,.0f} tokens")  # -> 6.28 to 47,117 tokens
slip = [2 * math.pi * 10000 ** (-2 * i / width) for i in range(width // 2)]
print(f"{slip[-1]:.4f} tokens per rotation, with the other sign of the exponent")
# -> 0.0008 tokens per rotation, with the other sign of the exponent

# %% [markdown]
# Why sines *and* cosines: moving k tokens on is one rotation of the table, the same from every position. A layer can
# learn it, though nothing makes it.

# %%
table = sinusoidal_table(torch.arange(1000), width)
shift = sinusoidal_shift(17, width)
print(torch.allclose(table[:-17] @ shift.T, table[17:]))  # -> True
print(torch.allclose(shift @ shift.T, torch.eye(width, dtype=torch.float64)))  # -> True

# %% [markdown]
# ## 3. RoPE: rotate queries and keys instead
#
# RoPE puts that rotation where it is used: each pair of features of a query at position m is rotated by
# `m * frequency`, of a key at n by `n * frequency`. Of their product only `m - n` is left (Su et al. 2021, 3.2). A
# rotation changes no lengths, and no vector is spent on positions.

# %%
q, k = torch.randn(2, 1, width, dtype=torch.float64)
frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def rotated(states, position, **layout):
    return rotate_real(states, position * frequencies, **layout)


def score(m, n, **layout):
    return (rotated(q, m, **layout) * rotated(k, n, **layout)).sum().item()


print(abs(score(7, 3) - score(5007, 5003)) < 1e-9)  # -> True
print(abs(rotated(q, 123).norm() - q.norm()).item() < 1e-12)  # -> True
print(torch.allclose(rotated(q, 123), rotate_complex(q, 123 * frequencies)))  # -> True

# %% [markdown]
# *A slip*: there are two layouts of pairs. The paper, Meta's code and GPT-J rotate neighbours `(0, 1), (2, 3), ...`;
# GPT-NeoX and Transformers' Llama rotate halves, `(0, d/2), (1, d/2 + 1), ...`. Both are right, with weights made for
# them. Mixed, as where `rotate_half` meets cosines repeated for neighbours, a pair gets two angles: the result is no
# rotation, and the score depends on the two absolute positions.

# %%


def mixed(states, position):
    angles = (position * frequencies).repeat_interleave(2)  # for neighbours
    first, second = split_pairs(states, interleaved=False)  # of halves
    return states * angles.cos() + join_pairs(-second, first, interleaved=False) * angles.sin()


def mixed_score(m, n):
    return (mixed(q, m) * mixed(k, n)).sum().item()


print(abs(mixed_score(7, 3) - mixed_score(5007, 5003)) > 1)  # -> True
print(abs(score(7, 3, interleaved=True) - score(5007, 5003, interleaved=True)) < 1e-9)  # -> True

# %% [markdown]
# `convert_layout` moves the weights of a model to the other layout and the code with them. The model says the same.

# %%
model, tokenizer = load_model(tiny_model_path())
model = model.float()
ids = tokenizer("It is a truth universally acknowledged", return_tensors="pt")["input_ids"]
with torch.no_grad():
    before = model(ids).logits
    after = convert_layout(model)(ids).logits
print((before - after).abs().max().item() < 1e-4)  # -> True
convert_layout(model, to="half_split")

# %% [markdown]
# *A slip*: positions or frequencies in bfloat16. It has 8 bits: there is no 257. And a frequency that is off by one
# part in 500 is off by many radians after a few thousand tokens. RoPE is made in float32, whatever the model is in.

# %%
print(torch.tensor([256.0, 257.0, 258.0]).bfloat16().tolist())  # -> [256.0, 256.0, 258.0]
rounded = frequencies.bfloat16().double()
print(f"{(8000 * (rounded - frequencies)).abs().max().item():.1f} radians off at position 8000")
# -> 3.5 radians off at position 8000

# %% [markdown]
# ## 4. Scores fall with distance, on average
#
# The sum over pairs bounds the score, and falls with the distance: that is RoPE's "long-term decay". It is a bound, not
# a promise; a model may well look at one token far away.

# %%
bound = rope_decay_bound(torch.arange(4096), num_pairs=32)
spans = ((0, 1), (1, 16), (16, 256), (256, 4096))
print([round(bound[begin:end].mean().item(), 1) for begin, end in spans])  # -> [16.5, 10.4, 5.4, 3.5]

# %% [markdown]
# ## 5. ALiBi: do not rotate, subtract
#
# ALiBi takes `slope * distance` off each score, with a slope for each head. A head with slope 1/2 has forgotten what is
# ten tokens back, in a text of any length: nothing it sees past the trained length is new to it. That is why it works
# on longer texts, and why it cannot look far back.

# %%
print(alibi_slopes(8).tolist()[:3])  # -> [0.5, 0.25, 0.125]
print(f"{math.exp(-0.5 * 10):.4f} of a neighbour's weight, ten tokens back")
# -> 0.0067 of a neighbour's weight, ten tokens back

# %% [markdown]
# ## 6. Why RoPE fails beyond the trained length
#
# The tiny model of this package was trained on 256 tokens. Pairs that complete a rotation within them have met every
# angle. The others have met a part of the circle, and past 256 tokens they reach angles that the weights never saw.

# %%
within = 256 * frequencies / (2 * math.pi)
print(f"{int((within < 1).sum())} of {len(within)} pairs never complete a rotation in 256 tokens")
# -> 19 of 32 pairs never complete a rotation in 256 tokens


def reads(length):
    [record] = perplexity(
        model, [load_novel("persuasion")], [length], tokenizer=tokenizer, cut=True, max_documents=4, progress=False
    )
    return round(record.perplexity)


print(reads(256), "at 256 tokens,", reads(1024), "at 1024")  # -> 39 at 256 tokens, 78 at 1024

# %% [markdown]
# ## 7. Squeeze, stretch, or both: PI, NTK, YaRN
#
# - **PI** (`linear`) divides all frequencies by 4. No new angles, but neighbours are four times closer than ever.
# - **NTK** raises the base: the fastest pair is kept, the slowest divided by 4.
# - **YaRN** decides by rotations: pairs with many are kept, pairs with few are divided, a ramp between; a temperature.
# - **In stages** (`dynamic_yarn`): the scale depends on the position of the query, so short texts cost nothing.

# %%
for method in ("linear", "ntk", "yarn", "dynamic_yarn"):
    with patched(model, method, 4):
        print(f"{method}: {reads(256)} at 256, {reads(1024)} at 1024")
# -> linear: 116 at 256, 124 at 1024
# -> ntk: 50 at 256, 62 at 1024
# -> yarn: 56 at 256, 59 at 1024
# -> dynamic_yarn: 39 at 256, 51 at 1024

# %% [markdown]
# *A slip*: CodeLlama is not YaRN. It raised `rope_theta` to 1,000,000 and trained on 16k tokens (Roziere et al. 2023,
# 2.4): a larger base and nothing else, called ABF here. Every pair but the first is slower, no logit is scaled.

# %%
patch_model(model, "abf", 4, rope_theta=1_000_000.0)
rotary = model.get_decoder().rotary_emb
slower = frequencies / rotary.inv_freq.double()
print(f"{slower[0]:.0f} to {slower[-1]:.0f} times slower, attention times {rotary.attention_scaling}")
# -> 1 to 87 times slower, attention times 1.0
unpatch_model(model)
