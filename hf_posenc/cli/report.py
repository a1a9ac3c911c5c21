"""``hf-posenc report``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_posenc.cli.shared_arguments import parse
from hf_posenc.errors import MissingFileError
from hf_posenc.utils.files import writable_folder


@dataclass
class ReportArguments:
    """Where a report goes."""

    output_dir: str = field(default="report", metadata={"help": "folder for report.html, report.md and the plots"})
    title: str = field(
        default="Results by context length",
        metadata={"help": "heading of the report; the names of the models are added if it lacks them"},
    )


def report(argv: Sequence[str]) -> None:
    """Make a table, plots and one HTML page of result files.

    Examples:
        hf-posenc report r.jsonl --output-dir report
    """
    positional = {"results": "one or more .jsonl files that hf-posenc eval or finetune wrote"}
    given, where = parse("report", report.__doc__, argv, (ReportArguments,), positional, nargs={"results": "+"})
    for path in given.results:
        if not Path(path).is_file():
            raise MissingFileError(f"there is no file {path!r}. hf-posenc eval --output {path} would write it.")
    writable_folder(where.output_dir)
    from hf_posenc.evaluation import read_records
    from hf_posenc.evaluation.records import read_retrieval_records
    from hf_posenc.reporting import report as write

    kinds = (read_records, read_retrieval_records)
    records = [record for path in given.results for read in kinds for record in read(path)]
    paths = write(records, **vars(where), command=shlex.join(["hf-posenc", "report", *argv]))
    for written in (paths.html, paths.markdown, *paths.plots):
        print(written)
