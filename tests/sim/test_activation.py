"""activate() refuses what it must, saying why, and changes nothing then. Each case in an interpreter of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

SIM = None
ROOT = Path(__file__).resolve().parents[2]

TRY = """
import memopt.sim
try:
    memopt.sim.activate({arguments})
except {error} as error:
    print(error)
else:
    print("activated")
assert not memopt.sim.is_active()
"""


def attempt(
    run_script, before: str = "", arguments: str = "", error: str = "RuntimeError", **environment: str
) -> str:
    done = run_script(before + TRY.format(arguments=arguments, error=error), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake_torch(folder: Path, version: str) -> Path:
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder


READ_THE_COPY = """
import importlib, pathlib
importlib.import_module("memopt.sim._coverage")._PACKAGE = pathlib.Path(__file__).parent / "sets"
"""

# Runs at the end of the process, when the attempt has been made.
NOTHING_LEFT = """
import atexit
@atexit.register
def look():
    if "/sim_" in open("/proc/self/maps").read():
        print("a simulated library is still mapped")
        import os, sys
        sys.stdout.flush()
        os._exit(1)
"""


def broken_sets(folder: Path) -> Path:
    """A copy of both sets to break: the folder of the one that this environment's torch takes."""
    from memopt.sim._activation import _torch_lib_dir
    from memopt.sim._coverage import library_set

    shutil.copytree(ROOT / "memopt" / "sim", folder / "sets", ignore=shutil.ignore_patterns("*.py", "__py*"))
    return folder / "sets" / library_set(_torch_lib_dir()).name


def compile_library(file: Path, source: str, *flags: str) -> None:
    file.with_suffix(".c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", file, file.with_suffix(".c"), *flags], check=True)


def test_after_torch_it_is_too_late(run_script, tmp_path):
    before = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
    said = attempt(run_script, before)
    assert "torch is already imported" in said and "before `import torch`" in said


@pytest.mark.parametrize(
    "name", ["libcuda.so.1", "libcuda.so.550.54.14", "libcudart.so.12", "libcudart-d0da41ae.so.11"]
)
def test_beside_a_real_driver_or_runtime_it_refuses(run_script, tmp_path, name):
    real = tmp_path / name
    compile_library(tmp_path / "driver.so", "int cuInit(unsigned flags) { return 0; }")
    (tmp_path / "driver.so").rename(real)
    said = attempt(run_script, f"import ctypes; ctypes.CDLL({str(real)!r})\n")
    assert str(real) in said and "needs its own process" in said


def test_without_torch_it_says_what_to_install(run_script, tmp_path):
    before = "import importlib.util as u\nu.find_spec = lambda name: None\n"
    said = attempt(run_script, before)
    assert "torch is not installed" in said and "pip install --no-deps 'torch===2.13.0'" in said


def test_a_torch_too_old_is_named_with_the_mend(run_script, tmp_path):
    said = attempt(run_script, FIRST_ON_PATH=str(fake_torch(tmp_path, "2.9.1+cu128")))
    assert "torch 2.9.1+cu128" in said and "too old" in said and "torch===2.13.0" in said


def test_a_cpu_build_of_torch_is_named_with_the_mend(run_script, tmp_path):
    said = attempt(run_script, FIRST_ON_PATH=str(fake_torch(tmp_path, "2.13.0+cpu")))
    assert "CPU build" in said and "pip install --no-deps 'torch===2.13.0'" in said


def test_a_cuda_major_without_a_set_is_named(run_script, tmp_path):
    home = fake_torch(tmp_path, "2.20.0+cu150")
    compile_library(
        tmp_path / "cudart.so", "int cudaMalloc(void) { return 0; }", "-Wl,-soname,libcudart.so.15"
    )
    c10 = tmp_path / "torch" / "lib" / "libc10_cuda.so"
    compile_library(
        c10, "int cudaMalloc(void); int use(void) { return cudaMalloc(); }", str(tmp_path / "cudart.so")
    )
    said = attempt(run_script, FIRST_ON_PATH=str(home))
    assert "CUDA 15" in said and "cu12" in said and "cu13" in said


