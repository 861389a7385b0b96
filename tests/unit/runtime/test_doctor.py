"""`memopt.doctor()` and `python -m memopt doctor`: what is absent is said and is no fault, what is broken is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import memopt
from memopt.__main__ import main, parser
from memopt._runtime import doctor, torch_version

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("MEMOPT_", "PYTORCH_"))}
    command = [sys.executable, "-m", "memopt", *arguments]
    return subprocess.run(command, cwd=ROOT, env=keep | environment, capture_output=True, text=True)


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch):
    """The doctor's findings by topic, under an environment with nothing of memopt's or torch's but what is given."""

    def ask(**environment: str) -> dict[str, list[dict[str, str]]]:
        for name in list(os.environ):
            if name.startswith(("MEMOPT_", "PYTORCH_")):
                monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        topics: dict[str, list[dict[str, str]]] = {}
        for finding in memopt.doctor().as_dict()["findings"]:
            topics.setdefault(finding["topic"], []).append(finding)
        return topics

    return ask


def test_every_topic_is_covered_once(findings):
    topics = findings()
    assert set(topics) >= {
        "memopt",
        "python",
        "torch",
        "cuda driver",
        "kernels",
        "cpu kernels",
        "simulated device",
    }
    for topic in set(topics) - {"environment"}:
        assert len(topics[topic]) == 1, topic


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_a_machine_without_a_gpu_is_healthy_and_told_why_there_is_no_driver(findings):
    (driver,) = findings()["cuda driver"]
    assert driver["state"] == "absent"
    assert "driver" in driver["text"]


def test_versions_are_those_of_the_process(findings):
    import torch

    topics = findings()
    assert memopt.__version__ in topics["memopt"][0]["text"]
    assert sys.version.split()[0] in topics["python"][0]["text"]
    assert torch.__version__ in topics["torch"][0]["text"]


def test_a_bad_isa_is_broken_and_names_the_choices(findings):
    (isa,) = findings(MEMOPT_ISA="avx3")["cpu kernels"]
    assert isa["state"] == "broken" and "avx3" in isa["text"] and "generic, avx2, avx512" in isa["text"]


def test_a_chosen_isa_is_shown(findings):
    (isa,) = findings(MEMOPT_ISA="generic")["cpu kernels"]
    assert isa["state"] == "ok" and "generic" in isa["text"]


