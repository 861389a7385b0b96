"""Checks of what a page must be for all who read it, asked of the browser that has drawn it: names of charts and
controls, contrast, headings, tables, and that no text is cut or lies on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chromium

_CHECKS = Path(__file__).with_suffix(".js")
_FOCUSABLE = ("button", "slider", "link", "checkbox", "textbox", "combobox")


def complaints(tab: chromium.Tab) -> list[str]:
    """Return what is wrong with the page as it is drawn now."""
    found = [f"{kind}: {one}" for kind, those in tab.evaluate(_CHECKS.read_text()).items() for one in those]
    for node in nodes(tab):
        name = node["name"].strip()
        if not name and (node["focusable"] or node["role"] in _FOCUSABLE or node["role"] == "image"):
            found.append(f"names: a {node['role']} without a name")
    return found


def nodes(tab: chromium.Tab) -> list[dict[str, Any]]:
    """Return role, name and focusable of each node, as the browser tells them to a screen reader."""
    tab.call("Accessibility.enable")
    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            "value": node.get("value", {}).get("value"),
            "focusable": any(
                one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ())
            )
            and node["role"]["value"] not in ("RootWebArea", "none"),
        }
        for node in tab.call("Accessibility.getFullAXTree")["nodes"]
        if not node.get("ignored") and "role" in node
    ]
