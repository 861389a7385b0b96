"""The built extension and what is shipped: symbols, wheel and sdist, import where something is missing, leaks."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memopt
from memopt import _C

ROOT = Path(__file__).resolve().parents[2]
ISOLATED = ROOT / "tests" / "isolated"


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


# ---- symbols ---------------------------------------------------------------------------------------------------------


def symbols(kind: str) -> set[str]:
    """Dynamic symbols of the built extension: 'undefined' or 'defined'."""
    lines = run("nm", "-D", f"--{kind}-only", _C.__file__).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def test_it_asks_python_for_nothing_outside_the_stable_abi_of_3_11():
    lines = (ROOT / "tests/reference/stable_abi_3_11.txt").read_text().splitlines()
    stable = {line for line in lines if not line.startswith("#")}
    asked = {name for name in symbols("undefined") if re.match(r"_?Py", name)}
    assert len(asked) > 20 and asked <= stable, asked - stable


def test_three_symbols_leave_it():
    assert symbols("defined") == {"PyInit__C", "memopt_malloc", "memopt_free"}


def test_it_is_linked_to_neither_cuda_nor_torch_nor_cpp():
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", _C.__file__).stdout))
    libc = {f"lib{name}" for name in ("c.so.6", "dl.so.2", "pthread.so.0", "m.so.6", "gcc_s.so.1")}
    assert needed <= libc | {"ld-linux-x86-64.so.2"}  # the loader, for what is a thread's own


def test_its_name_is_that_of_every_python_3():
    assert Path(_C.__file__).name == "_C.abi3.so"


# ---- the wheel and the sdist -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has or would have, and nothing that was built."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PATH of the compiler and its own tools: no nvcc, no make, no shell utilities."""
    folder = tmp_path_factory.mktemp("tools")
    for name in {"gcc", "as", "ld", "ar", *(sysconfig.get_config_var("CC") or "gcc").split()[:1]}:
        found = shutil.which(name)
        assert found, f"there is no {name}"
        (folder / Path(name).name).symlink_to(found)
    return folder


def setup(tree: Path, *arguments: str, path: str | None = None) -> subprocess.Popen[str]:
    """setup.py in a tree. `path` in the place of PATH means: as on a machine without CUDA's toolkit."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if path:
        environment |= {"PATH": path, "MEMOPT_CUDA": "0"}
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], pattern: Path) -> Path:
    said, _ = process.communicate(timeout=3600)
    assert process.returncode == 0, said
    (made,) = pattern.parent.glob(pattern.name)
    return made


@pytest.fixture(scope="module")
def wheels(checkout: Path, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built at once: from the checkout, with whatever this machine has and has built, and from its sdist, with
    gcc alone."""
    folder = tmp_path_factory.mktemp("sdist")
    sdist = finish(setup(checkout, "sdist", "-d", str(folder)), folder / "*.tar.gz")
    shutil.unpack_archive(sdist, folder)
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    from_sdist = setup(unpacked, "bdist_wheel", "-d", str(folder / "dist"), path=str(tools))
    # What this checkout's own build has compiled is as good for the copy.
    for built in (
        *(ROOT / "build" / name for name in ("simcuda", "kernels")),
        *(ROOT / "build").glob("temp.*"),
    ):
        if built.is_dir():
            shutil.copytree(built, checkout / built.relative_to(ROOT))
    from_checkout = setup(checkout, "bdist_wheel", "-d", str(checkout / "dist"))
    return {
        "checkout": finish(from_checkout, checkout / "dist" / "*.whl"),
        "sdist": finish(from_sdist, folder / "dist" / "*.whl"),
    }


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_is_for_every_cpython_from_3_11_on(wheels: dict[str, Path]):
    for wheel in wheels.values():
        assert re.fullmatch(rf"memopt-{memopt.__version__}-cp311-abi3-linux_\w+\.whl", wheel.name)


def test_the_wheel_holds_the_package_and_nothing_else(wheels: dict[str, Path], checkout: Path):
    names = contents(wheels["checkout"])
    info = f"memopt-{memopt.__version__}.dist-info/"
    package = {name for name in names if not name.startswith(info)}
    assert all(name.startswith("memopt/") for name in package)
    built = {name for name in package if name.endswith(".so")}
    files = (p for p in (checkout / "memopt").rglob("*") if p.is_file() and p.parent.name != "__pycache__")
    sources = {str(p.relative_to(checkout)) for p in files}
    assert package - built == sources
    assert {"memopt/py.typed", "memopt/_C.pyi", "memopt/sim/_activation.py"} <= package
    simulated = {name for name in built if re.fullmatch(r"memopt/sim/cu1[23]/sim_[\w-]+\.so", name)}
    assert built == simulated | {"memopt/_C.abi3.so"}
    assert {info + "METADATA", info + "licenses/LICENSE"} <= names


