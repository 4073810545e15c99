"""Buffers that are used while the network still owns them are seen, and honest programs are not."""

import pytest
import torch
import torch.distributed as dist

from grader.judging.course import find_exercise
from grader.judging.evidence import Evidence
from grader.judging.explain import Fault
from grader.judging.submission import read_submission
from grader.judging.trial import Trial
from grader.judging.verdicts import CheckEnded, Verdict
from grader.ranks.launcher import Code, shared_launcher
from grader.ranks.limits import Limits
from grader.ranks.recording import Event, Race
from tests.bank import judge

NOTHING = Code(cells=(("empty.py", ""),), trusted=True)


def races(probe) -> list[list[Race]]:
    report = shared_launcher().run(probe, NOTHING, [(), ()], limits=Limits())
    assert report.ended == "complete", [(rank.status, rank.error) for rank in report.ranks]
    return [rank.races for rank in report.ranks]


def reads_before_it_waits(rank):
    x = torch.ones(4)
    work = dist.all_reduce(x, group=rank.group, async_op=True)
    y = x + 1
    work.wait()
    return y


def divides_at_once(rank):
    x = torch.ones(4)
    dist.all_reduce(x, group=rank.group, async_op=True)
    x /= 2
    return x


def never_waits(rank):
    x = torch.ones(4)
    dist.all_reduce(x, group=rank.group, async_op=True)
    return x


def one_buffer_for_two_messages(rank):
    other, x, buffer = 1 - rank.rank, torch.ones(4), torch.empty(4)
    works = [dist.isend(x, other), dist.isend(x, other), dist.irecv(buffer, other), dist.irecv(buffer, other)]
    for work in works:
        work.wait()
    return buffer


def changes_what_it_sends(rank):
    other, x, buffer = 1 - rank.rank, torch.ones(4), torch.empty(4)
    send, receive = dist.isend(x, other), dist.irecv(buffer, other)
    x.zero_()
    send.wait()
    receive.wait()
    return buffer


def receives_into_what_it_sends(rank):
    other, buffer = 1 - rank.rank, torch.ones(4)
    for work in (dist.isend(buffer, other), dist.irecv(buffer, other)):
        work.wait()
    return buffer


def passes_on_what_is_not_there(rank):
    other, buffer = 1 - rank.rank, torch.ones(4)
    receive = dist.irecv(buffer, other)
    send = dist.isend(buffer, other)
    receive.wait()
    send.wait()
    return buffer


def reads_the_second_too_early(rank):
    other, buffer, works = 1 - rank.rank, torch.empty(4), [dist.isend(torch.ones(4), 1 - rank.rank)]
    dist.recv(buffer, other)
    y = buffer + 1
    works += [dist.isend(torch.ones(4), other), dist.irecv(buffer, other)]
    y = y + buffer
    for work in works:
        work.wait()
    return y


def receives_the_next_into_what_it_still_reads(rank):
    other, buffer, works = 1 - rank.rank, torch.empty(4), [dist.isend(torch.ones(4), 1 - rank.rank)]
    dist.recv(buffer, other)
    works += [dist.isend(torch.ones(4), other), dist.irecv(buffer, other)]
    y = buffer + 1
    for work in works:
        work.wait()
    return y


@pytest.mark.parametrize(
    ("probe", "use", "kind"),
    [
        (reads_before_it_waits, "read", "all_reduce"),
        (divides_at_once, "changed", "all_reduce"),
        (never_waits, "left", "all_reduce"),
        (one_buffer_for_two_messages, "twice", "recv"),
        (changes_what_it_sends, "changed", "send"),
        (receives_into_what_it_sends, "shared", "send"),
        (passes_on_what_is_not_there, "read", "recv"),
        (reads_the_second_too_early, "read", "recv"),
        (receives_the_next_into_what_it_still_reads, "overwritten", "recv"),
    ],
)
def test_a_buffer_used_too_early_is_seen(probe, use: str, kind: str) -> None:
    for found in races(probe):
        assert [(race.use, race.event.kind) for race in found] == [(use, kind)]


def honest(rank):
    """What looks like it and is right: views, other parts of a buffer, polling, a send that is only read."""
    other, n = 1 - rank.rank, 2
    buffers = torch.zeros(2, 4)
    first = dist.irecv(buffers[0], other)
    x = torch.ones(4)
    send = dist.isend(x, other)
    y = x + 1  # the network only reads it as well
    rows = buffers.view(4, 2)[0:2].detach()  # a view of what is still on its way
    buffers[1].add_(y)  # the other row
    columns = torch.zeros(4, 6)
    second = dist.irecv(columns.view(-1)[:3], other)
    third = dist.isend(x[:3], other)
    columns[:, 3:] = 5.0  # lies between, around and behind what comes, and not in it
    for work in (first, send, second, third):
        work.wait()
    future = dist.all_reduce(x, group=rank.group, async_op=True).get_future()
    future.wait()
    polled = dist.all_reduce(x, group=rank.group, async_op=True)
    while not polled.is_completed():
        pass
    dist.all_reduce(x, group=rank.group)
    dist.all_gather([torch.empty(4) for _ in range(n)], x, group=rank.group)
    dist.broadcast(x, group_src=0, group=rank.group)
    if rank.rank == 0:  # who sends only reads
        for work in [dist.broadcast(x, group_src=0, group=rank.group, async_op=True) for _ in range(2)]:
            work.wait()
    else:
        for _ in range(2):
            dist.broadcast(x, group_src=0, group=rank.group)
    return [rows.clone(), buffers, columns, x]


