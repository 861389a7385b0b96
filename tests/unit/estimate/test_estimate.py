"""`python -m memopt estimate` and what is behind it, with a child that answers by a formula (formula_child.py): the
searches, the ranges, the verdicts, the words; scripts that fail, exit, hang and leave processes behind."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import formula_child
import pytest

from memopt.__main__ import main
from memopt._estimate import cards, child_process, interpreters, protection, request, survey
from memopt._estimate.answer import Answer
from memopt._estimate.request import Request
from memopt._runtime import process

HERE = Path(__file__).resolve().parents[2] / "helpers"
MIB, GIB = 1 << 20, 1 << 30
SCRIPT = {
    "fixed": 400 * MIB,
    "each": 30 * MIB,
    "masks": 0,
    "kept": {"native": 1.25, "expandable": 1.125, "pool": 1.02},
    "option": "--batch-size",
    "batch": 8,
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a script of that formula; returns its path."""
    formula = [sys.executable, str(HERE / "formula_child.py")]
    monkeypatch.setattr(process, "command", lambda python, module: formula)
    monkeypatch.setattr(interpreters, "find", lambda python=None: sys.executable)
    monkeypatch.setattr(protection, "find", lambda python, folders: protection.Protection("none"))

    def write(**changed):
        path = tmp_path / "train.py"
        path.write_text(json.dumps(SCRIPT | changed))
        return str(path)

    return write


def answer(capfd, *arguments, status=0):
    assert main(["estimate", "--json", *map(str, arguments)]) == status
    return json.loads(capfd.readouterr().out)


def requests(path):
    return [json.loads(line) for line in Path(path + ".requests").read_text().splitlines()]


def allocated(batch=8, **changed):
    return formula_child.allocated(SCRIPT | changed, batch, 1.0)


# ---- searches ---------------------------------------------------------------------------------------------------


def test_the_smallest_that_suffices_is_found_to_within_a_step():
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    for _ in range(300):
        need, step = chance.randrange(1, 10**6), chance.randrange(1, 1000)
        low = chance.randrange(0, need)
        high = need + chance.randrange(0, 10**6)
        asked = []
        found = survey.smallest(
            lambda n, asked=asked, need=need: asked.append(n) or n >= need, low, high, step
        )
        assert need <= found <= max(need + step, low + step) and found <= high
        assert len(asked) <= 21


def test_the_largest_that_fits_is_exact_whatever_the_bytes_do():
    """The oracle: a table of sizes of which a prefix fits."""
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    for _ in range(500):
        most = chance.choice([1, 2, 7, 100, 5000])
        border = chance.randrange(0, most + 1)
        size = chance.choice(
            [lambda n: 10 * n + 1, lambda n: n * n, lambda n: n + n.bit_length(), lambda n: n * 100 - 50]
        )
        room = chance.choice([size(border + 1) - 1, chance.randrange(1, 10**6)])
        asked = []

        def measure(n, asked=asked, border=border, size=size, most=most):
            assert 1 <= n <= most and n not in asked
            asked.append(n)
            return size(n) if n <= border else None

        assert survey.largest(measure, room, chance.randrange(1, most + 1), most) == (border, True)
        assert len(asked) <= 4 * most.bit_length() + 4


def test_a_line_takes_few_runs():
    asked = []
    found = survey.largest(
        lambda n: asked.append(n) or (1000 + 7 * n if n <= 12345 else None), 1000 + 7 * 12345, 8, 1 << 20
    )
    assert found == (12345, True) and len(asked) <= 8


def test_what_does_not_grow_is_said():
    with pytest.raises(survey.NoEffect):
        survey.largest(lambda n: 77, 100, 8, 1 << 20)
    best, bounded = survey.largest(lambda n: min(n, 100) * 10, 10**6, 8, 1 << 20)
    assert best >= 100 and not bounded


# ---- what was asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "usable", "capability"),
    [
        ("rtx4090", 23.64, "8.9"),
        ("4090", 23.64, "8.9"),
        ("NVIDIA GeForce RTX 4090", 23.64, "8.9"),
        ("a100", 39.39, "8.0"),
        ("A100-SXM4-80GB", 79.15, "8.0"),
        ("H100", 79.10, "9.0"),
        ("24GiB", 24, "8.0"),
        (24 * GIB, 24, "8.0"),
    ],
)
def test_cards_are_found_by_name_and_by_size(name, usable, capability):
    found = cards.card(name)
    assert (found.usable_bytes, found.compute_capability) == (int(usable * GIB), capability)


