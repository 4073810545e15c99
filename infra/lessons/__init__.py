"""Builds what is derived from the lessons: notebooks, the README's table and environment.yml.

It lives here and not in `grader`, which knows nothing of any lesson, and not among the installed
packages: only those who write lessons need it. Run it from the root with `make lessons`.
"""