def test_a_misspelt_variable_is_broken_and_lists_the_real_ones(findings):
    (line,) = findings(MEMOPT_IAS="avx2")["environment"]
    assert line["state"] == "broken" and "MEMOPT_IAS" in line["text"] and "MEMOPT_ISA" in line["mend"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torchs_allocator_settings_are_shown(name, findings):
    (fine,) = findings(**{name: "expandable_segments:True"})["environment"]
    assert fine["state"] == "ok" and f"{name}=expandable_segments:True" in fine["text"]


def test_torchs_allocator_settings_that_clash_are_broken_and_the_one_that_wins_is_named(findings):
    settings = {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (clash,) = findings(**settings)["environment"]
    assert clash["state"] == "broken" and "torch uses the former" in clash["text"]
    assert clash["text"].startswith("PYTORCH_CUDA_ALLOC_CONF=")
    both_alike = dict.fromkeys(settings, "backend:native")
    assert {f["state"] for f in findings(**both_alike)["environment"]} == {"ok"}


def test_a_log_level_that_is_none_is_broken_and_stops_nothing(findings):
    (line,) = findings(MEMOPT_LOG="loud")["environment"]
    assert line["state"] == "broken" and "loud" in line["text"] and "debug, info" in line["mend"]
    done = run("--version", MEMOPT_LOG="loud")
    assert done.returncode == 0 and "MEMOPT_LOG=loud is not one of debug, info, warning, error" in done.stderr


@pytest.mark.sampled("the doctor's screens")
def test_verbose_tells_what_is_looked_at_and_quiet_does_not():
    assert "memopt: looking at the CUDA driver" in run("doctor", "-v").stderr
    assert "memopt: looking at the CUDA driver" in run("doctor", MEMOPT_LOG="info").stderr
    assert run("doctor").stderr == run("doctor", "-q", MEMOPT_LOG="info").stderr == ""


def test_an_nvrtc_that_cannot_be_opened_is_broken_and_named(findings):
    (kernels,) = findings(MEMOPT_NVRTC="/nowhere/libnvrtc.so")["kernels"]
    assert kernels["state"] == "broken" and "/nowhere/libnvrtc.so" in kernels["text"]


@pytest.mark.sampled("the doctor's screens")
def test_json_is_what_the_function_finds():
    done = run("doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["healthy"]
    assert [f["topic"] for f in answer["findings"]][:4] == ["memopt", "python", "torch", "cuda driver"]


@pytest.mark.sampled("the doctor's screens")
def test_quiet_says_only_what_is_broken():
    assert run("doctor", "-q").stdout == ""
    broken = run("doctor", "-q", MEMOPT_ISA="avx3")
    assert broken.returncode == 1 and len(broken.stdout.splitlines()) == 2


@pytest.mark.sampled("the doctor's screens")
def test_output_goes_to_a_file(tmp_path):
    done = run("doctor", "-o", str(tmp_path / "doctor.txt"))
    assert done.returncode == 0 and done.stdout == ""
    assert memopt.__version__ in (tmp_path / "doctor.txt").read_text()


def test_an_output_that_cannot_be_written_is_status_2(tmp_path):
    done = run("doctor", "-o", str(tmp_path / "no" / "doctor.txt"))
    assert done.returncode == 2 and "no such folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.sampled("the doctor's screens")
def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m memopt doctor | true", shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_wrong_call_is_status_2_and_shows_the_usage():
    for arguments in [(), ("docter",), ("doctor", "--nope")]:
        done = run(*arguments)
        assert done.returncode == 2 and "usage:" in done.stderr, arguments


@pytest.mark.sampled("the doctor's screens")
def test_the_function_returns_what_the_command_prints(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MEMOPT_", "PYTORCH_")):
            monkeypatch.delenv(name)
    assert str(memopt.doctor()) + "\n" == run("doctor").stdout
    assert memopt.doctor().healthy


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        (None, "absent", "pip install"),
        ("2.9.1+cu128", "broken", "2.10"),
        ("2.10.0", "ok", ""),
        ("3.0.0", "ok", ""),
    ],
)
def test_torch_that_is_missing_or_too_old_is_told_with_the_mend(monkeypatch, version, state, words):
    monkeypatch.setattr(torch_version, "installed", lambda: version)
    found = doctor._torch()
    assert found.state == state and words in found.text + found.mend
    if state != "ok":
        with pytest.raises(ImportError, match=r"some\.feature.*2\.10"):
            torch_version.require("some.feature")


def test_the_version_of_a_loaded_torch_is_not_looked_up_on_disk(monkeypatch):
    def read_metadata(name):
        raise AssertionError(f"the metadata of {name} was read, which takes milliseconds")

    monkeypatch.setattr(torch_version.importlib.metadata, "version", read_metadata)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.11.0+cu130"))
    assert torch_version.installed() == "2.11.0+cu130"
    torch_version.require("some.feature")


def test_a_torch_that_cannot_be_imported_is_broken_and_no_crash(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = doctor._torch()
    assert found.state == "broken" and "cannot be imported" in found.text


def test_help_and_version_are_commands_too_and_loudness_may_stand_before_one(capsys):
    for words, said in (
        (["help"], "COMMAND"),
        (["help", "replay"], "TRACE"),
        (["version"], memopt.__version__),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0 and said in capsys.readouterr().out
    parse = parser().parse_args
    for words, verbose, quiet in (
        (["-v", "doctor"], 1, False),
        (["-q", "doctor"], None, True),
        (["doctor", "-vv"], 2, False),
        (["doctor"], None, False),
    ):
        assert (parse(words).verbose, parse(words).quiet) == (verbose, quiet)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory"),
        OSError("libcublas.so.13: cannot open shared object file: No such file or directory"),
        ValueError("libcublasLt.so.*[0-9] not found in the system path ['/usr/lib/python313.zip']"),
    ],
    ids=["linker", "ctypes", "torch"],
)
def test_a_torch_that_lacks_nvidias_libraries_alone_is_not_broken(monkeypatch, error):
    from memopt import sim

    monkeypatch.setattr(sim, "readiness", lambda: None)
    assert doctor._lacks_nvidia_alone(error)
    assert not doctor._lacks_nvidia_alone(type(error)("libtorch_cpu.so: cannot open shared object file"))