def test_the_wheel_has_the_simulated_device_of_both_cuda_majors(wheels: dict[str, Path]):
    for wheel in wheels.values():
        for major in ("cu12", "cu13"):
            with zipfile.ZipFile(wheel) as archive:
                files = [i for i in archive.infolist() if i.filename.startswith(f"memopt/sim/{major}/")]
            stems = {Path(file.filename).stem.removeprefix("sim_") for file in files}
            assert {"cuda", "cudart", "cublas", "cudnn", "nvidia-ml", "nccl"} <= stems
            assert 100_000 < sum(file.file_size for file in files) < 1_000_000


def test_the_sdist_builds_the_same_contents_with_gcc_alone(wheels: dict[str, Path]):
    assert contents(wheels["sdist"]) == contents(wheels["checkout"])


def test_its_library_names_no_folder_of_the_machine_it_was_built_on(wheels: dict[str, Path], tmp_path: Path):
    with zipfile.ZipFile(wheels["sdist"]) as archive:
        library = Path(archive.extract("memopt/_C.abi3.so", tmp_path))
    assert not re.findall(r"\(R(?:UN)?PATH\)", run("readelf", "-d", library).stdout)
    folders = [str(wheels["sdist"].parents[1]), sysconfig.get_path("include")]
    assert not [folder for folder in folders if folder.encode() in library.read_bytes()]


def test_the_wheel_asks_for_no_other_package(wheels: dict[str, Path]):
    with zipfile.ZipFile(wheels["checkout"]) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    required = re.findall(r"^Requires-Dist: (.*)", metadata, re.M)
    assert all("extra ==" in line for line in required), required
    assert "Requires-Python: >=3.11" in metadata


# ---- import ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the sdist's wheel and nothing else."""
    home = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    with zipfile.ZipFile(wheels["sdist"]) as archive:
        archive.extractall(run(python, "-c", code).stdout.strip())
    return python


