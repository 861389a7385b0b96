"""Executes a notebook from its own folder, with this Python, and writes its outputs into it, or into a second file:
what `make notebooks` and the tests run. A cell that raises fails the whole, and no file is changed.

    python tests/tooling/execute_notebook.py NOTEBOOK [INTO]"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

# torch's own line about an out-of-memory error names the process and the time; the exception says the same without.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
path = Path(sys.argv[1])
notebook = nbformat.read(path, as_version=4)
NotebookClient(
    notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(path.resolve().parent)}}
).execute()
# When and how fast a cell ran says nothing to a reader, and would change the file each time.
for cell in notebook.cells:
    cell.metadata.pop("execution", None)
nbformat.write(notebook, sys.argv[2] if len(sys.argv) > 2 else path)
