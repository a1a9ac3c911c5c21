"""Execute the notebooks of examples/: each .py there is the source, and the .ipynb beside it shows what it gives.

The sources are in jupytext's percent format. The same source and results give the same file: cells are numbered, and
nothing that differs from run to run (times, progress bars, log lines) is kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from hf_posenc.assets import tiny_model_path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_TIMEOUT = 1800  # seconds for one cell; it takes far less, but not on a machine that does other work too


def sources(folder: Path = EXAMPLES) -> list[Path]:
    """Return the Python files that are notebooks: those that begin with a cell."""
    return [path for path in sorted(folder.glob("*.py")) if path.read_text(encoding="utf-8").startswith("# %%")]


def read_source(path: Path) -> NotebookNode:
    """Return the cells of a Python file in percent format as a notebook without outputs.

    Args:
        path: The file.
    """
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        cell.source = cell.source.strip("\n")  # ruff leaves two empty lines before a function
    return notebook


def execute(path: Path, folder: Path) -> NotebookNode:
    """Run a source as a notebook and return it with its outputs.

    Args:
        path: The Python file in percent format.
        folder: The working folder, which gets the files that the notebook writes.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an error.
    """
    notebook = read_source(path)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook, timeout=_TIMEOUT, startup_timeout=_TIMEOUT, record_timing=False, resources=resources
    ).execute()
    return tidied(notebook)


def tidied(notebook: NotebookNode) -> NotebookNode:
    """Return an executed notebook without what differs from run to run.

    Progress bars and log lines, which are written to the standard error stream, are left out, and so are what the
    kernel says of its own version and the display of Trainer's progress, which holds times. The folder of the tiny
    model, which differs from machine to machine, is written as MODEL.
    """
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _joined(output for output in cell.outputs if not _is_left_out(output))
    return notebook


def _is_left_out(output: NotebookNode) -> bool:
    if output.output_type == "stream":
        return bool(output.name == "stderr")
    return output.output_type == "display_data" and "image/png" not in output.data


def _joined(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Join what is printed one after the other, which arrives in pieces of chance."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = output.text.replace(str(tiny_model_path()), "MODEL")
            if joined and joined[-1].output_type == "stream":
                joined[-1].text += output.text
                continue
        joined.append(output)
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the notebooks of examples/ and rewrite their .ipynb files.")
    parser.add_argument("names", nargs="*", help="names of notebooks, such as extend_and_measure; default: all")
    names = parser.parse_args().names
    known = {path.stem: path for path in sources()}
    if unknown := sorted(set(names) - known.keys()):
        parser.error(f"no notebook {', '.join(unknown)} in examples/. Known: {', '.join(known)}.")
    for name in names or known:
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(known[name], Path(folder))
        nbformat.write(notebook, known[name].with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