def test_a_card_that_does_not_exist_is_refused_with_those_that_do():
    for text, said in (
        ("rtx4091", "did you mean rtx4090"),
        ("", "write a size"),
        ("0", "memory is 0"),
        ("300MiB", "CUDA context alone takes"),
        ("99TiB", "too large for a card"),
        ("24 apples", "'24 apples'"),
    ):
        with pytest.raises(ValueError, match=said):
            cards.card(text)
    with pytest.raises(ValueError, match="compute capability"):
        cards.card("t4", "8")


def test_the_table_is_sorted_and_each_name_finds_its_card():
    assert [c.usable_bytes for c in cards.CARDS] == sorted(c.usable_bytes for c in cards.CARDS)
    for card in cards.CARDS:
        assert (
            cards.card(card.name) == card
            and cards.smallest_with(card.usable_bytes).usable_bytes == card.usable_bytes
        )
    assert cards.smallest_with(cards.CARDS[-1].usable_bytes + 1) is None


@pytest.mark.parametrize(
    ("arguments", "name", "with_64"),
    [
        ("--batch-size 8 --lr 1", None, "--batch-size 64 --lr 1"),
        ("--lr 1 --batch_size=8", None, "--lr 1 --batch_size=64"),
        ("--per_device_train_batch_size 8", None, "--per_device_train_batch_size 64"),
        ("train.batch_size=8", None, "train.batch_size=64"),
        ("-b 8", None, "-b 64"),
        ("--n 8", "--n", "--n 64"),
        ("--lr 1", "--n", "--lr 1 --n 64"),
        ("--lr 1 --n=8", "n", "--lr 1 --n=64"),
        ("--lr 1", "n", "--lr 1 --n 64"),
        ("--lr 1", "data.n=", "--lr 1 data.n=64"),
        ("data.n=8 n", "data.n", "data.n=64 n"),
    ],
)
def test_the_batch_is_found_where_scripts_take_it(arguments, name, with_64):
    argv = ["train.py", *arguments.split()]
    found = request.find_batch_option(argv, name)
    changed = found.request(Request(argv, "", 1), 64)
    assert " ".join(changed.argv[1:]) == with_64 and changed.batch_size is None


@pytest.mark.parametrize("arguments", ["", "--epochs 3", "--batch-size many", "batch 8", "--no-batch-norm 3"])
def test_without_an_option_it_is_every_dataloaders(arguments):
    argv = ["train.py", *arguments.split()]
    changed = request.find_batch_option(argv).request(Request(argv, "", 1), 64)
    assert changed.argv == argv and changed.batch_size == 64


# ---- answers ----------------------------------------------------------------------------------------------------


def test_what_fits_exits_with_0_and_the_json_has_the_documented_keys(script, capfd):
    found = answer(capfd, "--gpu", "24GiB", script())
    assert found["verdict"] == "fits" and found["oom"] is None
    assert found["allocated_bytes"][0] == allocated()
    assert found["reserved_bytes"][0] == int(allocated() * 1.25)
    assert sum(found["by_category"].values()) == found["allocated_bytes"][0]
    assert found["measured"] is False and found["method"] == "simulated device"
    assert set(found["sources"]) >= {"allocated_bytes", "reserved_bytes", "context_bytes"}
    assert found["would_fit"] == []


def test_the_words_on_the_screen(script, capfd):
    assert main(["estimate", "--gpu", "24GiB", script()]) == 0
    said = capfd.readouterr()
    for words in (
        "on 24.0 GiB:",
        "of 24.0 GiB usable: fits",
        "640 MiB allocated, 800 MiB - 1.03 GiB reserved, 450 MiB context",
        "= 550.00 activations + 60.00 optimizer + 30.00 parameters MiB",
        "train.py:5  activations  y = f(x)",
        "native 800 MiB, fits | expandable_segments 720 MiB, fits | memopt's pool 653 MiB, fits",
        "simulated, not measured: compute capability 8.0; 3 steps of the optimizer; torch 2.13.0",
    ):
        assert words in said.out, words
    assert "the script's own words" in said.err and "own words" not in said.out


