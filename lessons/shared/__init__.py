"""What the checks of several lessons need. They import it as `lessons_shared`, whichever folder they lie in.

It imports what a lesson's checks import: `grader.checks`, and the model. What a probe uses of it travels to
the rank by value.
"""
