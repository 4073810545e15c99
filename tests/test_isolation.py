"""Ranks that are shut in: what they can not see, reach or write; and machines that do not allow it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from grader.judging.verdicts import Verdict
from grader.ranks.isolation import Isolation, isolated_command, why_not
from grader.ranks.launcher import ROOT, CannotGradeError, Code, Launcher, Limits
from tests.attempts import look, twisted

LIMITS = Limits(timeout=20)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not import tests


def ask(launcher: Launcher, probe, *arguments, code: Code | None = None):
    """What `probe` finds on an isolated rank."""
    report = launcher.run(probe, code or Code(trusted=True), [arguments], limits=LIMITS)
    assert report.ended == "complete", [rank.error for rank in report.ranks]
    return report.ranks[0].result


def test_there_is_no_network_but_loopback(tmp_path: Path, isolated: Launcher) -> None:
    lines = "import socket; socket.create_connection(('1.1.1.1', 80), 3)"
    report = look(tmp_path, twisted(lines), isolated)
    assert report.verdict == Verdict.CRASHED
    assert "Network is unreachable" in report.message
    assert report.help == "A submission can not count on the network: there is none where it is graded."
    assert look(tmp_path, twisted(), isolated).verdict == Verdict.PASSED


def look_around(rank, root: str):
    hidden = [name for name in ("solutions", "tests", ".git", "lessons", "grader/judging")]
    commands, opened = [], []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            commands.append(file.read().decode(errors="replace"))
    wanted = {f"/proc/{pid}/mem": "rb" for pid in (1, os.getppid())}
    wanted |= {
        f"{folder}/written-by-a-rank": "wb" for folder in (root, f"{root}/grader", "/", "/dev", "/usr")
    }
    wanted |= {path: "r+b" for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger")}
    wanted |= {path: "rb" for path in ("/etc/shadow", "/dev/kmsg", "/dev/mem")}
    for path, mode in wanted.items():
        try:
            with open(path, mode):
                opened.append(path)
        except OSError:
            continue
    folders = [f"{root}/{name}" for name in hidden if os.path.isdir(f"{root}/{name}")]
    return {
        "hidden files": [name for folder in folders for name in os.listdir(folder)],
        "processes of the judge": [command for command in commands if "pytest" in command],
        "opened": opened,
        "sockets": [path for path in ("/run", "/var", "/sys/fs/cgroup") if os.path.exists(path)],
        "namespaces of its own": os.system("unshare --user --map-root-user true 2> /dev/null") == 0,
    }


def test_nothing_of_the_judge_or_of_the_machine_is_in_sight(isolated: Launcher) -> None:
    """No reference, check or history; no process, memory, device or setting; root in name alone."""
    found = ask(isolated, look_around, str(ROOT))
    fresh = [path for path in found["opened"] if path.startswith("/tmp/") and not os.path.exists(path)]
    found["opened"] = [path for path in found["opened"] if path not in fresh]  # the course lies in /tmp here
    assert not any(found.values()), found


def test_a_file_or_a_socket_of_somebody_else_can_not_be_reached(tmp_path: Path, isolated: Launcher) -> None:
    (tmp_path / "diary").write_text("private")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()

    def reach(rank, folder):
        reached = []
        try:
            socket.socket(socket.AF_UNIX).connect(f"{folder}/socket")
            reached.append("socket")
        except FileNotFoundError:
            pass
        return reached + (os.listdir(folder) if os.path.isdir(folder) else [])

    with listener:
        assert ask(isolated, reach, str(tmp_path)) == []


def test_who_fills_the_folders_is_told_and_it_counts_as_memory(tmp_path: Path, isolated: Launcher) -> None:
    """No other run can fill them: it is nothing that the machine has done."""

    def fill(rank, folder, num_files, seconds):
        import contextlib
        import time

        for number in range(num_files):
            with contextlib.suppress(OSError), open(f"{folder}/{number}", "wb", buffering=0) as file:
                file.write(bytes(2**26))
        time.sleep(seconds)

    launcher = Launcher(Isolation("on"))
    try:
        small = Limits(timeout=20, memory_bytes=2**28)
        assert launcher.run(fill, Code(), [("/dev/shm", 8, 9)], limits=small).ended == "memory"
        launcher.run(fill, Code(), [("/tmp", 17, 0)], limits=LIMITS)
        report = look(tmp_path, twisted(), launcher)
        assert report.verdict == Verdict.REFUSED
        assert "it has filled /tmp, which its ranks need" in report.message
    finally:
        launcher.close()


def test_closed_folders_are_opened_for_the_next_run(tmp_path: Path, isolated: Launcher) -> None:
    """Or a run that closes them would be told as the machine's fault."""

    def close(rank):
        import tempfile

        os.chmod(os.path.dirname(tempfile.gettempdir()), 0)
        os.chmod("/tmp", 0)

    def replace(rank):
        import shutil
        import tempfile

        own = os.path.dirname(tempfile.gettempdir())
        shutil.rmtree(own)
        open(own, "w").close()

    for spoil in (close, close, replace, replace):
        ask(isolated, spoil)
    assert look(tmp_path, twisted(), isolated).verdict == Verdict.PASSED


