"""`memopt estimate` on scripts that do their worst to files, and that end in odd ways: nothing of the user's is
changed, nothing is left behind, and what came of it has a name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ways_to_write
from test_protection import kernel_has

HERE = Path(__file__).resolve().parents[2] / "helpers"
DAEMON = f"9{os.getpid()}"  # how long a process of ours sleeps: no other suite's does
REFUSED = {"overlay": "", "landlock": "unshare", "neither": "unshare,landlock_create_ruleset"}
TRAIN = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(512, 512, bias=False).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 512, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHT = 512 * 512 * 4
pytestmark = pytest.mark.sampled("estimates as processes")


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "model.pt").write_text("precious")
    return folder


def state(work):
    """But for memopt's own compiled kernels, where the folder is the user's cache."""
    found = ways_to_write.state(str(work))
    return {name: of for name, of in found.items() if "/memopt/simulated" not in name}


@pytest.fixture
def estimate(request, work):
    """Runs the command in the folder, on the simulated device or with the CPU build of torch; returns its exit code,
    its JSON, what it said. The kernel has what `kernel` leaves it. no_shared_files: no file of this user's lies in
    /dev/shm, whatever other tests leave there meanwhile, where a test may see to that."""
    sim = request.config.getoption("--sim-python")

    def run(
        source, *options, kernel="overlay", simulated=True, arguments=(), no_shared_files=False, **environment
    ):
        (work / "train.py").write_text(source)
        before = state(work)
        python = sim if simulated else sys.executable
        line = [python, "-m", "memopt", "estimate", "--quick", "--json", *options, "train.py", *arguments]
        refused = REFUSED[kernel]
        if no_shared_files and os.geteuid() == 0:
            refused += ",shared_memory"
        done = subprocess.run(
            [sys.executable, str(HERE / "refusing.py"), refused, *line],
            cwd=work,
            env={
                **os.environ,
                "PYTHONPATH": str(HERE.parents[1]),
                "OPENBLAS_NUM_THREADS": "1",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert state(work) == before, done.stderr
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    return run


def needs(way):
    if not kernel_has(way):
        pytest.skip(f"this kernel, or what it runs in, has no {way}")


@pytest.mark.parametrize("simulated", [True, False], ids=["simulated", "fake tensors"])
@pytest.mark.parametrize("kernel", ["overlay", "landlock"])
def test_a_working_folder_is_what_it_was(estimate, work, kernel, simulated):
    """Caches and shared memory too."""
    needs(kernel)
    ways_to_write.prepare(str(work))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        Path(shared, "precious").write_text("precious")
        before = ways_to_write.state(shared)
        source = (
            f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport ways_to_write as ways\n"
            "if __name__ == '__main__':\n"
            f"    ways.with_torch(); ways.write_all({str(work)!r})\n"
            f"    try: open({shared!r} + '/precious', 'w').write('X')\n"
            "    except OSError: pass\n"
        )
        training = "".join(f"    {line}\n" for line in TRAIN.splitlines())
        caches = {name: str(work) for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR")}
        (work / "memopt/simulated").mkdir(parents=True)  # memopt's own, which it keeps there
        status, found, said = estimate(source + training, kernel=kernel, simulated=simulated, **caches)
        assert ways_to_write.state(shared) == before
    assert status == 0, said
    assert found["by_category"]["parameters"] == WEIGHT
    assert said.count("did ") >= (len(ways_to_write.WAYS) - 8 if kernel == "overlay" else 20), said


def test_where_the_kernel_protects_nothing_it_is_said_and_unprotected_is_asked_for(estimate, work):
    status, found, said = estimate("print('it ran')\n" + TRAIN, kernel="neither")
    assert status == 2 and found is None
    assert "--unprotected" in said and "it ran" not in said
    script = "open('model.pt', 'w').write('X'); assert open('model.pt').read() == 'X'\n" + TRAIN
    status, found, said = estimate(script, "--unprotected", kernel="neither")
    assert status == 0 and found["by_category"]["parameters"] == WEIGHT
    assert "--unprotected" in said
    assert (work / "model.pt").read_text() == "precious"


# ---- scripts that start others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["overlay", "landlock"])
def test_a_script_that_replaces_itself_is_estimated_with_its_new_arguments(estimate, kernel):
    needs(kernel)
    source = """
import os, sys
if os.environ.get("AGAIN") != "1":
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv, "--twice"])
assert sys.argv[1:] == ["--once", "--twice"] and __name__ == "__main__"
open("model.pt", "w").write("X")
assert open("model.pt").read() == "X"
"""
    status, found, said = estimate(source + TRAIN, kernel=kernel, arguments=["--once"])
    assert status == 0, said
    assert found["by_category"]["parameters"] == WEIGHT and found["steps"] == 3


@pytest.mark.parametrize("kernel", ["overlay", "landlock"])
def test_children_have_the_simulated_device_and_their_writes_come_to_nothing(estimate, kernel):
    needs(kernel)
    source = """
