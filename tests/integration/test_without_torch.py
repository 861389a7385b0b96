"""memopt in a Python without torch: what works, and the one line that the rest says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memopt.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """-S leaves out site-packages."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_every_public_name_works_or_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    done = run(str(ROOT / "tests/isolated/without_torch.py"), folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["report", "--text", "a.mopt"],
        ["diff", "a.mopt", "a.mopt"],
        ["estimate", "script.py"],
        ["demo", "--no-page"],
    ],
    ids=lambda command: command[0],
)
def test_a_command_that_needs_torch_says_so_in_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / "a.mopt").write_text("")
    done = run("-m", "memopt", *command, folder=tmp_path)
    said = f"memopt {command[0]} needs PyTorch, which is not installed: pip install 'torch>=2.10'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_the_other_commands_work(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / "trace").write_text("a 1 512 0\nf 1 0\n")
    for command in (["run", "-q", "script.py"], ["doctor"], ["replay", "trace"], ["--version"], ["--help"]):
        done = run("-m", "memopt", *command, folder=tmp_path)
        assert done.returncode == 0 and done.stdout and "Traceback" not in done.stderr, (command, done.stderr)


def test_a_torch_that_is_too_old_is_said_the_same_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from memopt._runtime import torch_version

    monkeypatch.setattr(torch_version, "installed", lambda: "2.9.1")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--no-page"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "memopt demo needs PyTorch 2.10 or later, but this is 2.9.1: pip install -U torch\n",
    )