def test_the_script_is_shown_once_and_not_at_all_with_quiet(script, capfd):
    assert main(["estimate", script()]) == 0
    assert capfd.readouterr().err.count("the script's own words") == 1
    assert main(["estimate", "-q", script()]) == 0
    assert capfd.readouterr().err == ""


def test_what_does_not_fit_says_where_it_ends_and_what_would(script, capfd):
    path = script()
    card = allocated(5) + cards.CONTEXT
    found = answer(capfd, "--gpu", card, path, "--batch-size", 8, status=1)
    assert found["verdict"] == "does not fit" and found["oom"]["line"] == 7
    assert found["allocated_bytes"][0] == allocated(8)
    assert found["largest_batch"] == {
        "size": 5,
        "peak": allocated(5),
        "option": "--batch-size",
        "card": found["card"]["name"],
        "bounded": True,
        "exact": False,
        "now": 8,
    }
    batch, larger = found["would_fit"]
    assert (
        batch["what"] == "batch 5 instead of 8" and batch["peak_bytes"] == allocated(5) and batch["changes"]
    )
    assert larger["what"] == "a card of 7.63 GiB, as rtx4060" and larger["peak_bytes"] == allocated(8)
    assert main(["estimate", "--gpu", str(card), path, "--batch-size", "8"]) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert f"CUDA out of memory at {path}:7 (loss.backward()), requested 4.00 MiB" in said
    assert "DOES NOT FIT" in said and "evaluation" not in said
    assert main(["estimate", "--gpu", str(card), script(evaluates=True), "--batch-size", "8"]) == 1
    assert "(an evaluation, or sampling), requested 4.00 MiB" in " ".join(capfd.readouterr().out.split())


def advised(script, capfd, lacking, **saves):
    """The techniques that are said to fit a script, by what it lacks and what each saves."""
    path = script(techniques={name.replace("_", " "): size for name, size in saves.items()})
    card = allocated() - lacking + cards.CONTEXT
    found = answer(capfd, "--gpu", card, path, status=1)
    assert all(
        one["peak_bytes"] + cards.CONTEXT <= card or one["what"].startswith("a card of")
        for one in found["would_fit"]
    )
    return {one["what"].partition("(")[0]: one for one in found["would_fit"]}, requests(path)


def test_only_what_fits_when_it_is_tried_is_advised(script, capfd):
    said, asked = advised(
        script,
        capfd,
        50 * MIB,
        eight_bits=60 * MIB,
        fused=49 * MIB,
        checkpoint=80 * MIB,
        offload_layers=10 * MIB,
    )
    assert set(said) == {"memopt.optim.AdamW", "memopt.auto_checkpoint", "a card of 7.63 GiB, as rtx4060"}
    assert said["memopt.optim.AdamW"]["peak_bytes"] == allocated() - 60 * MIB
    assert said["memopt.optim.AdamW"]["changes"] and not said["memopt.auto_checkpoint"]["changes"]
    tried = [name for one in asked for name in one["techniques"]]
    assert any(name.startswith("checkpoint:") for name in tried) and {"fused", "offload activations"} <= {
        *tried
    }


def test_where_no_change_can_be_enough_none_is_tried(script, capfd):
    row = {"name": "train.py:5", "bytes": 600 * MIB, "category": "parameters", "text": "model.cuda()"}
    early = {"bytes": allocated() - 49 * MIB, "lines": [row]}
    path = script(techniques={"eight bits": 900 * MIB}, early=early)
    card = allocated() - 50 * MIB + cards.CONTEXT
    found = answer(capfd, "--gpu", card, path, status=1)
    assert found["before_training"] == early and not any(one["techniques"] for one in requests(path))
    assert [one["what"] for one in found["would_fit"]] == ["a card of 7.63 GiB, as rtx4060"]
    assert main(["estimate", "--gpu", str(card), path]) == 1
    said = capfd.readouterr().out
    assert (
        "no change" in said
        and "before a module runs or an optimizer is made" in said
        and "model.cuda()" in said
    )
    found = answer(capfd, "--gpu", card + 2 * MIB, path, status=1)
    assert found["before_training"] is None and found["would_fit"][0]["what"].startswith(
        "memopt.optim.AdamW("
    )