import subprocess, sys
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        with open("model.pt", "a") as file: file.write("X")
        return torch.ones(512)

def train(rank):
    assert torch.cuda.get_device_name() == NAME, torch.cuda.get_device_name()
    model = torch.nn.Linear(64, 64).cuda()
    model(torch.ones(1, 64, device="cuda")).sum().backward()
    with open("model.pt", "w") as file: file.write("X")

NAME = torch.cuda.get_device_name()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
    code = "import torch; print('card', torch.cuda.get_device_name(), torch.ones(3, device='cuda').device)"
    subprocess.run([sys.executable, "-c", code], check=True)
    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=1, multiprocessing_context="spawn")
    assert sum(len(batch) for batch in loader) == 6
"""
    training = "".join(f"    {line}\n" for line in TRAIN.splitlines())
    status, found, said = estimate(source + training, kernel=kernel, no_shared_files=True)
    assert status == 0, said
    assert "cuda:0" in said
    assert found["by_category"]["parameters"] == WEIGHT


def test_what_keeps_a_script_from_shared_memory_is_named(estimate):
    needs("landlock")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="0-memopt-test-") as file:
        lock = "import multiprocessing\nmultiprocessing.get_context('spawn').Lock()\n"
        status, _, said = estimate(lock + TRAIN, kernel="landlock")
        assert status == 2 and "PermissionError" in said
        assert Path(file.name).name in said.rpartition("PermissionError")[2], said


def test_a_sitecustomize_of_the_users_own_still_runs(estimate, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins; builtins.of_the_user = 5")
    source = (
        "import subprocess, sys\n"
        "code = 'import torch; print(of_the_user, torch.cuda.is_available())'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    status, _, said = estimate(source + TRAIN, PYTHONPATH=f"{HERE.parents[1]}:{site}")
    assert status == 0 and "5 True" in said, said


# ---- odd ends --------------------------------------------------------------------------------------------------------


def left_behind(mark):
    """Processes with that word among their arguments, and folders of an estimate's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


ODD = {
    "deletes its own folder": ("import os, shutil\nshutil.rmtree(os.getcwd())\nos.chdir('/')\n" + TRAIN, 0, ""),
    "starts daemons": (
        f"import subprocess\nsubprocess.Popen(['sleep', '{DAEMON}'], start_new_session=True)\n" + TRAIN,
        0,
        "",
    ),
    "reads standard input": ("input('which data? ')\n" + TRAIN, 2, "EOFError"),
    "ends by os._exit": (TRAIN + "import os; os._exit(0)\n", 0, ""),
    "ends by os._exit with a status": (TRAIN.replace("3", "1") + "import os; os._exit(3)\n", 2, "status 3"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)\n", 2, "SIGKILL"),
    "becomes another program": ("import os; os.execvp('true', ['true'])\n", 2, "without an answer"),
    "needs the network": (
        "import urllib.request; urllib.request.urlopen('http://data.invalid/', timeout=5)\n" + TRAIN,
        2,
        "URLError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_script_has_a_named_outcome_and_leaves_nothing(estimate, tmp_path, name, monkeypatch):
    source, expected, said_of_it = ODD[name]
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where it is imported
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    status, found, said = estimate(source, TMPDIR=str(temporary))
    assert status == expected, said
    assert said_of_it in said
    assert "Traceback" not in said.split("memopt estimate:")[-1]
    if expected == 0:
        assert found["by_category"]["parameters"] == WEIGHT
    assert not left_behind(DAEMON)
    assert list(temporary.iterdir()) == []


def test_a_killed_estimate_takes_its_children_along(request, work):
    """An interrupt of the command, while the script waits."""
    (work / "train.py").write_text(
        f"import subprocess, time\nsubprocess.Popen(['sleep', '{DAEMON}'], start_new_session=True)\n"
        "open('started', 'w')\nprint('started', flush=True)\ntime.sleep(600)\n"
    )
    line = [request.config.getoption("--sim-python"), "-m", "memopt", "estimate", "--quick", "train.py"]
    process = subprocess.Popen(
        line,
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a suite behind a shell's & ignores it
    )
    assert process.stdout is not None
    while "started" not in (text := process.stdout.readline()):
        assert text, "it ended"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert not left_behind(DAEMON)
    assert sorted(path.name for path in work.iterdir()) == ["model.pt", "train.py"]
    assert process.returncode != 0