def test_no_file_of_the_courses_is_held(isolated: Launcher) -> None:
    """A lease makes who opens it wait for 45 seconds: somebody else's grading. Other locks are free."""

    def hold(rank, file):
        import fcntl

        with open(file) as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            try:
                fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as error:
                return error.strerror
        return "held"

    assert ask(isolated, hold, str(ROOT / "grader" / "checks.py")) == "Operation not permitted"


def test_no_memory_is_made_that_is_no_processs(isolated: Launcher) -> None:
    """System V segments stay when their makers have gone, and no list of files shows them."""

    def make(rank):
        import ctypes

        with open("/proc/sys/kernel/shmall") as file:
            return file.read(), ctypes.CDLL(None).shmget(0, 10**6, 0o1600)

    may, number = ask(isolated, make)
    if may != "0\n":
        pytest.skip("this kernel lets nobody but root say so; what lies in them is counted")
    assert number == -1


def test_variables_stay_outside_whatever_they_are_called(
    monkeypatch: pytest.MonkeyPatch, isolated: Launcher
) -> None:
    secrets = ["PLATFORM_TOKEN", "DATABASE_URL", "AWS_ACCESS_KEY_ID", "GH_PAT", "SSH_AUTH_SOCK", "HOME"]
    for name in secrets:
        monkeypatch.setenv(name, "s3cret")
    isolated.close()  # it starts again at the next run, with the environment of then

    def probe(rank):
        return [name for name, value in os.environ.items() if value == "s3cret"]

    assert ask(isolated, probe) == []


def test_a_forks_own_copy_of_the_reference_is_hidden(tmp_path: Path) -> None:
    """The learner's repository has the course's solutions in it, and its history."""
    for name in ("solutions", ".git", "build/lib/solutions"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "answer.py").write_text("x = 1")
    (tmp_path / "helper.py").write_text("x = 2")

    def find(rank, folder):
        import pathlib

        return sorted(path.name for path in pathlib.Path(folder).rglob("*.py"))

    launcher = Launcher(Isolation("on", (tmp_path,)))
    try:
        assert ask(launcher, find, str(tmp_path)) == ["helper.py"]
    finally:
        launcher.close()


@pytest.mark.parametrize("name", [b"\xff", "日本".encode(), "a\xa0b\u2028c\x85".encode(), b"a b\n\\040\t"])
def test_a_folder_is_shown_whatever_it_is_called(name: bytes, tmp_path: Path, isolated: Launcher) -> None:
    folder = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    (folder / "helper.py").write_text("x = 2")

    def read(rank, folder):
        import os

        with open(os.path.join(folder, b"helper.py")) as file:
            return file.read()

    launcher = Launcher(Isolation("on", (folder,)))
    try:
        assert ask(launcher, read, os.fsencode(folder)) == "x = 2"
    finally:
        launcher.close()


def test_what_lies_in_a_hidden_folder_is_graded_and_stays_hidden(isolated: Launcher) -> None:
    """A submission is sent as text: nobody has to show the folder that it was found in."""

    def find(rank, folder):
        import pathlib

        return pathlib.Path(folder).exists() and list(pathlib.Path(folder).iterdir())

    launcher = Launcher(Isolation("on", (ROOT / "tests" / "alternatives",)))
    try:
        assert not ask(launcher, find, str(ROOT / "tests"))
    finally:
        launcher.close()