@pytest.mark.parametrize(("eight", "four", "chosen"), [(40, 60, 4), (60, 70, 8)])
def test_four_bits_are_tried_where_eight_are_not_enough(script, capfd, eight, four, chosen):
    said, asked = advised(script, capfd, 50 * MIB, eight_bits=eight * MIB, four_bits=four * MIB)
    assert said["memopt.optim.AdamW"]["what"] == f"memopt.optim.AdamW(..., state_bits={chosen})"
    assert f"{chosen} bits" in said["memopt.optim.AdamW"]["changes"]
    assert any("four bits" in one["techniques"] for one in asked) == (chosen == 4)


def test_a_technique_that_takes_too_long_is_not_advised(script, capfd):
    path = script(techniques={"eight bits": 60 * MIB}, slow=["eight bits"])
    found = answer(capfd, "--gpu", allocated() - 50 * MIB + cards.CONTEXT, path, status=1)
    assert [one["what"].partition(" of")[0] for one in found["would_fit"]] == ["a card"]
    assert all(one["seconds"] < 600 for one in requests(path) if one["techniques"])


def test_the_largest_batch_is_searched_beside_the_advice(script, capfd):
    path = script(techniques={"eight bits": 60 * MIB})
    card = allocated() - 50 * MIB + cards.CONTEXT
    found = answer(capfd, "--max-batch", "--gpu", card, path, "--batch-size", 8, status=1)
    assert found["largest_batch"]["exact"] and found["would_fit"][0]["what"].startswith("memopt.optim.AdamW(")


def test_where_none_is_enough_alone_two_are_tried_together(script, capfd):
    said, asked = advised(script, capfd, 50 * MIB, eight_bits=30 * MIB, fused=20 * MIB, checkpoint=30 * MIB)
    (first,) = [one for what, one in said.items() if not what.startswith("a card")]
    assert first["what"].startswith("torch.optim.AdamW(..., fused=True) + memopt.auto_checkpoint(")
    assert first["peak_bytes"] == allocated() - 50 * MIB and "rounding" in first["changes"]
    assert all("offload activations" not in one["techniques"] for one in asked if len(one["techniques"]) > 1)


def test_an_allocator_that_would_do_is_named(script, capfd):
    """A formula of its own: here a card's memory is held to what the allocator keeps, by its oom."""
    found = answer(capfd, "--gpu", allocated() + cards.CONTEXT, script())
    assert found["verdict"] == "fits" and found["retries"] == 1
    assert [b["name"] for b in found["backends"]] == ["native", "expandable", "pool"]
    assert [b["reserved_bytes"] for b in found["backends"]] == [
        int(allocated() * kept) for kept in SCRIPT["kept"].values()
    ]
    assert all(b["completes"] for b in found["backends"])


def test_the_pool_is_not_run_on_a_device_without_limit(script, capfd):
    """Its granules are a share of the device: of 16 TiB a gigabyte each."""
    path = script()
    held = answer(capfd, path)["reserved_bytes"][1]
    memory = {one["backend"]: one["memory"] for one in requests(path)}
    assert memory["expandable"] == cards.NO_LIMIT
    assert held + cards.CONTEXT < memory["pool"] <= 2 * held + cards.CONTEXT
    answer(capfd, "--backend", "pool", "--quick", path)
    assert requests(path)[-1]["backend"] == "pool"
    assert held + cards.CONTEXT < requests(path)[-1]["memory"] <= 2 * held + cards.CONTEXT


def test_what_fits_because_the_allocator_gives_back_its_cache_fits_tightly(script, capfd, tmp_path):
    card, path = str(allocated() + cards.CONTEXT), script()
    assert main(["estimate", "--gpu", card, str(path)]) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[0].endswith("usable: fits tightly") and "reserved where there is room" in said
    assert main(["fit", "-o", str(tmp_path / "plan.json"), "--gpu", card, str(path)]) == 0
    assert capfd.readouterr().out.splitlines()[0].endswith(": fits tightly as it is")