def test_a_bare_environment_imports_it(bare: Path, tmp_path: Path):
    done = run(bare, "-I", "-W", "error", ISOLATED / "bare_import.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == memopt.__version__


def test_doctor_runs_in_a_bare_environment(bare: Path, tmp_path: Path):
    done = subprocess.run([bare, "-m", "memopt", "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    assert "torch" in (done.stdout + done.stderr).lower()


def imported(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import memopt"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_checkout_that_was_not_built_says_run_make(checkout: Path, tmp_path: Path):
    for path in (checkout / "memopt").rglob("*.py"):
        target = tmp_path / path.relative_to(checkout)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(checkout / "setup.py", tmp_path)
    done = imported(tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr.splitlines()[-1] and "run `make`" in done.stderr


def test_a_package_without_its_extension_says_reinstall(checkout: Path, tmp_path: Path):
    shutil.copytree(checkout / "memopt", tmp_path / "site" / "memopt", ignore=shutil.ignore_patterns("*.so"))
    done = imported(tmp_path / "site")
    assert done.returncode == 1
    assert "pip install --force-reinstall memopt" in done.stderr.splitlines()[-1]


def another() -> object:
    """The extension executed once more, as a module of its own."""
    spec = importlib.util.spec_from_file_location("memopt._C", _C.__file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_second_import_is_a_module_of_its_own_over_the_same_engines():
    second = another()
    assert second is not _C and second.Error is not _C.Error
    assert second.parse_size("8GiB") == _C.parse_size("8GiB") == 8 << 30
    assert second.allocator_statistics() == _C.allocator_statistics()
    if _C.cpu_isa() != "avx512":
        with pytest.raises(second.Error):
            second.cpu_isa("avx512")
    with pytest.raises(ValueError):
        second.parse_size("x")


def test_modules_come_and_go_without_a_trace():
    def cycle(times: int) -> None:
        for _ in range(times):
            another()
        gc.collect()

    # The interpreter's own tables grow now and then; what leaks grows every time.
    grown = []
    for _ in range(5):
        blocks, heap = sys.getallocatedblocks(), heap_in_use()
        cycle(200)
        grown.append((sys.getallocatedblocks() - blocks, heap_in_use() - heap))
    assert min(blocks for blocks, _ in grown) < 100, grown
    assert min(heap for _, heap in grown) < 200 * 100, grown


def test_sub_interpreters_import_it_use_it_and_end():
    done = run(sys.executable, ISOLATED / "sub_interpreters.py", cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "5 sub-interpreters"


# ---- leaks -----------------------------------------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def heap_in_use() -> int:
    """Bytes that malloc has given out."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class Refuses:
    """An argument whose every conversion fails."""

    def __index__(self) -> int:
        raise ZeroDivisionError


CHAIN = ((4, 4, ((4, 0, 0, 1.0, 1.0, 1.0),)),)

# Arguments for every function of the extension: good ones, and every way of refusing there is.
CALLS: dict[str, list[tuple]] = {
    "parse_size": [("8GiB",), (4096,), ("nonsense",), ("9EiB",), (-1,), (2**64,), (1.5,), ("\ud800",), (), ("1", "2")],
    "format_size": [(0,), (2**64 - 1,), (-1,), (2**64,), ("x",), ()],
    "cuda_driver": [(), (1,)],
    "cpu_isa": [(), (None,), ("generic",), ("avx512",), ("sse",), (1,), ("a\0b",)],
    "host_blocks": [(), (1,)],
    "allocator_prepare": [(), (1,)],
    "allocator_hooks": [(), (1,)],
    "allocator_configure": [
        (0, 20, False, True, 0, len),
        (0, 20, None, True, 0, len),
        (-1, 20, False, True, 0, len),
        (0, 2**80, 0, 1, 0, len),
        ("x",),
        (),
    ],
    "allocator_double_map": [(), (0,), (63,), (64,), (-1,), ("x",)],
    "allocator_trim": [(0, 0), (63, 0), (64, 0), (-1, 0), (0, 2**80), ("x", 0), ()],
    "allocator_fraction": [(0,), (63,), (64,), (-1,), ("x",), ()],
    "allocator_is_current": [(), (1,)],
    "allocator_misuse": [(), (1,)],
    "allocator_statistics": [(), (0,), (63,), (64,), (-1,), (2**40,), ("x",)],
    "allocator_private_pools": [(), (0,), (63,), (64,), (-1,), ("x",)],
    "allocator_fragmentation": [(), (0,), (63,), (64,), (-1,), ("x",)],
    "allocator_reset_peaks": [(), (0,), (63,), (64,), (-1,), ("x",)],
    "allocator_reset_accumulated": [(), (0,), (63,), (64,), (-1,), ("x",)],
    "allocator_segments": [
        (0, None, {}), (63, (0, 1), {}), (64, None, {}), (0, 1, {}), (0, (1,), {}), (0, ("x", 1), {}), (0, None, None),
        (),
    ],
    "kernels_configure": [((), None), (("/no/such/libnvrtc.so",), "/no/such/cache"), ((1,), None), ([], None), ()],
    "kernel_status": [(), (0,), (0, True), (64, True), (-1,), ("x",)],
    "kernel_source": [(), (1,)],
    "allocator_observe": [(None,), (len,), (1,), ()],
    "adam_codes_encode": [(True, 1, 2, 3), (False, None, None, None), (True,), ()],
    "adam_codes_decode": [(True, 1, 2, 3), (False, None, None, None), (True,), ()],
    "chain_check": [
        (CHAIN, 4, 4), (((4, 4, ((2, 0, 0, 1.0, 1.0, 1.0),)),), 4, 4), ((), 4, 4), ((1,), 4, 4), (((4, 4),), 4, 4),
        (((4, 4, (1,)),), 4, 4), (((4, 4, ((4, 0, 0, 1.0, "x", 1.0),)),), 4, 4), (CHAIN, -1, 4), (),
    ],
    "chain_replay": [
        (CHAIN, 4, 4, [("fall", 0, 0), ("bwd", 0, 0)]), (CHAIN, 4, 4, [("bwd", 0, 0)]), (CHAIN, 4, 4, [("x", 0, 0)]),
        (CHAIN, 4, 4, [1]), (CHAIN, 4, 4, [("fall", -1, 0)]), (CHAIN, 4, 4, [("fall", 0, 9)]), ((), 4, 4, []), (),
    ],
    "_tensor_view": [(1,), (None, True), (1, True, True), (), ("x", 1, 2, 3)],
    "replay": [
        (b"a 1 512 0\nf 1 0\n", 0, 20, 0, False, True, False, False, 0, False),
        (b"nonsense\n", 0, 20, 0, False, True, False, False, 0, False),
        (b"", -1, 20, 0, False, True, False, False, 0, False), (),
    ],
    "trace_start": [(-1, 10, False, True), (-1, 0, False, False), (64, 10, False, False), ("x",), ()],
    "trace_stop": [(-1,), (0,), (64,), (-2,), ("x",), ()],
    "trace_state": [(0,), (63,), (64,), (-1,), ("x",), ()],
    "trace_read": [(0,), (63,), (64,), (-1,), ("x",), ()],
    "trace_stack": [(0,), (2**31,), (-1,), ("x",), ()],
    "trace_text": [(0,), (64,), (-1,), ("x",), ()],
    "trace_step": [(), (1,)],
    "module_running": [(), (1,)],
    "cpu_log_start": [("x",), (-1,), (10, False, 1), ()],
    "cpu_log_stop": [(0,), (-1,), ("x",), ()],
    "cpu_log_no_stacks": [(), (1,)],
    "cpu_log_pause": [(1,)],  # it nests: each would have to be resumed
    "cpu_log_resume": [(1,)],
    "cpu_log_born": [(4096, 512, False), ("x", 1, True), ()],
    "cpu_log_died": [(4096, 1), (4096,), ("x", 1), ()],
    "cpu_log_size": [(4096,), ("x",), ()],
    "cpu_log_position": [(), (1,)],
    "cpu_log_live": [(False,), (True,), ()],
    "cpu_log_read": [(), (1,)],
    "cpu_log_stacks": [(1,), ("x",), ()],
    "copy_out": [(1, 2), (b"x", b"y", 1), (), (1,)],
    "copy_in": [(1, 2), (b"x", b"y", 1), (), (1,)],
    "copy_batch": [
        ([], [], b"", None), ([1], [2], b"\0", None), ([1], [], b"", None), ([], [], "", None), (1, [], b"", None),
        ([], [], b"", (1, 0, 1)), ([], [], b"", (1, 0)), ([], [], b"", ("x", "y", 1)), ([], [], b"", 1), (),
    ],
    "plain_bytes": [(1,), (b"x",), (None,), ()],
    "copy_await": [(64, 2), (-1, 0), ("x", 1), ()],
    "copy_over": [(64, 2), (-1, 0), ("x", 1), ()],
    "copy_counts": [(64,), (-1,), ("x",), ()],
    "copy_wait": [(64, 2, 0.0), (-1, 0, 0.0), ("x", 1, 0.0), ()],
    "cross_entropy": [(1, 2, 3, 4, 5, 0, 10, 0.0, 0.0), (1, 2, 3, 4, 5, 6, 0, 0.0, 0.0), (1, 2), ()],
    "widen": [(1, 2, None, None, 1, 1.0, False), (1, 2, None, None, "x", 1.0, False), (1, 2), ()],
    "shared_build": [
        (1, "names", ["a", "b"], len, 0), (1, "names", ["a", 1], len, 0), (2, "x", [(1, {"a": 2.0})], len, 0),
        (3, "x", [("a", 1), ("a", 2)], len, 0), (3, "x", [1], len, 0), (2, "x", [len], lambda _: "no", 0),
        (2, "x", ["a" * 5000], len, 4096), (0, "x", [], len, 0), (1, "x", 1, len, 0), (),
    ],
    "shared_copy": [(b"",), (b"x" * 100,), (1,), ()],
    # What would confine this process, or make it another's parent, is in tests/unit/estimate/test_protection.py.
    "overlay_files": [("relative", []), ("relative", ["/tmp"]), ("relative", [1]), ("relative", 1), (1, []), ()],
    "refuse_writes": [(["/no/such/folder"],), ([1],), (["a\0b"],), (1,), ()],
    "adopt_orphans": [(1,)],
}  # fmt: skip


def test_every_function_is_in_the_list_of_calls():
    functions = {name for name, value in vars(_C).items() if inspect.isbuiltin(value)}
    assert functions == set(CALLS)


@pytest.fixture
def kernels_unconfigured() -> Iterator[None]:
    yield
    _C.kernels_configure((), None)


@pytest.mark.parametrize("name", CALLS)
def test_ten_thousand_calls_leave_nothing(name: str, kernels_unconfigured: None):
    """Over successes and errors alike: no block of Python's, none of malloc's, none of the engines'."""
    function: Callable = getattr(_C, name)
    calls = CALLS[name]

    def repeat(times: int) -> None:
        for arguments in calls:
            for _ in range(times // len(calls)):
                try:
                    function(*arguments)
                except Exception:  # whatever it refuses: what it leaves is what is asked here
                    continue

    def settled() -> tuple[int, int, int]:
        gc.collect()
        return sys.getallocatedblocks(), heap_in_use(), _C.host_blocks()

    repeat(1000)
    grown = []
    # A leak in one of the calls is some 1000 objects or more, every time. What another thread of pytest's keeps (the
    # reports of tests/sim, read in the background) comes once.
    for _ in range(5):
        blocks, heap, engines = settled()
        repeat(10_000)
        more = settled()
        grown.append((more[0] - blocks, more[1] - heap))
        if grown[-1][0] < 200 and grown[-1][1] < 16_000:
            break
    else:
        pytest.fail(f"blocks and bytes left by 10,000 calls: {grown}")
    assert more[2] == engines


def test_a_leak_would_be_seen():
    """The control: one forgotten reference a call, in pure Python."""
    kept: list[object] = []
    before = sys.getallocatedblocks()
    for _ in range(1000):
        kept.append(object())
    assert sys.getallocatedblocks() - before > 900
