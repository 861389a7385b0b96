"""MEMOPT_REPORT=….html: the page of an out-of-memory error."""

from __future__ import annotations

import os
import re
import subprocess

from environment_python import ROOT, python_of

SCRIPT = """
import memopt.sim
memopt.sim.activate(memory="96MiB", context="8MiB")
import torch, memopt
from memopt._memory.recording import recorder
memopt.enable()
RECORD
history = []
while True:
    history.append(torch.ones(1 << 20, device="cuda"))  # here it grows
"""


def test_the_page_has_the_report_and_what_lived_or_what_was_recorded(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MEMOPT_REPORT": "oom.html",
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    pages = []
    for record in ("", "recorder.start()"):
        (tmp_path / "grows.py").write_text(SCRIPT.replace("RECORD", record))
        done = subprocess.run(
            [python_of("sim"), "grows.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 1
        said = re.search(r"^  Page        (.*)$", done.stderr, re.MULTILINE)
        assert said, done.stderr
        assert done.stderr.index("torch.OutOfMemoryError: CUDA out of memory.") < said.start()
        assert "The page was not written" not in done.stderr
        pages.append(said[1])
        text = (tmp_path / said[1]).read_text()
        assert text.rstrip().endswith("</html>")
        assert "memopt [rank 1 of 2]: CUDA out of memory at grows.py:" in text
        assert "here it grows" in text
        assert text.index("What happened") < text.index("The peak")
        if record:
            assert "history of torch&#x27;s allocator" in text and ">Out of memory</button>" in text
        else:
            assert "what was live when a request failed" in text and "history[*]" in text
    assert pages[0] == "oom.rank1.html" and re.fullmatch(r"oom\.rank1\.\d+\.html", pages[1])
    assert sorted(path.name for path in tmp_path.glob("*.html")) == sorted(pages)
