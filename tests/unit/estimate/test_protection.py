"""The kernel keeps an estimated program's writes from files, in each way and for each kind of user."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ways_to_write

from memopt._estimate import protection

HERE = Path(__file__).resolve().parents[2] / "helpers"
NOBODY = 65533  # no user of this machine
WAYS = ("overlay", "landlock")


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def be(user: int) -> None:
    """For the rest of this process, which may go on to look into its /proc/self."""
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


def given_to(user: int, folder: str) -> None:
    if user:
        subprocess.run(["chown", "-R", f"{user}:{user}", folder], check=True)


def kernel_has(way: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return protection._tried(protection.Protection(way), folder, []) is None


@pytest.fixture(params=[0, NOBODY], ids=["this user", "another user"])
def user(request):
    if request.param and os.geteuid():
        pytest.skip("only root can be another user")
    return request.param


@pytest.fixture
def folders():
    """One with files and one for what is written; open to other users, as tmp_path is not."""
    with tempfile.TemporaryDirectory() as files, tempfile.TemporaryDirectory() as private:
        yield files, private


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_is_what_it_was_after_every_way_to_write(way, user, folders, tmp_path):
    if not kernel_has(way):
        pytest.skip(f"this kernel, or what it runs in, has no {way}")
    files, private = folders
    ways_to_write.prepare(files)
    for folder in folders:
        given_to(user, folder)
    before = ways_to_write.state(files)
    log = tmp_path / "said"
    if (pid := os.fork()) == 0:
        try:
            sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
            for number in (1, 2):
                os.dup2(sys.stderr.fileno(), number)
            be(user)
            protection.fork_watched()
            protection.confine(protection.Protection(way), private)
            os.chdir(private)
            ways_to_write.write_all(files)
        finally:
            os._exit(0)
    assert wait(pid) == 0
    assert ways_to_write.state(files) == before
    did = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("did ")]
    # A check that could not fail: what is asked for is really done, in an overlay, and is really tried.
    assert len(did) >= (len(ways_to_write.WAYS) - 8 if way == "overlay" else 20), log.read_text()
    if way == "overlay":
        copies = Path(f"{private}/scratch/files{files}")
        assert {"open_w", "forked", "shell_append"} <= {path.name for path in copies.iterdir()}


def test_the_corpus_does_harm_where_nothing_protects(folders):
    files, _ = folders
    ways_to_write.prepare(files)
    before = ways_to_write.state(files)
    if (pid := os.fork()) == 0:
        try:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            os.dup2(sys.stderr.fileno(), 2)
            protection.fork_watched()
            os.chdir(files)
            ways_to_write.write_all(files)
            time.sleep(0.5)  # for the daemons, of whom some wait a little
        finally:
            os._exit(0)
    wait(pid)
    after = ways_to_write.state(files)
    spared = [
        name
        for name in ways_to_write.WAYS
        if all(before.get(path) == of for path, of in after.items() if path.startswith(f"{files}/{name}"))
        and all(path in after for path in before if path.startswith(f"{files}/{name}"))
    ]
    not_everywhere = {"shell_git", "temporary_beside", "flags", "attribute", "punched"}
    if os.geteuid():
        not_everywhere |= {"chown", "lchown"}
    assert set(spared) <= not_everywhere, spared
    assert len(ways_to_write.WAYS) >= 60


# ---- which way -------------------------------------------------------------------------------------------------------


def found(*refused: str, folder: str = "/tmp") -> subprocess.CompletedProcess[str]:
    source = (
        "import json, sys; from memopt._estimate import protection\n"
        f"print(json.dumps(protection.find(sys.executable, [{folder!r}])))"
    )
    line = [sys.executable, str(HERE / "refusing.py"), ",".join(refused), sys.executable, "-c", source]
    beside = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(line, env=beside, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("refused", "expected"),
    [((), "overlay"), (("unshare",), "landlock"), (("landlock_create_ruleset",), "overlay")],
)
def test_the_best_way_that_the_kernel_has_is_found(refused, expected):
    if not kernel_has(expected):
        pytest.skip(f"this kernel, or what it runs in, has no {expected}")
    done = found(*refused)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == expected


def test_where_the_kernel_has_none_that_is_said_with_both_reasons():
    done = found("unshare", "landlock_create_ruleset")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "Unprotected" in said
    assert os.strerror(1) in said and os.strerror(38) in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_of_a_group_that_a_user_namespace_does_not_know_is_left_to_landlock(folders):
    """An overlay could not make a copy of what belongs to it."""
    files, _ = folders
    os.chown(files, NOBODY, 54321)
    os.chmod(files, 0o777)
    answers = []
    for folder in (files, "/tmp"):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                be(NOBODY)
                os.write(write, json.dumps(protection._probe("/tmp", [folder])).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            answers.append(json.loads(told.read()))
        wait(pid)
    if "way" not in answers[1] or answers[1]["way"] != "overlay":
        pytest.skip("this kernel, or what it runs in, has no user namespaces")
    assert answers[0].get("way") == "landlock"


def test_an_interrupt_of_the_probe_leaves_no_folder(monkeypatch):
    """It kills the process that is asked."""
    homes = []

    def interrupted(module, request, **_):
        homes.append(Path(request[0]))
        (homes[0] / "of an overlay").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(protection.process, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        protection._asked.__wrapped__(sys.executable, ("/tmp",))
    assert homes and not homes[0].exists()


# ---- what is left behind ---------------------------------------------------------------------------------------------

LEAVES = """
import os, signal, sys, time
from memopt._estimate.protection import fork_watched
fork_watched()
ready, told = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(1, f"{os.getpid()}\\n".encode())
            os.write(told, b"x")
            time.sleep(600)
        os._exit(0)

"""


def ended(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", -9), ("time.sleep(600)", None)]
)
def test_daemons_end_with_the_process_that_started_them(end, status):
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES + "for _ in range(3): os.read(ready, 1)\n" + end],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    assert process.stdout is not None
    daemons = [int(process.stdout.readline()) for _ in range(3)]
    if status is None:
        process.terminate()
    code = process.wait(timeout=600)
    assert all(map(ended, daemons))
    if status is not None:
        assert code == status
