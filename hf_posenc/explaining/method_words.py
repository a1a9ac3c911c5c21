"""What each method does, in plain words: a table; the numbers are put beside it for a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodWords:
    """A method in words.

    Attributes:
        idea: What it does and why that helps.
        short_texts: What texts up to the original length pay for it.
        cache: Whether a KV cache stays right.
    """

    idea: str
    short_texts: str
    cache: str


_STATIC_CACHE = "The frequencies are the same at every length, so a KV cache stays right."
_DOOR_CACHE = (
    "A token depends on the tokens before it and on nothing else: with a KV cache, in chunks or token by token it "
    "reads the same. Only hf_posenc runs it."
)
_FREE = "Nothing: up to the original length the model is the unpatched one."
_NEARLY_FREE = (
    "Nothing up to the length below. From there on, within the original length too, far keys are told other distances."
)
_BY_PARTS = (
    "A pair that turned often in training has met every angle and tells near words apart: it is kept. One that hardly "
    "turned would meet angles it never had: its frequency is divided by the factor, so that the longer text covers the "
    "angles that the training length did."
)

METHOD_WORDS: dict[str, MethodWords] = {
    "linear": MethodWords(
        "All frequencies are divided by the factor, which is the same as dividing positions: the longer text is "
        "squeezed into the trained range. No angle is new, but neighbours stand closer than the model ever saw, in the "
        "fast pairs too, which tell them apart. So it wants fine-tuning.",
        "All of it: positions are squeezed at every length. Without fine-tuning short texts read clearly worse.",
        _STATIC_CACHE,
    ),
    "ntk": MethodWords(
        "The base is raised so that the slowest pair is stretched by the whole factor and the fastest not at all, with "
        "all others between them in equal ratios. Near words stay as they were. Pairs in the middle are stretched by "
        "less than the factor, and some of those then meet angles they never had: the model breaks before the target, "
        "so it takes a factor somewhat larger than the length asks for.",
        "A little: most pairs move somewhat at every length.",
        _STATIC_CACHE,
    ),
    "ntk_by_parts": MethodWords(
        f"{_BY_PARTS} Between beta_fast and beta_slow turns the two are mixed, linearly in the number of turns.",
        "A little: the slow pairs move at every length.",
        _STATIC_CACHE,
    ),
    "yarn": MethodWords(
        f"{_BY_PARTS} Between them the two are mixed along a ramp. And because attention over a longer text spreads "
        "over more words, logits are multiplied by a temperature that makes it sharper again.",
        "A little: the slow pairs and the temperature are felt at every length, short chats included.",
        _STATIC_CACHE,
    ),
    "llama3": MethodWords(
        f"{_BY_PARTS} Llama 3.1's choice of where: kept from high_freq_factor turns, divided up to low_freq_factor, "
        "mixed linearly in turns between; no temperature.",
        "A little: the slow pairs move at every length.",
        _STATIC_CACHE,
    ),
    "longrope": MethodWords(
        "Each pair is divided by a number of its own, from a list that was found by a search over perplexity or taken "
        "from another model: long_factor past the original length, short_factor up to it.",
        "What short_factor says; nothing if it is all ones.",
        "With two different lists a cache filled before the original length holds keys of the other list; with one "
        "list it stays right.",
    ),
    "abf": MethodWords(
        "A larger base, chosen by hand, slows all pairs but the fastest, the slow ones most. It is made for continued "
        "training at the new base, which lets the model learn the new angles.",
        "Before training all lengths read worse, the more the larger the base.",
        _STATIC_CACHE,
    ),
    "dynamic": MethodWords(
        "NTK's raised base, but only as far as needed where a query stands: up to the original length the model is "
        "left as it is, and past it each stage of tokens has the scale of its own end, for its queries and all keys "
        "they look at.",
        _FREE,
        _DOOR_CACHE,
    ),
    "dynamic_sequence": MethodWords(
        "Transformers' own dynamic rule: one raised base for the whole forward, chosen from its length. The factor "
        "makes it rise faster: the slowest pair is stretched by factor * length / original - (factor - 1).",
        "Nothing, in a forward of its own. In a batch with a long text, or after one, short texts get its scale.",
        "Keys cached under an earlier base stay as they were, so it is not exact with a KV cache.",
    ),
    "dynamic_yarn": MethodWords(
        "YaRN, but only as far as needed where a query stands: up to the original length the model is left as it is, "
        "and past it each stage of tokens has the ramp and the temperature of its own end, for its queries and all "
        "keys they look at.",
        _FREE,
        _DOOR_CACHE,
    ),
    "self_extend": MethodWords(
        "Near keys keep their distances. Farther ones share positions in groups: `group` tokens stand at one position, "
        "so the distance grows by one every `group` tokens and stays in the trained range. The order inside a group is "
        "lost, which far away matters little.",
        _NEARLY_FREE,
        _DOOR_CACHE,
    ),
    "dca": MethodWords(
        "The text is cut into chunks and positions start anew in each. Inside a chunk distances are as they are. To "
        "the chunk before they are right for a chunk's first tokens (the local window) and then stop growing with the "
        "query. Of all earlier chunks it is told where in its chunk a key stands, and not which chunk that is.",
        _NEARLY_FREE,
        _DOOR_CACHE,
    ),
    "rerope": MethodWords(
        "Distances stop growing at a window: every key that is farther away is told to be exactly that far. The model "
        "knows that such keys are far, not how far.",
        _NEARLY_FREE,
        _DOOR_CACHE,
    ),
    "leaky_rerope": MethodWords(
        "Distances grow more slowly beyond a window: by one every `leak` tokens. Far keys keep their order, and the "
        "distances told stay in the trained range for texts of about `leak` times the room that is left.",
        _NEARLY_FREE,
        _DOOR_CACHE,
    ),
}
_PLAIN = MethodWords("No words are written for this method yet; below are its numbers.", "See the numbers below.", "")


def words_of(method: str, scope: str = "query") -> MethodWords:
    """Return a method's words; those of Transformers' own rule for ``dynamic`` with scope ``sequence``."""
    key = "dynamic_sequence" if method == "dynamic" and scope == "sequence" else method
    return METHOD_WORDS.get(key, _PLAIN)
