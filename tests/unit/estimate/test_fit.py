"""`python -m memopt fit` and `run --fit`, with a child that answers by a formula: the plan, its file, the words, the
exit codes; plans of another case are refused."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import formula_child
import pytest
import torch

from memopt.__main__ import main
from memopt._C import format_size
from memopt._estimate import cards, fake_ranks, interpreters, prediction, protection
from memopt._estimate import fit as fits
from memopt._run import plan as plans
from memopt._run.run_child import StepClock
from memopt._run.techniques import _models
from memopt._runtime import process

HERE = Path(__file__).resolve().parents[2] / "helpers"
MIB = 1 << 20
SCRIPT = {
    "fixed": 400 * MIB,
    "each": 30 * MIB,
    "masks": 0,
    "kept": {"native": 1.0, "expandable": 1.0, "pool": 1.0},
    "option": "--batch-size",
    "batch": 8,
}
PEAK = formula_child.allocated(SCRIPT, 8, 1.0)


@pytest.fixture
def fit(tmp_path, monkeypatch, capfd):
    """Runs `memopt fit` on a script that lacks so many MiB, with what each technique saves; returns status, answer."""
    formula = [sys.executable, str(HERE / "formula_child.py")]
    monkeypatch.setattr(process, "command", lambda python, module: formula)
    monkeypatch.setattr(interpreters, "find", lambda python=None: sys.executable)
    monkeypatch.setattr(protection, "find", lambda python, folders: protection.Protection("none"))
    monkeypatch.chdir(tmp_path)

    def run(lacking, *options, saves=(), script=(), arguments=()):
        techniques = {name.replace("_", " "): size * MIB for name, size in dict(saves).items()}
        text = json.dumps(SCRIPT | dict(script) | {"techniques": techniques})
        Path("train.py").write_text(text)
        card = str(PEAK - lacking * MIB + cards.CONTEXT)
        status = main(["fit", "-f", "--json", "--gpu", card, *options, "train.py", *arguments])
        out = capfd.readouterr()
        return status, json.loads(out.out) if out.out else out.err

    return run


def techniques(found):
    return [name.partition(":")[0] for name in found["plan"]["techniques"]]


def test_a_script_that_fits_has_an_empty_plan(fit):
    status, found = fit(-1)
    assert status == 0 and found["fits"] and found["plan"]["techniques"] == [] and found["lines"] == []
    assert found["margin_bytes"] == MIB and plans.read("train.fit.json").peak_bytes == PEAK


def test_the_lowest_tier_comes_first_whatever_saves_more(fit):
    saves = {"eight_bits": 90, "loss_head": 70, "offload_activations": 51}
    status, found = fit(50, "--allow", "8bit", saves=saves)
    assert status == 0 and techniques(found) == ["offload activations"] and found["tier"] == "bit-equal"
    assert found["margin_bytes"] == MIB and found["plan"]["peak_bytes"] == PEAK - 51 * MIB
    assert found["lines"] == ["memopt.offload_activations() around the forward pass"]


def test_what_no_plan_reaches_is_answered_at_once(fit, capfd):
    saves = {"offload_activations": 900}
    row = {"name": "train.py:5", "bytes": 600 * MIB, "category": "parameters", "text": "model.cuda()"}
    early = {"bytes": PEAK - 49 * MIB, "lines": [row]}
    kept = {"native": 1.5, "expandable": 1.1, "pool": 1.02}
    status, found = fit(50, saves=saves, script={"early": early, "kept": kept})
    assert status == 1 and found["simulations"] == 3 and not found["not_enough_alone"]
    assert found["before_training"]["lines"] == [row]
    assert found["smallest_card"]["bytes"] == int(1.1 * PEAK) + cards.CONTEXT < found["needed_bytes"][1]
    assert main(["fit", "-f", "--gpu", str(PEAK - 50 * MIB + cards.CONTEXT), "train.py"]) == 1
    said = capfd.readouterr().out
    assert "before a module runs or an optimizer is made" in said and "model.cuda()" in said
    assert fit(50, saves=saves, script={"early": {"bytes": PEAK - 51 * MIB, "lines": [row]}})[0] == 0


def test_a_run_that_fits_without_workspaces_alone_is_unsure(fit, capfd):
    saves = {"offload_activations": 51, "loss_head": 10}
    status, found = fit(50, saves=saves, script={"workspace": 5 * MIB})
    unsure = [row for row in found["runs"] if row["unsure"]]
    assert ["offload activations"] in [row["techniques"] for row in unsure]
    assert not any(row["fits"] or "loss head" in row["techniques"] for row in unsure)
    assert status == 0 and techniques(found) == ["loss head", "offload activations"]
    assert main(["fit", "-f", "--gpu", str(PEAK - 50 * MIB + cards.CONTEXT), "train.py"]) == 0
    assert "not where cuDNN takes workspaces of 256 MiB" in capfd.readouterr().out
    assert not any(row["unsure"] for row in fit(50, saves=saves)[1]["runs"])


def test_where_nothing_fits_the_lines_of_the_least_run_are_told(fit, capfd):
    status, found = fit(50, saves={"offload_activations": 20, "loss_head": 10})
    assert status == 1 and found["peak_lines_of_the_least"][0]["bytes"] == PEAK - 30 * MIB
    assert main(["fit", "-f", "--gpu", str(PEAK - 50 * MIB + cards.CONTEXT), "train.py"]) == 1
    assert "train.py:5" in capfd.readouterr().out


def test_what_is_allowed_and_what_is_exact_decides(fit):
    saves = {"eight_bits": 60, "four_bits": 70}
    assert fit(50, saves=saves)[0] == 1
    status, found = fit(50, "--allow", "8bit,4bit", saves=saves)
    assert status == 0 and techniques(found) == ["eight bits"] and found["tier"] == "other numbers"
    assert techniques(fit(50, "--allow", "4bit", saves=saves)[1]) == ["four bits"]
    assert fit(50, "--exact", saves={"fused": 60})[0] == 1
    for word in ("factored", "bf16"):
        assert fit(50, saves={word: 60})[0] == 1
        assert techniques(fit(50, "--allow", word, saves={word: 60})[1]) == [word]
    saves = {"activations_in_8_bits": 60}
    assert fit(50, saves=saves)[0] == fit(50, "--allow", "8bit", saves=saves)[0] == 1
    status, found = fit(50, "--allow", "8bit-activations", saves=saves)
    assert status == 0 and techniques(found) == ["activations in 8 bits"] and found["tier"] == "other numbers"
    assert found["lines"] == ['memopt.offload_activations(to="8bit") around the forward pass']
    exact = fit(50, "--allow", "8bit-activations", saves=saves | {"fused": 60})[1]
    assert techniques(exact) == ["fused"]  # of a lower tier


def test_a_batch_in_the_place_of_the_scripts_own_is_planned_for(fit):
    status, found = fit(0, "--batch", "6", arguments=("--batch-size", "8"))
    assert status == 0 and found["plan"]["arguments"] == ["--batch-size", "6"]
    assert found["plan"]["peak_bytes"] == formula_child.allocated(SCRIPT, 6, 1.0)
    status, said = fit(0, "--batch", "6", script={"option": None})
    assert status == 2 and "--batch 6: name the script's option" in said


def test_several_together_without_what_is_not_needed(fit):
    saves = {"fused": 4, "loss_head": 30, "checkpoint": 25, "offload_layers": 2}
    status, found = fit(50, saves=saves)
    assert status == 0 and techniques(found) == ["checkpoint", "loss head"]
    assert found["not_enough_alone"]["fused"] == 4 * MIB
    assert found["runs"][0]["fits"] and found["runs"][0]["evidence"] == "simulated"
    assert found["does_not_run"]["step in backward"].endswith("nothing in the script takes step in backward")


def test_runs_at_the_same_time_change_no_answer(fit):
    saves = {"fused": 4, "loss_head": 30, "checkpoint": 25, "offload_layers": 2, "offload_states": 9}
    answers = []
    for jobs in ("1", "3"):
        status, found = fit(60, "--jobs", jobs, saves=saves, script={"host": {"loss head": 80 * MIB}})
        del found["seconds"], found["simulations"]
        answers.append((status, found))
    assert answers[0] == answers[1] and answers[0][0] == 0


def test_the_faster_of_two_is_planned_by_the_seconds_of_a_step(fit, capfd):
    """On 360 GB/s, which the table's nearest card has: 1 s as it is, 1.25 s and 1.5 s with what is recomputed."""
    moved = {"": 360_000_000_000, "checkpoint": 180_000_000_000, "offload activations": 90_000_000_000}
    saves = {"checkpoint": 80, "offload_activations": 60}
    status, found = fit(50, saves=saves, script={"moved": moved})
    rate = cards.card("480MiB").rates
    assert status == 0 and techniques(found) == ["offload activations"]
    assert found["step_seconds"] == pytest.approx(moved[""] / rate.memory, rel=1e-3)
    assert found["runs"][0]["seconds"] == pytest.approx(1.25 * found["step_seconds"], rel=1e-3)
    assert rate.of in found["assumed"] and "data sheet" in found["assumed"]
    assert main(["fit", "-f", "--gpu", str(PEAK - 50 * MIB + cards.CONTEXT), "train.py"]) == 0
    plain = found["step_seconds"]
    assert f"{1.25 * plain:.2f} s, {0.25 * plain:+.2f} s" in capfd.readouterr().out


