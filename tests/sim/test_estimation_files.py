"""Writes of an estimated script: visible to the script, and to nobody else."""

import os
from pathlib import Path

import pytest
from estimation_children import estimate

SIM = None
SOAK = os.environ.get("MEMOPT_SOAK") == "1"

SCRIPT = """
import glob, io, os, shutil, sys, tempfile
from pathlib import Path
import numpy, torch

here = os.getcwd()
assert open("data.txt").read() == "data"
with open("data.txt", "a") as file:
    file.write(" and more")
assert Path("data.txt").read_text() == "data and more"
with open("log.txt", "w") as file:
    file.write("x" * 1000)
assert os.path.getsize("log.txt") == 1000 and "log.txt" in os.listdir()
try:
    open("data.txt", "x")
    raise AssertionError("it is there already")
except FileExistsError:
    pass

os.makedirs("out/deep/er")
assert os.statvfs("out/deep").f_namemax == os.pathconf("out/deep", "PC_NAME_MAX") > 8
model = torch.nn.Linear(8, 8).cuda()
torch.save({"model": model.state_dict(), "step": 7}, "out/deep/model.pt")
assert torch.load("out/deep/model.pt")["step"] == 7
numpy.save("out/array.npy", numpy.arange(5))
assert numpy.load("out/array.npy").sum() == 10
numpy.arange(6, dtype="int32").tofile("out/raw.bin")
assert os.stat("out/raw.bin").st_size == 24
assert sorted(path.name for path in Path("out").rglob("*")) == ["array.npy", "deep", "er", "model.pt", "raw.bin"]
assert glob.glob("out/*.npy") == ["out/array.npy"]
assert [sorted(files) for _, _, files in os.walk("out")] == [["array.npy", "raw.bin"], ["model.pt"], []]

os.replace("out/array.npy", "kept/old.pt")        # over what is there
assert numpy.load("kept/old.pt").sum() == 10
assert sorted(entry.name for entry in os.scandir("kept")) == ["best.pt", "folder", "old.pt"]
os.remove("kept/best.pt")
assert not os.path.exists("kept/best.pt") and not Path("kept/best.pt").is_file()
try:
    open("kept/best.pt")
    raise AssertionError("it was removed")
except FileNotFoundError:
    pass
shutil.rmtree("kept/folder")
assert sorted(os.listdir("kept")) == ["old.pt"]
os.mkdir("kept/folder")
assert os.listdir("kept/folder") == []
os.rename("kept", "moved")
assert not os.path.exists("kept") and sorted(os.listdir("moved")) == ["folder", "old.pt"]
shutil.copytree("moved", "again")
os.chdir("again")
Path("inside.txt").write_text("inside")
os.chdir(here)
assert Path("again/inside.txt").read_text() == "inside"
os.symlink("log.txt", "link.txt")
assert open("link.txt").read() == "x" * 1000

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "x").write_text("x")
with tempfile.NamedTemporaryFile("w") as file:
    file.write("x")
fd = os.open("by_number.bin", os.O_CREAT | os.O_WRONLY)
os.write(fd, b"abc"); os.close(fd)
assert os.path.getsize("by_number.bin") == 3
wide = torch.nn.Linear(5000, 5000, device="cuda")
torch.save(wide.state_dict(), "wide.pt")
assert os.path.getsize("wide.pt") > 4 * 5000 * 5000
assert os.stat("wide.pt").st_blocks * 512 < 1 << 20      # a hole
wide.load_state_dict(torch.load("wide.pt"))
print("all well")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    (work / "kept" / "folder").mkdir(parents=True)
    (work / "data.txt").write_text("data")
    for name in ("best.pt", "old.pt", "folder/part.pt"):
        (work / "kept" / name).write_text(f"precious {name}")
    return work


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace") if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def test_what_is_written_is_there_for_the_script_alone(folder):
    before = contents(folder)
    answer = estimate(folder.parent, SCRIPT, cwd=folder)
    assert answer["stopped"] == "end" and "all well" in answer["printed"], answer["complained"]
    assert contents(folder) == before
    names = {Path(name).name for name in answer["files_not_kept"]}
    assert {"log.txt", "model.pt", "raw.bin", "inside.txt", "by_number.bin", "wide.pt"} <= names


@pytest.mark.skipif(not SOAK, reason="the long form")
def test_files_are_kept_where_that_is_wanted(folder):
    source = "import os; open('log.txt', 'w').write('kept'); os._exit(4)"
    answer = estimate(folder.parent, source, cwd=folder, protection="none")
    assert (answer["stopped"], answer["exit_status"]) == ("exit", 4)
    assert (folder / "log.txt").read_text() == "kept"
    assert answer["files_not_kept"] == []
