"""The recorder sees every door to communication, and what it counts is what happened."""

import pytest
import torch
import torch.distributed as dist

from grader.beside.measure import storage_bytes
from grader.beside.recorder import Recorder
from grader.ranks.launcher import Code, Limits, RunReport, shared_launcher
from grader.ranks.recording import Recording

NOTHING = Code(cells=(("empty.py", ""),), trusted=True)


def on_ranks(probe, *arguments, ranks: int = 2, **options) -> RunReport:
    report = shared_launcher().run(probe, NOTHING, [arguments] * ranks, limits=Limits(), **options)
    assert report.ended == "complete", [(rank.status, rank.error) for rank in report.ranks]
    return report


def doors(rank):
    """Every way to sum four numbers, and to pass them on."""
    group, x = rank.group, torch.ones(4)
    other = 1 - rank.rank
    with rank.record() as recording:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
        group.allreduce([x]).wait()
        group._get_backend(torch.device("cpu")).allreduce([x]).wait()
        dist._functional_collectives.all_reduce(x, "sum", group).wait()
        dist.all_gather([torch.zeros(4) for _ in range(2)], x, group=group)
        dist.reduce_scatter(torch.zeros(2), list(x.chunk(2)), group=group)
        dist.broadcast(x, 0, group=group)
        dist.all_to_all_single(torch.zeros(4), x, group=group)
        operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.zeros(4), other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        sending = dist.isend(x, other)
        dist.recv(torch.zeros(4), other)
        sending.wait()
        dist.barrier(group=group)
    return {"recording": recording}


def test_every_door_is_seen() -> None:
    for rank in on_ranks(doors).ranks:
        recording: Recording = rank.result["recording"]
        collectives = ["all_gather", "reduce_scatter", "broadcast", "all_to_all"]
        assert recording.kinds() == ["all_reduce"] * 5 + collectives + ["send", "recv"] * 2
        assert recording.count("barrier") == 1
        assert [event.op for event in recording.select("all_reduce")] == ["SUM", "MAX", "", "", "SUM"]
        assert [event.asynchronous for event in recording.select("all_reduce")][:2] == [False, True]
        assert recording.bytes("all_reduce") == 5 * 16
        assert recording.bytes("all_gather") == 32 and recording.bytes("reduce_scatter") == 16
        assert recording.bytes("send") == 32
        assert all(event.group == (0, 1) for event in recording.events)


def sends_what_lies_otherwise(rank):
    """Each collective with a tensor that NCCL takes, then with one that it refuses."""
    rows, group = torch.zeros(4, 2), dist.group.WORLD
    with rank.record() as recording:
        for x in (rows, torch.zeros(2, 4).t(), torch.zeros(8, 2)[::2]):
            dist.all_reduce(x)
            dist.all_gather([torch.zeros(4, 2) for _ in range(2)], x)
            dist._functional_collectives.all_reduce(x, "sum", group).wait()
    return {"recording": recording}


def test_what_nccl_refuses_is_told_from_what_it_takes() -> None:
    """Functional collectives make their tensors contiguous themselves."""
    for rank in on_ranks(sends_what_lies_otherwise).ranks:
        pieces = [event.in_one_piece for event in rank.result["recording"].events]
        assert pieces == [True, True, True] + [False, False, True] * 2


def sums_and_memory(rank, x):
    weight = torch.randn(64, 64, requires_grad=True)
    with rank.record(saved=True, memory=True, ignore=[weight]) as recording:
        hidden = (x @ weight).relu()
        recording.mark("kept")
        loss = hidden.sum()
        recording.mark("backward begins")
        loss.backward()
        del hidden, loss
    return {"recording": recording}


def test_flops_and_bytes() -> None:
    recording = (
        on_ranks(sums_and_memory, torch.randn(8, 64), ranks=1, distributed=False).ranks[0].result["recording"]
    )
    product = 2 * 8 * 64 * 64
    assert recording.flops("") == product
    assert recording.flops("backward begins") == product  # the weight's gradient; x needs none
    # relu keeps its result, the product keeps x; the weight itself is left out
    assert recording.saved_bytes == 8 * 64 * 4 + 8 * 64 * 4
    assert recording.alive("kept") == 8 * 64 * 4
    assert recording.alive("end") == 64 * 64 * 4
    assert recording.peak_bytes >= 64 * 64 * 4 + 8 * 64 * 4