def test_recomputation_is_tried_at_its_least_where_the_allocator_leaves_no_budget(fit):
    script = {"kept": dict.fromkeys(SCRIPT["kept"], 2.0), "fixed": 130 * MIB, "batch": 1}
    status, found = fit(500, saves={"checkpoint": 5}, script=script)
    assert status == 1 and found["not_enough_alone"]["checkpoint"] == 5 * MIB


def test_where_nothing_fits_a_card_and_a_batch_are_named(fit):
    Path("train.fit.json").unlink(missing_ok=True)
    status, found = fit(100, saves={"fused": 10}, arguments=["--batch-size", "8"])
    assert status == 1 and found["plan"] is None and not Path("train.fit.json").exists()
    assert found["smallest_card"] == {"bytes": PEAK - 10 * MIB + cards.CONTEXT, "card": "rtx4060"}
    assert found["largest_batch"]["size"] == 4


def test_the_hosts_memory_bounds_what_is_put_there(fit):
    saves = {"offload_activations": 60, "offload_layers": 60}
    script = {"host": {"offload activations": 550 * MIB, "offload layers": 120 * MIB}}
    status, found = fit(50, saves=saves, script=script)
    assert techniques(found) == ["offload activations"] and found["host_bytes"] == 550 * MIB
    status, found = fit(50, "--host-memory", str(550 * MIB - 1), saves=saves, script=script)
    assert techniques(found) == ["offload layers"] and found["host_bytes"] == 120 * MIB
    assert "550 MiB of the host's memory" in found["does_not_run"]["offload activations"]
    status, found = fit(50, "--host-memory", "100MiB", saves=saves, script=script)
    assert status == 1 and "of which it may take 100 MiB" in found["does_not_run"]["offload layers"]


