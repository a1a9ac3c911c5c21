"""What MkDocs calls while it builds the site: pages made from the package, pictures, and formulas as MathML.

Nothing that these make is kept in the repository, so none of it can be older than the code.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import pictures  # beside this file, which scripts/docs puts on the path
import reference_pages
from hf_posenc.reporting.page import inline_svg

HERE = Path(__file__).parent
# A page from a file beside the package, and what its links are called on the site.
_COPIED = {"project/contributing.md": "CONTRIBUTING.md", "project/changelog.md": "CHANGELOG.md"}
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_PICTURE = re.compile(r'<img alt="([^"]*)" src="[^"]*?pictures/([\w.-]+)\.svg"(?: title="[^"]*")? ?/?>')


def on_pre_build(config: Any) -> None:
    """Draw all pictures once; ``scripts/docs`` removes those of an earlier build."""
    folder = Path(config.docs_dir) / "pictures"
    if not folder.is_dir():
        pictures.draw_all(folder)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the package and from files of the repository."""
    made = {path: make() for path, make in reference_pages.PAGES.items()}
    for path, source in _COPIED.items():
        made[path] = (HERE.parent / source).read_text(encoding="utf-8")
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Write formulas as MathML and put pictures into the page, so that their colours follow its theme."""
    content = _FORMULA.sub(_math, content)
    folder = Path(config.docs_dir) / "pictures"
    return _PICTURE.sub(lambda found: picture(folder, found[2], found[1]), content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the dialog for searching, which the theme leaves without a name for screen readers."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def _math(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]), display=display)


def picture(folder: Path, name: str, words: str) -> str:
    """Return one picture in its forms for wide and narrow screens, the second where there is one.

    Raises:
        PluginError: There is no such picture.
    """
    forms = [("wide", folder / f"{name}.svg"), ("narrow", folder / f"{name}.narrow.svg")]
    found = [(form, file) for form, file in forms if file.is_file()]
    if not found:
        raise PluginError(f"there is no picture {name}.svg; docs/pictures.py draws these: {_names(folder)}")
    drawn = [
        f'<svg class="{form if len(found) == 2 else "only"}" role="img" aria-label="{words}"'
        + str(inline_svg(file.read_text(encoding="utf-8"), f"{name}-{form}"))
        for form, file in found
    ]
    return f'<span class="picture">{"".join(drawn)}</span>'


def _names(folder: Path) -> str:
    return ", ".join(sorted({file.name.partition(".")[0] for file in folder.glob("*.svg")}))
