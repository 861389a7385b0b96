"""`make release` refuses what must not be published."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).resolve().parents[2]
PROJECT = {"name": "memopt", "version": "1.2.0", "description": "A package", "license": "BSD-3-Clause"}
EPOCH = 1_700_000_000


def test_a_version_that_is_everywhere_the_same_is_released() -> None:
    assert (
        release.checked_version(PROJECT, "# Changelog\n\n## 1.2.0 (2026-11-28)\n", ["v1.2.0", "best"])
        == "1.2.0"
    )
    assert release.checked_version(PROJECT, "## 1.2.0 (unreleased)\n", []) == "1.2.0"


@pytest.mark.parametrize(
    ("changelog", "tags", "named"),
    [
        ("## 1.2.0 (2026-11-28)\n", ["v1.3.0"], "v1.3.0"),
        ("## 1.1.0 (2026-10-01)\n", [], "CHANGELOG.md begins with 1.1.0"),
        ("## 1.2.0 (unreleased)\n", ["v1.2.0"], "unreleased"),
        ("", [], "CHANGELOG.md begins with nothing"),
    ],
)
def test_versions_that_disagree_are_refused(changelog: str, tags: list[str], named: str) -> None:
    with pytest.raises(release.ReleaseError, match=named):
        release.checked_version(PROJECT, changelog, tags)


def sdist(path: Path, order: list[str], *, time: int, owner: str, mode: int) -> Path:
    """As setuptools writes one on a machine, at a time."""
    path.parent.mkdir()
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w") as archive:
        for name in order:
            member = tarfile.TarInfo(f"memopt-1.2.0/{name}")
            content = name.encode()
            member.size, member.mtime, member.uname, member.mode = len(content), time + 0.5, owner, mode
            archive.addfile(member, io.BytesIO(content))
    path.write_bytes(gzip.compress(text.getvalue(), mtime=time))
    return path


def test_an_sdist_keeps_nothing_of_the_machine(tmp_path: Path) -> None:
    one = sdist(tmp_path / "a" / "memopt.tar.gz", ["a.py", "b.py"], time=1000, owner="root", mode=0o664)
    other = sdist(tmp_path / "b" / "memopt.tar.gz", ["b.py", "a.py"], time=2000, owner="me", mode=0o600)
    with pytest.raises(release.ReleaseError, match="no file's contents"):
        release.compare(one, other, "again")
    for archive in (one, other):
        release.normalize(archive, EPOCH)
    release.compare(one, other, "again")
    with tarfile.open(one) as archive:
        assert archive.getnames() == ["memopt-1.2.0/a.py", "memopt-1.2.0/b.py"]
        assert {member.mtime for member in archive} == {EPOCH}


def wheel(path: Path, **files: bytes) -> Path:
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def test_a_wheel_that_differs_names_the_files(tmp_path: Path) -> None:
    one = wheel(tmp_path / "a" / "m.whl", same=b"x", built=b"1", gone=b"")
    other = wheel(tmp_path / "b" / "m.whl", same=b"x", built=b"2")
    with pytest.raises(release.ReleaseError, match=r"differs: built, gone$"):
        release.compare(one, other, "again")


def library(folder: Path, *options: str) -> bytes:
    source = folder / "source.c"
    source.write_text("int f(void) { return 0; }\n")
    command = ["gcc", "-shared", "-fPIC", "-g1", *options, str(source), "-o", str(folder / "made.so")]
    subprocess.run(command, check=True, cwd=folder)
    return (folder / "made.so").read_bytes()


def test_a_builders_folder_in_a_library_is_seen(tmp_path: Path) -> None:
    clean = library(tmp_path, f"-ffile-prefix-map={tmp_path}=.")
    files = {
        "clean.so": clean,
        "debug.so": library(tmp_path),
        "rpath.so": library(tmp_path, f"-ffile-prefix-map={tmp_path}=.", "-Wl,-rpath,/opt/lib"),
        "notes.txt": f"built in {tmp_path}".encode(),
    }
    packed = wheel(tmp_path / "w" / "m.whl", **files)
    machine = release.ARCHITECTURES[platform.machine()]
    traces = release.builders_traces(packed, [tmp_path], machine)
    assert sorted(trace.split()[0] for trace in traces) == ["debug.so", "notes.txt", "rpath.so"]
    assert "rpath.so has RUNPATH" in traces or "rpath.so has RPATH" in traces
    (other,) = release.ARCHITECTURES.keys() - {platform.machine()}
    foreign = release.builders_traces(packed, [tmp_path], release.ARCHITECTURES[other])
    assert f"clean.so is not for {release.ARCHITECTURES[other]}" in foreign


def test_the_bill_of_materials_names_each_file_by_its_hash_and_is_the_same_again(tmp_path: Path) -> None:
    file = wheel(tmp_path / "a" / "m.whl", x=b"x")
    bill = release.materials(PROJECT, [file], "c0ffee", EPOCH, [])
    package = bill["metadata"]["component"]
    (part,) = package["components"]
    assert package["purl"] == "pkg:pypi/memopt@1.2.0" and part["name"] == "m.whl"
    assert part["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}]
    assert bill == release.materials(PROJECT, [file], "c0ffee", EPOCH, [])


def test_every_extra_that_a_message_names_can_be_installed_alone_or_with_all_others() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (ROOT / "memopt").rglob("*.py")]
    named = {extra for source in sources for extra in re.findall(r"memopt\[([a-z]+)\]", source)}
    (everything,) = extras["all"]
    assert len(named) > 5 and named <= extras.keys()
    assert set(re.findall(r"[a-z]+", everything)) - {"memopt"} == extras.keys() - {"all", "test", "lint"}


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match="No such file or directory"):
        release.run("ls", tmp_path / "no-such-file", env=os.environ | {"LC_ALL": "C"})