def test_a_symbol_that_is_missing_is_named_before_torch_is_imported(run_script, tmp_path):
    home = fake_torch(tmp_path, "2.20.0+cu130")
    script = tmp_path / "version.map"
    script.write_text("libcudart.so.13 { global: *; };\n")
    flags = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}"]
    compile_library(tmp_path / "cudart.so", "int cudaFromTheFuture(void) { return 0; }", *flags)
    c10 = tmp_path / "torch" / "lib" / "libc10_cuda.so"
    compile_library(
        c10,
        "int cudaFromTheFuture(void); int use(void) { return cudaFromTheFuture(); }",
        str(tmp_path / "cudart.so"),
    )
    said = attempt(run_script, FIRST_ON_PATH=str(home))
    assert "libcudart.so.13: cudaFromTheFuture" in said and "newer memopt" in said


@pytest.mark.parametrize("length", [0, 40, 4000])
def test_a_torch_library_that_is_cut_short_is_named_with_the_mend(run_script, tmp_path, length):
    home = fake_torch(tmp_path, "2.20.0+cu130")
    whole = next((ROOT / "memopt" / "sim" / "cu13").glob("sim_nccl.so")).read_bytes()
    c10 = tmp_path / "torch" / "lib" / "libc10_cuda.so"
    c10.write_bytes(whole[:length])
    said = attempt(run_script, FIRST_ON_PATH=str(home))
    assert str(c10) in said and "reinstall torch" in said


@pytest.mark.parametrize("name", ["sim_cuda.so", "sim_cudnn.so"])
@pytest.mark.parametrize("length", [0, 40, 4000, -1])
def test_a_simulated_library_that_is_cut_short_is_named_with_the_mend(run_script, tmp_path, name, length):
    broken = broken_sets(tmp_path) / name
    broken.write_bytes(broken.read_bytes()[:length])
    said = attempt(run_script, READ_THE_COPY + NOTHING_LEFT)
    assert str(broken) in said and "`make`, or reinstall memopt" in said


def test_a_simulated_library_that_the_linker_refuses_is_named_and_none_is_left_loaded(run_script, tmp_path):
    """Whole to the reader of its symbols, but for another machine."""
    broken = broken_sets(tmp_path) / "sim_nccl.so"
    image = bytearray(broken.read_bytes())
    image[18] = 0xF3  # e_machine: RISC-V
    broken.write_bytes(image)
    said = attempt(run_script, READ_THE_COPY + NOTHING_LEFT)
    assert str(broken) in said and "cannot be loaded" in said and "reinstall memopt" in said


def test_a_refused_activation_leaves_no_library_and_a_corrected_one_works(run_script):
    done = run_script(
        "import memopt.sim\n"
        "for wrong in ({'devices': 100}, {'multiprocessors': 0}, {'memory': '1KiB'}):\n"
        "    try:\n"
        "        memopt.sim.activate(**wrong)\n"
        "    except ValueError as error:\n"
        "        assert 'whole number' in str(error), error\n"
        "    assert 'sim_' not in open('/proc/self/maps').read()\n"
        "    try:\n"
        "        memopt.sim.stats()\n"
        "    except RuntimeError as error:\n"
        "        assert 'not active' in str(error)\n"
        "    else:\n"
        "        raise AssertionError('statistics of no device')\n"
        "memopt.sim.activate(memory='1GiB', devices=2)\n"
        "import torch\n"
        "print(torch.cuda.device_count(), torch.ones(4, device='cuda').device, memopt.sim.stats()['memory'])\n"
    )
    assert done.stdout.split() == ["2", "cuda:0", str(1 << 30)], done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("memory='8 gigs'", "8 gigs"),
        ("memory=-1", "-1"),
        ("compute_capability='eight'", "eight"),
        ("devices=0", "devices"),
        ("devices=100", "devices"),
        ("multiprocessors=0", "sms"),
    ],
)
def test_nonsense_settings_are_refused_by_name(run_script, arguments, named):
    assert named in attempt(run_script, arguments=arguments, error="ValueError")


