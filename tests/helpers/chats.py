"""Chats, and chat templates of the shape of ChatML, with and without marks for the tokens of the assistant."""

from __future__ import annotations

# ChatML's shape. The first says which tokens are the assistant's; the second renders the same and does not.
TAGGED = (
    "{% if tools %}{{ 'tools ' + (tools | map(attribute='name') | join(' ')) + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '[' + message['role'] + ']\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token + '\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
PLAIN = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3's: of the assistant's turns the last one alone begins with a thought, and nothing says which tokens are its.
THINKING = PLAIN.replace(
    "{% if message['role'] == 'assistant' %}",
    "{% if message['role'] == 'assistant' %}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)


def turns(*contents: str) -> list[dict[str, str]]:
    """User and assistant, one after the other."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
