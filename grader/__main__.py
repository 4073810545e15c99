"""`python -m grader` is the `grade` command, as is the script of that name."""

import gc


def main() -> None:
    """Entry point. Imports make much and free little: collecting garbage meanwhile takes most of a second."""
    gc.disable()
    from grader.cli import grade

    gc.enable()
    grade(prog_name="grade")


if __name__ == "__main__":
    main()