def test_a_second_activation_is_refused(run_script):
    done = run_script(
        "import memopt.sim\nmemopt.sim.activate()\ntry:\n    memopt.sim.activate()\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    assert "already active" in done.stdout, done.stderr


def test_control_before_activation_says_what_to_do(run_script):
    done = run_script(
        "import memopt.sim\ntry:\n    memopt.sim.stats()\nexcept RuntimeError as error:\n    print(error)\n"
    )
    assert "call memopt.sim.activate() before importing torch" in done.stdout, done.stderr


def test_importing_the_package_loads_no_library(run_script):
    done = run_script("import memopt.sim\nprint('sim_cuda' in open('/proc/self/maps').read())\n")
    assert done.stdout.strip() == "False", done.stderr


def test_libraries_that_are_loaded_but_not_activated_are_a_machine_without_a_gpu(run_script):
    done = run_script(
        "import ctypes, pathlib, memopt.sim\n"
        "from memopt.sim._activation import _open, _torch_lib_dir\n"
        "from memopt.sim._coverage import library_set\n"
        "device = _open(library_set(_torch_lib_dir()))\n"
        "print(device.cuInit(0))\n"
        "import torch\n"
        "print(torch.cuda.is_available(), torch.cuda.device_count())\n"
    )
    assert done.stdout.split() == ["100", "False", "0"], done.stderr  # CUDA_ERROR_NO_DEVICE


def test_an_unmodified_script_runs_after_activation(run_script, tmp_path):
    (tmp_path / "user.py").write_text(
        "import torch\nx = torch.ones(4, device='cuda')\nprint(torch.cuda.memory_allocated(), x.device)\n"
    )
    done = run_script(
        "import runpy, memopt.sim\nmemopt.sim.activate(memory='1GiB')\n"
        f"runpy.run_path({str(tmp_path / 'user.py')!r}, run_name='__main__')\n"
    )
    assert done.stdout.split() == ["512", "cuda:0"], done.stderr


def test_settings_are_handed_to_a_process_by_the_environment(run_script):
    done = run_script(
        "import os, subprocess, sys, memopt.sim\n"
        "from memopt.sim._activation import VARIABLE, activate_from, active_settings\n"
        "if VARIABLE not in os.environ:\n"
        "    memopt.sim.activate('3GiB', devices=2, compute_capability='9.0', context='256MiB')\n"
        "    child = {**os.environ, VARIABLE: active_settings()}\n"
        "    sys.exit(subprocess.run([sys.executable, __file__], env=child).returncode)\n"
        "activate_from()\n"
        "import torch\n"
        "print(torch.cuda.device_count(), torch.cuda.get_device_capability(), memopt.sim.stats(1)['memory'])\n"
        "print(torch.cuda.mem_get_info(1)[0], torch.backends.cudnn.version() > 0)\n"
        "print(os.environ[VARIABLE] == active_settings())\n"
    )
    size = 3 << 30
    assert done.stdout.splitlines() == [f"2 (9, 0) {size}", f"{size - (256 << 20)} True", "True"], done.stderr


@pytest.mark.parametrize(
    ("settings", "named"), [("", "MEMOPT_SIM"), ("memory=plenty", "memory"), ("colour=red", "colour")]
)
def test_settings_that_are_none_are_refused_and_another_activation_works(run_script, settings, named):
    done = run_script(
        "import memopt.sim\nfrom memopt.sim._activation import activate_from\n"
        f"try:\n    activate_from({settings!r})\nexcept ValueError as error:\n    print(error)\n"
        "memopt.sim.activate()\n"
    )
    assert named in done.stdout and done.returncode == 0, done.stderr