def test_a_course_that_lies_in_a_folder_called_solutions_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated: Launcher
) -> None:
    """Beside that folder lies the submission, and what is called so there is hidden."""
    monkeypatch.setattr("grader.ranks.isolation.ROOT", tmp_path / "solutions" / "course")
    plan = json.loads(isolated_command(["true"], Isolation("on", (tmp_path,)))[-1])
    assert str(tmp_path / "solutions") not in plan["hidden"]


ODD_MACHINE = """
mkdir -p "$1/dev" "$1/x11" && mount -t tmpfs none "$1/dev" && mount -t tmpfs none "$1/x11" || exit 99
for device in null zero full random urandom; do
    touch "$1/dev/$device" && mount --bind /dev/$device "$1/dev/$device" || exit 99
done
mount --rbind "$1/dev" /dev || exit 99
test ! -e /dev/shm || exit 99
exec "$2" -c "from grader.ranks.isolation import why_not; print(repr(why_not()))"
"""


def test_mounts_below_tmp_and_no_shared_memory_hinder_nothing(tmp_path: Path, isolated: Launcher) -> None:
    """WSL has a mount below /tmp; some containers have no /dev/shm."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", ODD_MACHINE]
    command = [*inside, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 99:
        pytest.skip(f"such a machine can not be imitated here: {done.stderr}")
    assert (done.stdout, done.stderr) == ("''\n", "")


OWN = "/proc/self/comm"
KERNELS = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity")


def name_a_thread_and_write_to_the_kernel(rank) -> list[str]:
    refused = []
    for path in (OWN, *KERNELS):
        try:
            with open(path, "r+b") as file:
                file.write(b"loader" if path == OWN else b"")
        except OSError:
            refused.append(path)
    return refused


@pytest.mark.parametrize("gpus", [[], ["null"]], ids=["without", "with"])
def test_threads_can_be_named_where_there_is_a_gpu_and_nothing_of_the_kernels(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA names its threads, and does not start where it can not."""
    if why_not():
        pytest.skip(f"isolation is not to be had here: {why_not()}")
    monkeypatch.setattr("grader.ranks.isolation._gpu_devices", lambda: gpus)
    launcher = Launcher(Isolation("on"))
    try:
        assert ask(launcher, name_a_thread_and_write_to_the_kernel) == [*([] if gpus else [OWN]), *KERNELS]
    finally:
        launcher.close()


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the programs, but does not allow the last step."""

    def command(inner: list[str], isolation: Isolation) -> list[str]:
        broken = isolated_command(inner, isolation)
        return ["sh", "-c", "echo 'pivot_root /tmp failed: Operation not permitted' >&2; exit 1", *broken]

    monkeypatch.setattr("grader.ranks.server.isolated_command", command)


def test_auto_does_without_and_says_why(forbidden: None, tmp_path: Path) -> None:
    isolation = Isolation("auto")
    launcher = Launcher(isolation)
    try:
        assert isolation.closed
        assert look(tmp_path, twisted(), launcher).verdict == Verdict.PASSED
        assert not isolation.closed
        assert isolation.why_open.endswith("pivot_root /tmp failed: Operation not permitted")
    finally:
        launcher.close()


def test_on_does_not_do_without(forbidden: None) -> None:
    isolation = Isolation("on")
    with pytest.raises(CannotGradeError, match=r"isolation is not available: .* Operation not permitted$"):
        Launcher(isolation).warm_up()
    assert isolation.closed


NO_NAMESPACES = """
echo 0 > /proc/sys/user/max_user_namespaces || exit 99
exec "$1" -m grader "$2" --only copy_to_group --ranks 1 --isolation "$3"
"""


@pytest.mark.parametrize("wish", ["auto", "on"])
def test_a_system_without_namespaces_is_told_as_that(wish: str, tmp_path: Path, isolated: Launcher) -> None:
    """Its own word for it is that no space is left on the device."""
    (tmp_path / "mine.py").write_text(twisted())
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"]
    command = [*inside, sys.executable, str(tmp_path / "mine.py"), wish]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 99:
        pytest.skip(f"such a machine can not be imitated here: {done.stderr}")
    assert done.returncode == (0 if wish == "auto" else 2), done.stderr
    said = done.stdout if wish == "auto" else done.stderr
    words = "formative: the ranks were not isolated" if wish == "auto" else "isolation is not available"
    assert f"{words}: this system allows no namespaces of one's own (unshare: " in said
    assert "free some" not in said


def test_no_unshare_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotGradeError, match="isolation is not available: this system has no `unshare`"):
        Launcher(Isolation("on")).warm_up()
