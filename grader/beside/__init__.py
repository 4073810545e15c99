"""Shares a process with the learner's code: loads it, records what it does, guards the tools, measures.

Nothing here is believed afterwards. It is imported by the processes of `grader.ranks`, and imports the forms
in which data travel from there; it imports nothing of `grader.judging`, and `grader.judging` nothing of it.
"""
