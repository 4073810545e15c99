"""`python -m grader` is the `grade` command, as is the script of that name."""

import gc
import sys


def main() -> None:
    """Entry point. Imports make much and free little: collecting garbage meanwhile takes most of a second."""
    gc.disable()
    from grader.cli import COULD_NOT, grade
    from grader.ranks.launcher import CannotGradeError

    gc.enable()
    try:
        grade(prog_name="grade")
    except CannotGradeError as error:
        print(f"grade: {error}", file=sys.stderr)
        sys.exit(COULD_NOT)


if __name__ == "__main__":
    main()