def test_what_the_model_decides_is_a_range_and_may_be_unsure(script, capfd):
    path = script(masks=1000 * MIB)
    found = answer(capfd, path)
    assert found["allocated_bytes"] == [allocated(), allocated(masks=1000 * MIB)]
    assert found["guesses"][0]["where"] == "train.py:9"
    assert any("select 0%" in text for text in found["unknowns"])
    assert found["verdict"] is None
    found = answer(capfd, "--gpu", allocated() + 500 * MIB + cards.CONTEXT, path, status=1)
    assert found["verdict"] == "unsure" and found["oom"]["line"] == 7


def test_a_script_that_fails_where_none_is_selected_is_asked_with_few(script, capfd):
    found = answer(capfd, script(masks=640 * MIB, ends="raise where none is selected"))
    assert found["allocated_bytes"][0] == allocated() + 10 * MIB


def test_workspaces_of_cudnn_are_a_range(script, capfd):
    found = answer(capfd, script())
    assert found["reserved_bytes"] == [int(allocated() * 1.25), int(allocated() * 1.25) + 256 * MIB]
    assert found["allocated_bytes"] == [allocated()] * 2


def test_quick_is_one_run(script, capfd):
    path = script(masks=5 * MIB)
    found = answer(capfd, "--quick", "--gpu", "24GiB", path)
    assert found["runs"] == 1 == len(requests(path)) and found["backends"] == []


def test_the_largest_batch(script, capfd):
    path = script()
    found = answer(
        capfd, "--quick", "--max-batch", "--gpu", allocated(77) + cards.CONTEXT, path, "--batch-size", 8
    )
    assert found["largest_batch"]["size"] == 77
    path = script(option=None)
    found = answer(capfd, "--quick", "--max-batch", "--gpu", allocated(77) + cards.CONTEXT, path)
    assert found["largest_batch"]["size"] == 77 and "DataLoader" in found["largest_batch"]["option"]
    assert found["runs"] < 12


def test_data_that_are_used_up_end_the_search(script, capfd):
    found = answer(capfd, "--quick", "--max-batch", "--gpu", "24GiB", script(option=None, data=50, batch=1))
    assert found["largest_batch"]["bounded"] is False and found["largest_batch"]["size"] >= 50
    assert (
        main(["estimate", "--quick", "--max-batch", "--gpu", "24GiB", script(option=None, data=50, batch=1)])
        == 0
    )
    assert "takes no more memory" in capfd.readouterr().out


def test_the_smallest_card(script, capfd):
    found = answer(capfd, "--quick", "--smallest-card", script(fixed=9 * GIB))
    least = allocated(fixed=9 * GIB) + cards.CONTEXT
    assert least <= found["smallest_card"]["bytes"] <= least + found["smallest_card"]["within"]
    assert found["smallest_card"]["card"] == "rtx3080"


def test_settings_reach_the_child(script, capfd):
    path = script()
    answer(
        capfd, "--quick", "--gpu", "t4", "--steps", "7", "--context", "1GiB", "--backend", "pool", "--keep-files",
        "--seconds", "9", path,
    )  # fmt: skip
    (one,) = requests(path)
    assert (one["steps"], one["context"], one["backend"], one["protection"], one["seconds"]) == (
        7,
        GIB,
        "pool",
        "none",
        9,
    )
    assert (one["memory"], one["compute_capability"], one["multiprocessors"]) == (int(14.56 * GIB), "7.5", 40)
    answer(capfd, "--quick", "--steps", "all", path)
    assert requests(path)[-1]["steps"] is None


# ---- bad input --------------------------------------------------------------------------------------------------


def refused(capfd, *arguments):
    try:
        status = main(["estimate", *map(str, arguments)])
    except SystemExit as end:
        status = end.code
    assert status == 2
    said = capfd.readouterr()
    assert said.out == ""
    return said.err


def test_a_wrong_call_exits_with_2_and_runs_nothing(script, capfd, tmp_path):
    path = script()
    assert "SCRIPT is missing" in refused(capfd)
    assert "there is no script 'nothing.py'" in refused(capfd, "nothing.py")
    assert "is a folder" in refused(capfd, tmp_path)
    assert "did you mean rtx4090" in refused(capfd, "--gpu", "rtx4091", path)
    assert "name it with --gpu" in refused(capfd, "--max-batch", path)
    assert "is not a module's name" in refused(capfd, "-m", "a/b.py")
    assert "not a number of steps" in refused(capfd, "--steps", "-1", path)
    assert "not a number of seconds" in refused(capfd, "--seconds", "-1", path)
    assert "not an option" in refused(capfd, "--batch-option", "b c", path)
    assert "not a batch size" in refused(capfd, "--batch-option", "n", path, "--n", "many")
    assert not Path(path + ".requests").exists()


