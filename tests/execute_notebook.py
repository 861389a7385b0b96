"""Executes a notebook from its own folder, with this Python, and writes its outputs into it: what `make notebooks`
runs. A cell that raises fails the whole, and the file is left as it was."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

path = Path(sys.argv[1])
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
# When and how fast a cell ran says nothing to a reader, and would change the file each time.
for cell in notebook.cells:
    cell.metadata.pop("execution", None)
nbformat.write(notebook, path)
