"""Estimates of scripts by the environment that runs the tests: in forks of one process that has imported torch."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def estimate(
    folder: Path, source: str, *arguments: str, cwd: Path | None = None, **request: Any
) -> dict[str, Any]:
    """The answer about a script of this source; besides what it printed."""
    script, private = folder / "train.py", folder / "private"
    script.write_text(source)
    shutil.rmtree(private, ignore_errors=True)
    private.mkdir()
    answer, asked = private / "answer.json", private / "request.json"
    given = {"argv": [str(script), *arguments], "answer": str(answer), "memory": 80 << 30}
    asked.write_text(json.dumps(given | request))
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process.stdin.write(json.dumps([str(asked), str(cwd or folder), environment]) + "\n")
    process.stdin.flush()
    answered, _, _ = select.select([process.stdout], [], [], 600)  # a hang; a busy host may take minutes
    if not answered:
        process.terminate()
        _process.cache_clear()
        raise TimeoutError(f"no answer about {script} within 600 s")
    status = process.stdout.readline()
    printed, complained = ((private / name).read_text() for name in ("printed", "complained"))
    assert answer.exists(), printed + complained
    found = json.loads(answer.read_text())
    assert int(status) == found["exit_status"], printed + complained
    return found | {"printed": printed, "complained": complained}


@functools.cache
def _process() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def _serve() -> int:
    from memopt._estimate import protection, script_process

    script_process.prepare()
    for line in sys.stdin:
        path, folder, environment = json.loads(line)
        status = protection.fork_and_watch()
        if status is None:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for number, name in enumerate((os.devnull, "printed", "complained")):
                file = os.open(os.path.join(os.path.dirname(path), name), os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(file, number)
            return script_process.run(path)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_serve())
