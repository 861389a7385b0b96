"""A hook of mkdocs: the notebooks, with the outputs that they are kept with, as pages of the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
FENCE = "`" * 8  # more than any cell has


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(path)))
    return files


def page(path: Path) -> str:
    """A notebook as Markdown, which loads nothing from elsewhere."""
    cells = json.loads(path.read_text())["cells"]
    note = (
        f"!!! note\n    This page is `notebooks/{path.name}`, with the outputs of a run on a simulated GPU.\n"
    )
    title, *rest = [part for cell in cells for part in parts(cell)]
    head, _, text = title.partition("\n")
    return "\n\n".join([head, note, text, *rest]) + "\n"


def parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [fenced(source, "python"), *map(shown, cell["outputs"])]


def shown(output: dict[str, Any]) -> str:
    """The richest form of an output that a page can have."""
    data = output.get("data", {})
    if "text/html" in data:
        return f"<div class='output'>{''.join(data['text/html'])}</div>"
    if "image/png" in data:
        return f'<img alt="plot" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return fenced("".join(output.get("text") or data["text/plain"]), "text")


def fenced(text: str, language: str) -> str:
    return f"{FENCE}{language}\n{text.rstrip()}\n{FENCE}"