def multiplies_a_dtensor(rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(rank.group, "cpu")
    x = DTensor.from_local(torch.ones(4, 8), mesh, [Replicate()], run_check=False)
    weight = DTensor.from_local(torch.ones(3, 8), mesh, [Shard(0)], run_check=False)
    with rank.record() as recording:
        torch.nn.functional.linear(x, weight)
    return {"recording": recording, "held": storage_bytes([weight])}


def test_what_dtensor_computes_for_shapes_alone_is_no_work() -> None:
    result = on_ranks(multiplies_a_dtensor).ranks[0].result
    recording = result["recording"]
    assert result["held"] == 3 * 8 * 4
    assert recording.flops() == 2 * 4 * 8 * 3
    assert recording.largest_elements <= 4 * 8


def answers_for_itself(rank):
    """What travels, is computed and is kept is a subclass that looks small, and DTensor's question."""

    class Liar(torch.Tensor):
        fake_mode, dtype = None, torch.bool
        shape = property(lambda tensor: torch.Size([0, 0]))
        numel = element_size = dim = lambda tensor: 0
        untyped_storage = lambda tensor: torch.UntypedStorage(0)  # noqa: E731

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.numel, torch.Tensor.untyped_storage):
                return cls.numel(None) if function is torch.Tensor.numel else cls.untyped_storage(None)
            return super().__torch_function__(function, types, args, kwargs or {})

    file = f"{torch.__path__[0]}/distributed/tensor/hidden.py"
    exec(compile("def call(function): return function()", file, "exec"), scope := {})

    def work():
        whole = torch.zeros(4 * 2, 3).as_subclass(Liar)
        with torch._C.DisableTorchFunctionSubclass():
            dist.all_gather_into_tensor(whole, torch.zeros(4, 3), group=rank.group)
            return torch.ones(5, 8) @ whole

    part = torch.zeros(8, 3)[:2].as_subclass(Liar)
    with rank.record(memory=True) as recording:
        product = scope["call"](work)
    return {"recording": recording, "held": storage_bytes([part]), "product": product}


def test_what_a_subclass_says_of_itself_is_not_asked() -> None:
    for rank in on_ranks(answers_for_itself).ranks:
        recording: Recording = rank.result["recording"]
        (event,) = recording.events
        assert (event.num_bytes, event.num_elements, event.dtype) == (8 * 3 * 4, 8 * 3, "float32")
        assert event.shape == (8, 3)
        assert recording.flops() == 2 * 5 * 8 * 3
        assert recording.largest_elements == 5 * 8
        assert recording.peak_bytes >= (8 * 3 + 5 * 8) * 4
        assert rank.result["held"] == 8 * 3 * 4


def tries_a_rank_that_is_not_there(rank):
    with rank.record() as recording:
        try:
            rank.group.send([torch.ones(3)], 9, 0)
        except IndexError:
            dist.all_reduce(torch.ones(3), group=rank.group)
    return {"recording": recording}


def test_what_could_not_begin_is_no_communication() -> None:
    for rank in on_ranks(tries_a_rank_that_is_not_there).ranks:
        assert rank.result["recording"].kinds() == ["all_reduce"]
        assert [event.kind for event in rank.events] == ["send", "all_reduce"]


def overlapped(rank):
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def send(parameter):
        dist.all_reduce(parameter.grad, group=rank.group)

    second.weight.register_post_accumulate_grad_hook(send)
    loss = second(first(torch.ones(2, 8))).sum()
    with rank.record() as recording:
        recording.mark("backward begins")
        loss.backward()
    return {"recording": recording}


def test_order_of_communication_against_backward() -> None:
    recording = on_ranks(overlapped).ranks[0].result["recording"]
    assert recording.events[0].index < recording.last_compute("backward begins")


def test_the_learners_line_is_named() -> None:
    source = "import torch.distributed as dist\n\ndef f(x, group):\n    dist.all_reduce(x, group=group)\n"

    def probe(rank):
        with rank.record() as recording:
            rank.submission.f(torch.ones(2), rank.group)
        return {"recording": recording}

    code = Code(cells=(("cell 3", source),), trusted=True)
    report = shared_launcher().run(probe, code, [()] * 2, limits=Limits())
    event = report.ranks[0].result["recording"].events[0]
    assert (event.file, event.line) == ("cell 3", 4)


def test_a_group_without_world_rank_0() -> None:
    report = on_ranks(doors_of_a_subgroup, group=(1, 3), world_size=4)
    assert [event.group for event in report.ranks[3].result["recording"].events] == [(1, 3)]


