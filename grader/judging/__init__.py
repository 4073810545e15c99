"""Judges: what is asked, what is expected, what came, and what to say of it.

No file of this room touches an object of a submission, or shares a process with one: it reads source as text
and answers as plain data. The rooms above it and the lessons' checks import it; it imports `grader.ranks` to
have things run, and nothing of `grader.beside`. What a probe uses of it travels to the rank by value.
"""

import sys

import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])