def test_a_disk_has_the_states_that_the_host_has_no_room_for(fit, tmp_path, capfd):
    """By seconds states in the host's memory come first: a disk is the slower one."""
    saves = {"offload_states": 60, "states_on_disk": 60, "fused": 4}
    script = {"host": {"offload states": 200 * MIB, "states on disk": 80 * MIB}}
    script |= {"disk": {"states on disk": 200 * MIB}, "moved": {"": 10**9, "states on disk": 10**9}}
    scratch = tmp_path / "a:b"
    scratch.mkdir()
    disk = ("--disk", "a:b")
    status, found = fit(50, *disk, saves=saves, script=script)
    assert techniques(found) == ["offload states"] and not found["disk_bytes"]
    small = ("--host-memory", "100MiB")
    status, found = fit(50, *small, saves=saves, script=script)
    assert status == 1 and "200 MiB of the host's memory" in found["does_not_run"]["offload states"]
    assert "states on disk" not in found["does_not_run"]
    status, found = fit(50, *small, *disk, saves=saves, script=script)
    assert status == 0 and found["plan"]["techniques"] == [f"states on disk:{scratch}"]
    assert found["tier"] == "equal to rounding" and "and a disk of 2;" in found["assumed"]
    assert found["host_bytes"] == 80 * MIB and found["disk_bytes"] == 200 * MIB
    assert found["lines"] == [f'memopt.optim.AdamW(..., offload_states="{scratch}")']
    card = str(PEAK - 50 * MIB + cards.CONTEXT)
    assert main(["fit", "-f", "--gpu", card, *small, *disk, "train.py"]) == 0
    said = capfd.readouterr()
    assert (
        "disk       200 MiB of it are taken" in said.out and f"with states on disk in {scratch}" in said.err
    )
    status, found = fit(50, "--host-memory", "70MiB", *disk, saves=saves, script=script)
    assert status == 1 and "80.0 MiB of the host's memory" in found["does_not_run"]["states on disk"]


