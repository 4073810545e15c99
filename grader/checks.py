"""All that a lesson's checks import: to declare, to try, to compare, to explain, and to measure on a rank."""

from grader.beside.measure import graph_of, kept_for_backward, settle, storage_bytes, tensors_in
from grader.judging.aids import (
    BACKWARD,
    backward,
    drawn_alike,
    drawn_with,
    each_rank,
    parts,
    row_order,
    stand_alone,
    told,
    weights_of,
)
from grader.judging.closeness import is_close
from grader.judging.explain import Fault
from grader.judging.group_and_world import NOT_OF_TORCHS_GROUP
from grader.judging.numbers import (
    Answer,
    Answers,
    Slips,
    compare_answers,
    explain_answers,
    named_cause,
    require_refusal,
    require_whole_numbers,
    show,
    whole,
)
from grader.judging.trial import Trial, check, exercise
from grader.judging.verdicts import CheckEnded, Verdict
from grader.judging.wording import apart, of_ranks
from grader.ranks.recording import COLLECTIVES, Event, Recording

__all__ = [
    "BACKWARD",
    "COLLECTIVES",
    "NOT_OF_TORCHS_GROUP",
    "Answer",
    "Answers",
    "CheckEnded",
    "Event",
    "Fault",
    "Recording",
    "Slips",
    "Trial",
    "Verdict",
    "apart",
    "backward",
    "check",
    "compare_answers",
    "drawn_alike",
    "drawn_with",
    "each_rank",
    "exercise",
    "explain_answers",
    "graph_of",
    "is_close",
    "kept_for_backward",
    "named_cause",
    "of_ranks",
    "parts",
    "require_refusal",
    "require_whole_numbers",
    "row_order",
    "settle",
    "show",
    "stand_alone",
    "storage_bytes",
    "tensors_in",
    "told",
    "weights_of",
    "whole",
]
