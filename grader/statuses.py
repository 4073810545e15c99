"""The exit statuses of `grade`: 1 speaks of the learner, 2 of the machine or of us."""

PASSED, FAILED, COULD_NOT = 0, 1, 2