@pytest.mark.parametrize("made", ["nothing", "a file"])
def test_a_directory_that_is_none_is_refused_before_anything_runs(fit, made):
    if made == "a file":
        Path("scratch").touch()
    status, said = fit(50, "--disk", "scratch", saves={"offload_states": 60})
    assert status == 2 and "--disk: creating a file in" in said and "give a directory that exists" in said
    assert not Path("train.py.requests").exists()


def test_combinations_that_fail_alike_are_told_once():
    estimate = prediction.Estimate("train.py", prediction.SIMULATED, (1, 1), (1, 1), 1)
    failed = {"a + b + c": "no way", "d": "no other way", "a + b": "no way"}
    said = str(fits.Fit(estimate, cards.card("8GiB"), failed=failed))
    assert "with d: no other way" in said and "with a + b and 1 more: no way" in said


def test_the_words(fit, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "118")
    fit(50, saves={"loss_head": 60, "fused": 10, "offload_layers": 0})
    card = str(PEAK - 50 * MIB + cards.CONTEXT)
    assert main(["fit", "-f", "--gpu", card, "train.py"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "short by 306 MiB" in said  # 256 of them cuDNN's workspaces
    assert "simulated peak a step results plan fits" in said and "equal to rounding loss head" in said
    assert "alone: expandable (nothing), fused (-10.0 MiB), offload layers (nothing)" in said
    assert "left over 10.0 MiB" in said
    assert "nothing in the script takes checkpoint, offload activations," in said
    assert "memopt.nn.linear_cross_entropy(" in said and "GB/s" not in said
    assert "planned in train.fit.json: python -m memopt run --fit train.fit.json train.py" in said
    assert main(["fit", "--gpu", card, "train.py"]) == 2 and "-f to write over it" in capfd.readouterr().err


def test_progress_has_budgets_as_sizes_and_says_shortly_what_is_no_use(fit, capfd):
    assert fit(-1)[0] == 0
    Path("train.py").write_text(json.dumps(SCRIPT | {"techniques": {"checkpoint": 51 * MIB}}))
    assert main(["fit", "-f", "--gpu", str(PEAK - 50 * MIB + cards.CONTEXT), "train.py"]) == 0
    said = capfd.readouterr().err.splitlines()
    budget = int(json.loads(Path("train.fit.json").read_text())["techniques"][0].partition(":")[2])
    assert any(f"with checkpoint within {format_size(budget)} and expandable on " in line for line in said)
    assert "memopt fit: nothing in the script takes offload activations" in said
    assert str(budget) not in "".join(said)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["train.py"], "name the card"),
        (["--gpu", "many", "train.py"], "neither a card nor a size"),
        (["--gpu", "8GiB"], "SCRIPT is missing"),
        (["--gpu", "8GiB", "none.py"], "there is no script"),
        (["--gpu", "8GiB", "--allow", "2bit", "train.py"], "write one or more of 8bit, 4bit"),
        (["--gpu", "8GiB", "--allow", "4bit", "--exact", "train.py"], "not allowed with"),
        (["--gpu", "8GiB", "--steps", "0", "train.py"], "nothing to plan"),
        (["--gpu", "8GiB", "-o", "nowhere/plan", "train.py"], "no such folder"),
    ],
)
def test_wrong_calls(fit, capfd, call, said):
    Path("train.py").write_text(json.dumps(SCRIPT))
    try:
        status = main(["fit", *call])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capfd.readouterr().err


