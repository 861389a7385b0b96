"""Runs cells in a real notebook kernel, with this Python, and prints what each of them said, as JSON: for tests. Cells
come as a JSON list on standard input. A cell may raise."""

import json
import sys

import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=600, kernel_name="python3", allow_errors=True).execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