def trains_with_ddp(rank):
    """PyTorch's C++ sends buffers and gradients, and waits for them where nobody sees it."""
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    wrapped = DistributedDataParallel(model, process_group=rank.group)
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("probe", [honest, trains_with_ddp])
def test_honest_programs_have_no_races(probe) -> None:
    assert races(probe) == [[], []]


def drops_what_was_freed(rank):
    """The memory of a message that is over belongs to others."""
    other = 1 - rank.rank
    for _ in range(50):
        x = torch.ones(1000)
        send, receive = dist.isend(x, other), dist.irecv(torch.empty(1000), other)
        receive.wait()
        send.wait()
    kept = dist.isend(torch.ones(1000), other)
    dist.recv(torch.empty(1000), other)
    del x
    made = [torch.zeros(1000).add_(1) for _ in range(50)]
    kept.wait()
    return made[0]


def test_memory_that_was_freed_is_nobodys_buffer() -> None:
    assert races(drops_what_was_freed) == [[], []]


def test_what_was_seen_is_told_with_its_lines() -> None:
    lines = {("a.py", 3): "line 3: `work = irecv`", ("a.py", 4): "line 4: `y = x`"}
    (race, *_), _ = races(passes_on_what_is_not_there)
    event = type(race.event)(**{**vars(race.event), "file": "a.py", "line": 3})
    evidence = Evidence([(1, Race(event, "read", "a.py", 4))])
    cause, step = evidence.cause([1], 2, lambda file, line: lines[file, line])
    assert cause == (
        "rank 1 used what its recv of 4 float32 from rank 1 (line 3: `work = irecv`) brings before anybody "
        "had waited for it, in line 4: `y = x`"
    )
    assert "the handle that irecv returns" in step
    next_one = Evidence([(1, Race(event, "overwritten", "a.py", 4))])
    cause, step = next_one.cause([1], 2, lambda file, line: lines[file, line])
    assert cause.startswith("rank 1 used what had arrived in a tensor, in line 4: `y = x`, when the next")
    assert "into another tensor" in step
    at_once = Evidence([(1, Race(event, "shared", "a.py", 3))])
    assert at_once.cause([1], 2, lambda file, line: lines[file, line])[0].count("line 3") == 1


@pytest.mark.parametrize(
    ("use", "rank", "peer", "guessed"),
    [
        ("shared", 0, 1, False),
        ("changed", 2, 0, False),
        ("read", 1, 2, True),  # neither it nor its peer is wrong
        ("left", 0, 1, True),
        ("twice", 0, 1, True),
    ],
)
def test_what_was_seen_comes_before_what_fits_by_chance(
    use: str, rank: int, peer: int, guessed: bool
) -> None:
    """On ranks that are wrong, or exchanged with one. What is left, or comes twice, may be harmless."""
    trial = Trial.__new__(Trial)
    trial.num_ranks = 3
    event = Event("send", 16, 4, "float32", (4,), (0, 1, 2), peer, "", True, "", 0, "", 0)
    trial._evidence = Evidence([(rank, Race(event, use, "", 0))])
    trial._locate = lambda *_: ""
    right = [torch.arange(4.0) + r for r in range(3)]
    fault = [right[0] - 7 * right[0] ** 2 - 1, *right[1:]]
    with pytest.raises(CheckEnded) as ended:
        trial.close("x", fault, right, alternatives={"a known fault": Fault(fault, "its step")})
    assert ("a known fault" in ended.value.cause, ended.value.help == "its step") == (guessed, guessed)
    assert f"rank {rank}" in ended.value.cause


def reduces_to_rank_1(rank):
    x = torch.ones(4)
    dist.reduce(x, group=rank.group, group_dst=1)
    return x


def test_a_result_that_one_rank_alone_was_given() -> None:
    report = shared_launcher().run(reduces_to_rank_1, NOTHING, [(), ()], limits=Limits())
    evidence = Evidence(events=[(r, event) for r in range(2) for event in report.ranks[r].events])
    assert "gives its result to rank 1 alone" in evidence.cause([0], 2, lambda *_: "")[0]
    assert evidence.cause([1], 2, lambda *_: "") == ("", "")
    assert evidence.cause([0, 1], 2, lambda *_: "") == ("", "")


@pytest.mark.parametrize("name", ["ring_attention", "DataParallel", "ShardedGradients", "relay_microbatches"])
def test_right_answers_have_no_races(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under other dispatch modes too, in backward, and with handles that are kept for long."""
    lesson, exercise = find_exercise(name)  # type: ignore[misc]
    submission = read_submission(lesson.solution, module=f"solutions.{lesson.slug}", trusted=True)
    seen: list[Evidence] = []
    add = Evidence.add
    monkeypatch.setattr(Evidence, "add", lambda self, other: (seen.append(other), add(self, other))[1])
    report = judge(submission, lesson, exercise, ranks=(2,))
    assert report.verdict == Verdict.PASSED
    assert any(evidence.events for evidence in seen)
    assert [race for evidence in seen for race in evidence.races] == []


def has_no_handle(rank):
    """What NCCL gives for a collective that its stream puts in order, and for one message of a batch."""
    unbox, dist.Work.unbox = dist.Work.unbox, lambda handle: None
    try:
        x = torch.ones(4)
        dist.all_reduce(x, group=rank.group)
    finally:
        dist.Work.unbox = unbox
    return x + 1


def test_what_has_no_handle_is_not_on_its_way() -> None:
    assert races(has_no_handle) == [[], []]