@pytest.mark.parametrize("ends", ["raise", "exit"])
def test_a_script_that_fails_by_itself(fit, ends):
    status, said = fit(50, script={"ends": ends})
    assert status == 2 and "memopt fit: train.py: it " in said and not Path("train.fit.json").exists()


# ---- its file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A plan for train.py 3, and the command that runs it."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('it runs')\n")
    script, text = plans.described("train.py")
    made = plans.Plan(script, text, ["3"], "2.13.0", 8 << 30, 1 << 30, techniques=["fused"])
    made.write("a.fit.json")
    assert plans.read("a.fit.json") == made
    made.check_call(["./train.py", "3"])
    made.check_torch("2.13.0")
    made.check_card(8 << 30)
    return made


def refused(capfd, *call):
    assert main(["run", "--fit", "a.fit.json", *call]) == 2
    out = capfd.readouterr()
    assert "it runs" not in out.out and "memopt run: --fit: " in out.err
    return out.err


def test_a_plan_of_another_case_is_refused_by_the_difference(planned, capfd):
    Path("other.py").write_text(Path("train.py").read_text())
    said = refused(capfd, "other.py", "3")
    assert "the script: planned for" in said and "other.py" in said and "Plan again" in said
    assert "arguments: planned for 3, and this is none" in refused(capfd, "train.py")
    assert "arguments: planned for 3, and this is 3 4" in refused(capfd, "train.py", "3", "4")
    Path("train.py").write_text("print('it runs too')\n")
    assert "the text of the script" in refused(capfd, "train.py", "3")


def test_a_plan_of_other_versions_or_a_larger_card_is_refused(planned, capfd):
    with pytest.raises(ValueError, match=r"torch: planned for 2\.13\.0, and this is 2\.10\.0"):
        planned.check_torch("2.10.0")
    with pytest.raises(
        ValueError, match=r"a smaller card: planned for at least 8\.00 GiB, and this is 7\.00 GiB"
    ):
        planned.check_card(7 << 30)
    with pytest.raises(ValueError, match=r"8589934592 bytes, and this is 8589934591 bytes"):
        planned.check_card((8 << 30) - 1)
    dataclasses.replace(planned, memopt="0.0.1").write("a.fit.json")
    assert "memopt: planned for 0.0.1" in refused(capfd, "train.py", "3")