def test_a_script_that_fails_is_no_answer_but_what_was_seen_is_told(script, capfd):
    said = refused(capfd, script(ends="raise"))
    assert "train.py: it failed: ZeroDivisionError" in said and "until then: 640 MiB allocated" in said
    assert "it ended with status 3" in refused(capfd, script(ends="exit"))


def test_a_batch_option_that_the_script_does_not_have_is_said(script, capfd):
    path = script(option=None)
    said = refused(capfd, "--quick", "--max-batch", "--gpu", "24GiB", "--batch-option", "n", path)
    assert "unrecognized arguments: --n" in said
    path = script(option="--other")
    assert main(["estimate", "--quick", "--max-batch", "--gpu", "24GiB", "--batch-option", "n", path]) == 2
    said = capfd.readouterr()
    assert "memopt estimate: --max-batch: --n does not change what the script needs" in said.err
    assert "640 MiB allocated" in said.out, "what was found stays"


def test_without_a_dataloader_the_batch_is_not_searched(script, capfd):
    path = script(option=None, loaders=0)
    for gpu, words in (
        ("24GiB", "makes no DataLoader, so"),
        ("600MiB", "makes no DataLoader, or runs out"),
    ):
        assert main(["estimate", "--quick", "--max-batch", "--gpu", gpu, path]) == 2
        said = capfd.readouterr()
        assert words in said.err and "--batch-option" in said.err and said.out.startswith(f"{path} on ")
        assert "not even 1 fits" not in said.out
    assert sum(one["batch_size"] is not None for one in requests(path)) == 2, "one try each"


def test_a_child_that_dies_says_how(script, capfd):
    said = refused(capfd, "-q", script(ends="abort"))
    assert "was ended by SIGABRT" in said and "terminate called" in said
    assert "without an answer" in refused(capfd, script(ends="silent"))


def alive(pid):
    """Return whether it runs: one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_processes_that_a_script_leaves_end_with_it(script, capfd):
    path = script(ends="leave a process")
    answer(capfd, "--quick", path)
    left = int(Path(path + ".left").read_text())
    for _ in range(1000):
        if not alive(left):
            break
        time.sleep(0.01)
    assert not alive(left)


def test_a_child_that_does_not_keep_its_limit_is_ended(script, capfd, monkeypatch):
    monkeypatch.setattr(child_process, "_GRACE", 0.2)
    assert "did not end in its time" in refused(capfd, "--seconds", "0.2", script(ends="hang"))


def test_a_child_that_has_answered_and_does_not_leave_is_ended(script, capfd, monkeypatch):
    monkeypatch.setattr(child_process, "_LEAVING", 0.2)
    path = script(ends="hang at exit")
    assert answer(capfd, "--gpu", "24GiB", "--quick", path)["verdict"] == "fits"
    assert not Path(path + ".late").exists()


def test_leaving_ends_the_children_and_gives_their_runs_up(script):
    import threading

    path = script(ends="hang")
    with child_process.ScriptChildren(sys.executable) as children:
        failures = []

        def ask():
            try:
                children.run(Request([path], "", GIB))
            except Exception as failure:
                failures.append(type(failure))

        thread = threading.Thread(target=ask)
        thread.start()
        while not Path(path + ".requests").exists():
            time.sleep(0.01)
    thread.join(600)
    assert not thread.is_alive() and failures == [process.GivenUp]
    ask()  # after the block
    assert failures[1:] == [process.GivenUp]


def test_answers_of_another_form_are_refused():
    for told in (None, [], {}, {"peak_allocated": 1}):
        with pytest.raises(ValueError, match="peak_reserved"):
            Answer.from_json(told)
    assert Answer.from_json({"peak_allocated": 1, "peak_reserved": 2, "new": 3, "oom": None}).more == {
        "new": 3
    }
