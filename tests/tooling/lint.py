"""The checks of `make lint`, in one list: a line a check, and at the end which tools this machine lacks. Exits with 1
if a check that ran found something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.argv[1]
WARNINGS = ["-std=c11", "-D_GNU_SOURCE", "-Icsrc", "-I.", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes",
            "-Wmissing-prototypes", "-Werror"]  # fmt: skip
PACKAGES = {"clang": "clang", "clang-format": "clang-format", "clang-tidy": "clang-tidy"}


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def flags_of(source: str) -> list[str]:
    """The compiler's options for a file beside the warnings."""
    if source.startswith("csrc/python/"):
        import sysconfig

        return ["-DPy_LIMITED_API=0x030B0000", '-DMEMOPT_VERSION="0"', f"-I{sysconfig.get_path('include')}"]
    if source.startswith(("csrc/simcuda/", "tests/c/sim/")):
        return ["-DSIM_CUDA_MAJOR=13"]
    return []


def compile_all(compiler: str) -> list[list[str]]:
    sources = tracked("csrc/*.c", "tests/c/*.c", "tests/fuzz/*.c", "benchmarks/*.c")
    sources = [s for s in sources if not s.endswith(("/kernel_image.c", "library_stub.c"))]
    return [[compiler, *WARNINGS, *flags_of(s), "-fsyntax-only", s] for s in sources]


def checks() -> dict[str, list[list[str]]]:
    c_files = tracked("*.c", "*.h", "*.cu", "*.cuh")
    found = {
        "ruff": [[PYTHON, "-m", "ruff", "check", "--quiet", "."]],
        "ruff format": [[PYTHON, "-m", "ruff", "format", "--quiet", "--check", "."]],
        "mypy": [[PYTHON, "-m", "mypy", "--no-error-summary"]],
        "stubtest": [["env", f"PYTHONPATH={ROOT}", PYTHON, "-m", "mypy.stubtest", "memopt._C", "--concise",
                      "--mypy-config-file", "pyproject.toml", "--ignore-disjoint-bases", "--ignore-unused-allowlist",
                      "--allowlist", "tests/tooling/stubtest_allowlist.txt"]],
        "gcc": compile_all("gcc"),
        "clang": compile_all("clang"),
        "clang-format": [["clang-format", "--dry-run", "-Werror", *c_files]],
        "clang-tidy": [["clang-tidy", "--quiet", "--warnings-as-errors=*", s, "--", *WARNINGS, *flags_of(s)]
                       for s in tracked("csrc/base/*.c", "csrc/driver/*.c", "csrc/alloc/*.c", "csrc/scaler/*.c",
                                       "csrc/optim/*.c", "csrc/loss/*.c", "csrc/checkpoint/*.c",
                                       "csrc/transfer/*.c", "csrc/data/*.c")
                       if not s.endswith("kernel_image.c")],
    }  # fmt: skip
    return found


def main() -> int:
    failed = 0
    missing = []
    for name, commands in checks().items():
        if name in PACKAGES and not shutil.which(name):
            missing.append(name)
            print(f"{name:13} not here", flush=True)
            continue
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = list(
                pool.map(lambda c: subprocess.run(c, cwd=ROOT, capture_output=True, text=True), commands)
            )
        wrong = [d for d in done if d.returncode != 0]
        failed += len(wrong)
        print(f"{name:13} {'ok' if not wrong else 'FAILED'}", flush=True)
        for d in wrong:
            print(d.stdout + d.stderr, end="", flush=True)
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        print(f"not checked, for want of a tool: {', '.join(missing)} (Debian: apt-get install {packages})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