def doors_of_a_subgroup(rank):
    x = torch.full((2,), float(rank.rank + 1))
    with rank.record() as recording:
        dist.all_reduce(x, group=rank.group)
    return {"recording": recording, "x": x}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_what_they_say(ranks: int) -> None:
    def probe(rank):
        return [rank.rank, rank.num_ranks, dist.get_rank(), dist.get_world_size(), str(rank.device)]

    report = on_ranks(probe, ranks=ranks)
    assert [r.result for r in report.ranks] == [[r, ranks, r, ranks, "cpu"] for r in range(ranks)]


def resized(rank):
    """Memory is given back and taken again as FSDP does it: the storage of a tensor that stays is resized."""
    with rank.record(memory=True) as recording:
        first, second = torch.zeros(100), torch.zeros(50)
        first.untyped_storage().resize_(0)
        recording.mark("freed")
        third = torch.zeros(100)  # no peak: the first one is not there
        third.untyped_storage().resize_(0)
        recording.mark("both")
        for tensor in (first, third):
            tensor.untyped_storage().resize_(400)
            tensor.fill_(1.0)
        del second
    return {"recording": recording}


def test_resized_storages_count_as_what_they_are() -> None:
    recording = on_ranks(resized, ranks=1, distributed=False).ranks[0].result["recording"]
    assert [recording.alive(mark) for mark in ("freed", "both", "end")] == [200, 200, 800]
    assert recording.peak_bytes == 1000


def handles(rank):
    """Messages of which all, or all but one, are waited for."""
    other, x = 1 - rank.rank, torch.ones(4)
    with rank.record() as recording:
        for name in ("blocking", "all", "in a batch", "forgotten"):
            recording.mark(name)
            if name == "blocking":
                dist.send(x, other) if rank.rank else dist.recv(torch.zeros(4), other)
                continue
            outgoing, incoming = x.clone(), torch.zeros(4)
            if name == "in a batch":
                pair = [dist.P2POp(dist.isend, outgoing, other), dist.P2POp(dist.irecv, incoming, other)]
                works = dist.batch_isend_irecv(pair)
            else:
                works = [dist.isend(outgoing, other), dist.irecv(incoming, other)]
            works[1].wait()
            if name != "forgotten":
                works[0].wait()
    dist.barrier()  # the forgotten message's tensor is still there
    return {"recording": recording}


def waits_again(rank):
    """Two gathers are on their way, and somebody waits twice for the first; then two all-reduces."""
    import torch.distributed._functional_collectives as functional

    x = torch.ones(4)
    with rank.record() as recording:
        recording.mark("functional")
        first, second = (functional.all_gather_tensor(x, 0, rank.group) for _ in range(2))
        whole = functional.wait_tensor(first)
        functional.wait_tensor(whole)
        recording.mark("second")
        functional.wait_tensor(second)
        recording.mark("handle")
        works = [dist.all_reduce(torch.ones(4), group=rank.group, async_op=True) for _ in range(2)]
        works[0].wait()
        works[0].wait()
        recording.mark("other handle")
        works[1].wait()
    return recording


def test_to_wait_again_for_the_same_ends_nothing_else() -> None:
    report = on_ranks(waits_again)
    for recording in (rank.result for rank in report.ranks):
        asked = {name: recording.waits(name) for name in recording.totals if name}
        assert asked == {"functional": 1, "second": 1, "handle": 1, "other handle": 1}


def test_a_handle_that_nobody_waits_for_is_seen() -> None:
    for rank in on_ranks(handles).ranks:
        recording: Recording = rank.result["recording"]
        asked = {name: recording.waits(name) for name in recording.totals if name}
        assert asked == {"blocking": 1, "all": 2, "in a batch": 2, "forgotten": 1}
        assert recording.count(after="forgotten") == 2


@pytest.mark.parametrize("local", [True, False])
def test_of_a_pages_run_only_what_communicates_is_seen(local: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        kinds: list[str] = []
        x = torch.ones(4)
        with Recorder(lambda event: kinds.append(event.kind), lambda file: True, local=local) as recorder:
            work = dist.all_reduce(x, async_op=True)
            x.add_(1)  # too early
            work.wait()
        assert kinds == ["all_reduce"]
        assert [race.use for race in recorder.flights.races() if race.use != "left"] == ["changed"] * local
    finally:
        dist.destroy_process_group()
