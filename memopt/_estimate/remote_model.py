"""The script of an estimate's child process for a model: its argument is a file that model.py has written."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(path: str) -> None:
    import pickle

    paths, content = pickle.loads(Path(path).read_bytes())
    sys.path += [one for one in map(os.path.abspath, paths) if one not in sys.path]
    from memopt._estimate import serialization

    serialization.loads(content, "cuda").run("cuda")


if __name__ == "__main__":
    main(sys.argv[1])
