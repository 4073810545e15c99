"""`python -m grader` is the `grade` command, as is the script of that name."""

import codecs
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PLAIN = {
    "✓": "+",
    "✗": "x",
    "★": "*",
    "☆": "o",
    "·": ".",
    "—": "-",
    "–": "-",
    "…": "...",
    "×": "x",
    "−": "-",
    "→": "->",
}


def main() -> None:
    """Entry point."""
    write_what_the_terminal_can_show()
    from grader.cli import grade

    grade(prog_name="grade")


def write_what_the_terminal_can_show() -> None:
    """Where the output is ASCII, marks become letters and all else that is not becomes its number."""
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's is none, and shows everything
            stream.reconfigure(errors="plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    odd = error.object[error.start : error.end]
    shown = (PLAIN.get(mark) or mark.encode("ascii", "backslashreplace").decode() for mark in odd)
    return "".join(shown), error.end


def do_not_import_from_here() -> None:
    """`python -m` looks first in the folder where one stands: a submission's click.py would be click."""
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != ROOT:
        del sys.path[0]


if __name__ == "__main__":
    do_not_import_from_here()
    main()
