"""`python -m grader` is the `grade` command, as is the script of that name."""

import codecs
import io
import sys

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


if __name__ == "__main__":
    main()
