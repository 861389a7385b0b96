"""Executes a notebook's cells in this process, in IPython's shell but without a kernel, and writes nothing: what the
short form of the tests runs, with MEMOPT_NOTEBOOK_SIZE=small."""

import json
import os
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"
from IPython.core.interactiveshell import InteractiveShell

path = Path(sys.argv[1]).resolve()
os.chdir(path.parent)
shell = InteractiveShell.instance()
for cell in json.loads(path.read_text())["cells"]:
    if cell["cell_type"] == "code":
        done = shell.run_cell("".join(cell["source"]), store_history=True)
        if not done.success:
            sys.exit(f"{path.name}, {cell['id']}: {done.error_before_exec or done.error_in_exec!r}")