def test_a_plan_of_another_model_is_refused_before_its_first_step(planned, capfd, monkeypatch):
    """A model's size may come from a file that is not the script."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    torch = pytest.importorskip("torch")
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "count = int(open('size').read())\n"
        "optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(count))], lr=1)\n"
        "for _ in range(2):\n    optimizer.step()\n    print('it runs')\n"
    )
    _, text = plans.described("train.py")
    dataclasses.replace(planned, sha256=text, torch=torch.__version__, techniques=[], trained_bytes=16).write(
        "a.fit.json"
    )
    Path("size").write_text("8")
    assert "16 bytes, and this is 32 bytes" in refused(capfd, "--no-record", "train.py", "3")
    Path("size").write_text("4")
    assert main(["run", "-q", "--no-record", "--fit", "a.fit.json", "train.py", "3"]) == 0
    assert capfd.readouterr().out.count("it runs") == 2


def test_a_plan_is_for_its_number_of_ranks(fit, capfd, monkeypatch):
    """Of which the one with the highest peak is planned for."""
    status, found = fit(50, "--nproc", "3", saves={"offload_activations": 70}, script={"each_rank": 8 * MIB})
    assert status == 0 and found["plan"]["ranks"] == 3 and techniques(found) == ["offload activations"]
    assert found["ranks"]["rank"] == 2 and found["plan"]["peak_bytes"] == PEAK + (16 - 70) * MIB
    run = ["run", "--fit", "train.fit.json", "train.py"]
    assert main(run) == 2 and "ranks: planned for 3, and this is 1" in capfd.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(run) == 2 and "ranks: planned for 3, and this is 2" in capfd.readouterr().err


def test_a_plan_whose_directory_is_gone_names_it(planned, capfd, tmp_path):
    scratch = tmp_path / "a:b"
    dataclasses.replace(planned, techniques=[f"states on disk:{scratch}"]).write("a.fit.json")
    said = refused(capfd, "train.py", "3")
    assert f"keeps optimizer states in {scratch} (No such file or directory): make that directory" in said
    scratch.mkdir()
    plans.read("a.fit.json").check_disk()


def test_arguments_that_only_look_alike_are_others(planned):
    split = dataclasses.replace(planned, arguments=["3 4"])
    with pytest.raises(ValueError, match="arguments"):
        split.check_call(["train.py", "3", "4"])


@pytest.mark.parametrize(
    "entry",
    [
        {"card_bytes": "8GiB"},
        {"peak_bytes": True},
        {"step_seconds": None},
        {"arguments": [3]},
        {"techniques": "fused"},
        {"techniques": ["faster"]},
        {"techniques": ["checkpoint:much"]},
        {"techniques": ["states on disk"]},
        {"techniques": ["states on disk:scratch"]},
        {"backend": "other"},
    ],
)
def test_a_plan_with_a_broken_entry_is_refused_by_its_name(planned, capfd, entry):
    Path("a.fit.json").write_text(json.dumps(dataclasses.asdict(planned) | entry))
    said = refused(capfd, "train.py", "3")
    assert "is not a plan" in said and next(iter(entry)) in said and "Make one with" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"script": 1}', "\xff"])
def test_what_is_no_plan_is_refused(planned, capfd, text):
    Path("a.fit.json").write_text(text, encoding="latin-1")
    assert "is not a plan" in refused(capfd, "train.py", "3")


def test_the_end_compares_a_step_with_the_plan(planned, capfd, monkeypatch):
    """The first two steps are not counted, and other optimizers' are not."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    torch = pytest.importorskip("torch")
    clock, other = StepClock(), StepClock()
    for now in (1.0, 9.0, 10.0, 12.5):
        assert clock.median() == (1.0 if now == 12.5 else None)
        clock.stepped(planned, now)
        clock.stepped(other, now + 0.5)
    assert clock.median() == 1.75
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=1)\n"
        "for _ in range(4):\n    optimizer.step()\n"
    )
    _, text = plans.described("train.py")
    version = torch.__version__
    dataclasses.replace(planned, sha256=text, torch=version, step_seconds=0.39, techniques=[]).write(
        "a.fit.json"
    )
    assert main(["run", "--no-record", "--fit", "a.fit.json", "train.py", "3"]) == 0
    said = capfd.readouterr().err
    assert re.search(
        r"a step: \S+ s in the median, planned 0.39 s \(a roofline of the card's data sheet\)", said
    )


def test_a_plan_is_of_the_file_that_a_module_is_in(planned, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    assert main(["run", "--no-record", "--fit", "a.fit.json", "-m", "train", "3"]) == 0
    assert "it runs" in capfd.readouterr().out
    Path("kit/inner").mkdir(parents=True)
    Path("kit/__init__.py").write_text("raise RuntimeError('a plan imports no package')\n")
    for name in ("__init__", "__main__", "train"):
        Path("kit", "inner", f"{name}.py").write_text("")
    described = {name: plans.described(name, module=True)[0] for name in ("kit.inner", "kit.inner.train")}
    assert described == {
        "kit.inner": str(Path("kit/inner/__main__.py").resolve()),
        "kit.inner.train": str(Path("kit/inner/train.py").resolve()),
    }
    for name in ("kit.train", "kit.inner.train.more", "train.more"):
        with pytest.raises(ValueError, match=f"no file of the module '{name}'"):
            plans.described(name, module=True)


def test_the_plan_decides_alone(planned, capfd):
    assert "leave --backend" in refused(capfd, "--backend", "pool", "train.py", "3")
    assert "no file of the module 'tran'" in refused(capfd, "-m", "tran", "3")
    assert main(["run", "--fit", "none.json", "train.py", "3"]) == 2
    assert "none.json" in capfd.readouterr().err


def test_modules_are_found_and_no_other_object_is_asked_for_its_class():
    """torch.distributed has an object that warns when it is."""

    class Asked:
        @property
        def __class__(self):
            raise AssertionError("it was asked")

    kept = Asked()
    outer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    found = _models()
    assert any(one is outer for one in found) and not any(one is outer[0] for one in found)
    assert fake_ranks._roots(outer.parameters()) == [outer]
    del kept
