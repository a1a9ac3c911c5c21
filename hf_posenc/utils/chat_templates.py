"""Chat templates that give the same text on every day."""

from __future__ import annotations

# Called with a format, as the function that Transformers gives to templates; 26 July 2024 is the date that Llama 3's
# template falls back on. "+%}" keeps a line break with which the template begins.
_PARTS = {"%Y": "2024", "%y": "24", "%m": "07", "%d": "26", "%B": "July", "%b": "Jul", "%A": "Friday", "%a": "Fri"}
_REPLACED = "".join(f".replace('{part}', '{value}')" for part, value in _PARTS.items())
_FIXED_DATE = f"{{% macro strftime_now(format) %}}{{{{ format{_REPLACED} }}}}{{% endmacro +%}}"


def with_fixed_date(template: str) -> str:
    """Return a chat template that writes 26 July 2024 where it would write the day on which it is rendered.

    So the same chats are the same tokens on the day on which a run that was stopped goes on.
    """
    return _FIXED_DATE + template if "strftime_now" in template else template
