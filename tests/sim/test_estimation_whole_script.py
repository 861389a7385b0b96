"""An estimate of a script comes to the script's end: its loops are shortened, and what is after them is seen."""

import textwrap
from pathlib import Path

import pytest
from estimation_children import estimate

SIM = None
MIB = 1 << 20
pytestmark = pytest.mark.sampled(4)

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        for n, (x,) in enumerate(loader):
            model(x.cuda()).mean(1).cpu()
    print("evaluated", n + 1, "batches, the last of", len(x))

if __name__ == "__main__":
    workers, epochs = int(sys.argv[1]), int(sys.argv[2])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    train = DataLoader(TensorDataset(torch.randn(640, 64)), 32, shuffle=True, num_workers=workers)
    test = DataLoader(TensorDataset(torch.randn(64 * 64 + 5, 64)), 64)
    for epoch in range(epochs):
        model.train()
        for step, (x,) in enumerate(train):
            model(x.cuda()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("epoch", epoch, "has", step + 1, "steps")
        evaluate(model, test)
        if (epoch + 1) % 7 == 0:
            print("saved after", epoch + 1)
    del x
    torch.save(model.state_dict(), "model.pt")
    model(torch.randn(4096, 64, device="cuda"))
    print("end")
"""
START = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())

def train_step():
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()

"""


def script(body: str) -> str:
    return START + textwrap.dedent(body)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_and_evaluation_are_shortened_and_the_script_comes_to_its_end(tmp_path, workers):
    found = estimate(tmp_path, TRAIN, str(workers), "12", steps=3)
    printed = found["printed"].splitlines()
    assert (found["stopped"], found["exit_status"], printed[-1]) == ("end", 0, "end")
    ran = [line for line in printed if line.startswith("epoch")]
    assert ran[:3] == ["epoch 0 has 3 steps", "epoch 1 has 2 steps", "epoch 2 has 1 steps"]
    assert len(ran) == 10 and ran[-1] == "epoch 11 has 1 steps" and found["steps"] == 3 + 2 + 8
    # A loader that evaluates gives its first batches and its last one, which is smaller.
    assert printed.count("evaluated 5 batches, the last of 5") == 10
    # By itself after the seventh, and in the last iteration of the loop.
    assert [line for line in printed if line.startswith("saved")] == ["saved after 7", "saved after 12"]
    assert found["covered"][1].endswith("in the last iteration: train.py:28 (every 7)")
    assert found["files_not_kept"] == [str(tmp_path / "model.pt")]
    assert "the script ran to its end" in found["covered"][0]


def test_a_peak_after_the_training_is_that_of_the_whole_script_computed(tmp_path):
    small, computed = (
        estimate(tmp_path, TRAIN, "0", "3", steps=steps, compute=steps is None) for steps in (3, None)
    )
    assert computed["steps"] == 60 and small["steps"] == 6
    assert small["peak_allocated"] == computed["peak_allocated"] > 5 * MIB
    assert small["peak_reserved"] == computed["peak_reserved"]
    assert computed["covered"] == ["60 steps: the whole script"] and computed["shortened"] == []


LOOPS = {
    "range": (4, "for n in range(9999):\n    step()"),
    "while": (3, "while count() < 9999:\n    step()"),
    "while true": (3, "while True:\n    step()\n    if count() == 9999:\n        break"),
    "progress bar": (
        4,
        "bar = Bar()\nfor n in bar:\n    step()\nprint('shown', *shown, '; again', sum(1 for n in bar))",
    ),
    "epochs": (4 + 3 + 7 + 2, "for epoch in range(999):\n    for n in range(999):\n        step()"),
    "accumulated": (4, "for n in range(999):\n    for part in range(6):\n        backward()\n    step()"),
    "parts": (
        4,
        "for n in range(999):\n    for part in (0, 1):\n        backward()\n        if part:\n            step()",
    ),
    "periodic": (4, "for n in range(1, 9999):\n    step()\n    if n % 500 == 0:\n        print('due')"),
    "too short": (4, "for n in range(1, 9):\n    step()\n    if n % 9 == 0:\n        print('due')"),
    "skipping": (4, "for n in range(1, 9999):\n    step()\n    if n % 9:\n        continue\n    backward()"),
    "a loader without end": (11, "batches = cycle()\nwhile count() < 9999:\n    next(batches)\n    step()"),
    # Until the other one has stepped twice, and one in which it is its turn.
    "two optimizers": (9, "for n in range(1, 9999):\n    step()\n    if n % 4 == 0:\n        other.step()"),
    # No training loops, or short ones: these are left as they are.
    "over optimizers": (
        0,
        "for n in range(4):\n    for one in (other, another):\n        one.step(); print('each')",
    ),
    "an evaluation": (
        0,
        "with torch.no_grad():\n    for n in range(50):\n        model(x); print('forward')",
    ),
    "by next()": (
        3,
        "batches = iter(loader)\nfor n in range(3):\n"
        "    for part in range(5):\n        next(batches)\n        backward()\n    step()",
    ),
}
OPTIMIZER = "torch.optim.SGD(model.parameters(), momentum=0.9)"
EACH = """
def {name}():
    shown = []
    class Bar:
        def __init__(self):
            self.iterable = range(0, 9999, 2)
        def __iter__(self):
            for n in self.iterable:
                yield shown.append(n)
    model, x = torch.nn.Linear(8, 8).cuda(), torch.zeros(4, 8, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    other, another = ({others})
    loader = torch.utils.data.DataLoader(range(64), 4)
    taken = []
    count = lambda: len(taken)
    def cycle():
        while True:
            for batch in loader:
                yield batch
    def backward():
        model(x).sum().backward()
    def step():
        backward(); optimizer.step(); taken.append(1)
{body}
    print("{name}", len(taken))
"""


def test_loops_that_take_steps_end_after_a_few_and_no_others_do(tmp_path):
    """All in one process, each with a model and optimizers of its own."""
    functions = {name: f"loop_{n}" for n, name in enumerate(LOOPS)}
    source = "import torch\n"
    for name, (_, body) in LOOPS.items():
        # Made only where they step: an optimizer that has not is waited for.
        made = [OPTIMIZER] * 2 if "another" in body else [OPTIMIZER, "0"] if "other" in body else ["0", "0"]
        body = textwrap.indent(body, "    ")
        source += EACH.format(name=functions[name], body=body, others=", ".join(made))
    source += "".join(f"{name}()\n" for name in functions.values())
    source += "torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
    found = estimate(tmp_path, source, steps=3)
    printed = found["printed"].splitlines()
    assert found["stopped"] == "end", found["complained"]
    expected = {functions[name]: steps for name, (steps, _) in LOOPS.items()}
    said = dict(line.split() for line in printed if line.startswith("loop_"))
    assert {name: int(steps) for name, steps in said.items()} == expected
    assert "shown 0 2 4 9998 ; again 5000" in printed
    assert (printed.count("due"), printed.count("each"), printed.count("forward")) == (1, 8, 4)
    assert found["peak_allocated"] > 64 * MIB


def test_backward_passes_are_steps_where_there_is_no_optimizer(tmp_path):
    body = "del optimizer\nfor n in range(999):\n    model(torch.zeros(1, 8).cuda()).sum().backward()\nprint(n + 1)\n"
    found = estimate(tmp_path, script(body), steps=3)
    assert found["printed"] == "999\n"
    assert found["steps"] == 0 and found["trained"] and found["covered"][0].startswith("4 backward passes")


def test_a_loop_that_cannot_be_ended_ends_the_script_which_is_told(tmp_path):
    body = "def for_ever():\n    while True:\n        yield train_step()\nlist(for_ever())\nprint('after')\n"
    found = estimate(tmp_path, script(body), steps=3)
    assert (found["stopped"], found["printed"]) == ("steps", "")
    assert "what follows was not seen" in found["covered"][0] and "train_step" in found["covered"][0]


def test_a_script_that_takes_too_long_is_told_where_it_was(tmp_path):
    source = "import time\ndef test():\n    while True:\n        time.sleep(0.01)\ntest()\n"
    found = estimate(tmp_path, source, steps=3, seconds=0.5)
    assert found["stopped"] == "seconds" and "time limit at train.py:" in found["covered"][0]
    assert "(test)" in found["covered"][0]


UNEQUAL = """
import sys
import torch
from torch.utils.data import DataLoader

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.zeros(5000 if index == 260 else 100 + index % 60)

def collate(texts):
    if "slowly" in sys.argv:
        import time; time.sleep(0.5)
    texts = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"of": texts.numpy() if "arrays" in sys.argv else texts}

model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Texts(), 4, collate_fn=collate, num_workers=2, multiprocessing_context="fork")
for epoch in range(2):
    for batch in loader:
        model(torch.as_tensor(batch["of"]).cuda()[..., None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    for batch in loader:
        model(torch.as_tensor(batch["of"]).cuda()[..., None]).mean()
"""


@pytest.mark.parametrize("how", ["", "evaluation alone", "arrays", "slowly"])
def test_of_batches_that_differ_in_size_the_largest_is_seen(tmp_path, how):
    source = (
        UNEQUAL
        if how != "evaluation alone"
        else UNEQUAL.replace("loader:\n        model", "[next(iter(loader))]:\n        model", 1)
    )
    found = estimate(tmp_path, source, *how.split(), steps=3)
    if how == "slowly":
        assert "as read in 5 s" in found["covered"][1] and "of 100," in found["covered"][1]
        return
    computed = estimate(tmp_path, source, *how.split(), steps=None, compute=True)
    assert found["peak_allocated"] == computed["peak_allocated"]
    assert "the last one run is the largest of 100" in found["covered"][1]


GATHERED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(64, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(64, 64).cuda()).sum().backward()
optimizer.step()
gathered = []
with torch.no_grad():
    for (x,) in DataLoader(TensorDataset(torch.randn(64 * 40, 64)), 64):
        gathered.append(model(x.cuda()))  # 1 MiB
        SLOWLY
print(len(gathered), "batches")
"""


@pytest.mark.parametrize("slowly", ["", "import time; time.sleep(1)"])
def test_what_an_evaluation_keeps_of_each_batch_is_counted_over_all(tmp_path, slowly):
    found = estimate(tmp_path, GATHERED.replace("SLOWLY", slowly), steps=3)
    assert 56 * MIB < found["peak_allocated"] < 60 * MIB  # with 17 of cuBLAS's workspaces
    assert found["printed"] == ("5 batches\n" if slowly else "40 batches\n")
    assert "keeps 1.00 MiB a batch: 40.0 MiB over all 40 batches" in found["covered"][1]
    tight = estimate(tmp_path, GATHERED.replace("SLOWLY", slowly), steps=3, memory=50 * MIB)
    assert tight["covered"][0] == "1 step before it ran out of memory"
    assert tight["oom"]["line"] == (11 if slowly else 12)


@pytest.mark.parametrize("kept, grows", [("n", False), ("torch.ones(1 << 18, device='cuda')", True)])
def test_what_each_iteration_of_a_training_keeps_is_told(tmp_path, kept, grows):
    body = f"kept = []\nfor n in range(30):\n    train_step()\n    kept.append({kept})\n"
    found = estimate(tmp_path, START + body, steps=3)
    assert found["printed"] == "" and found["steps"] < 30
    told = (
        "memory grows with each iteration, and only the iterations that ran are counted: train.py:11 1.00 MiB"
    )
    assert found["covered"][1:] == ([told] if grows else [])


RUNS_OUT = {  # where, and whether that is said to be an evaluation
    "evaluation": (True, "train_step()\nmodel.eval()\nwith torch.no_grad():\n    model(x)"),
    "sampling": (True, "train_step()\nwith torch.inference_mode():\n    x + 1"),
    "training": (False, "train_step()\nmodel(x)"),
    "before training": (False, "with torch.no_grad():\n    model(x)"),
    "backward": (False, "train_step()\nLarge.apply(model(x[:4])).sum().backward()"),
    "step": (False, "train_step()\noptimizer.param_groups[0]['params'].append(large)\noptimizer.step()"),
    "checkpoint": (False, "train_step()\ncheckpoint(model, x.requires_grad_(), use_reentrant=True)"),
}
LARGE = """
from torch.utils.checkpoint import checkpoint
x = torch.randn(1 << 20, 8, device="cuda")
large = torch.zeros(1 << 23, device="cuda", requires_grad=True)
large.grad = large.detach()

class Large(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(1 << 25, device="cuda")
        return gradient

"""


@pytest.mark.parametrize("where", RUNS_OUT)
def test_running_out_in_an_evaluation_after_training_is_told_apart(tmp_path, where):
    evaluates, body = RUNS_OUT[where]
    found = estimate(tmp_path, START + LARGE + body + "\n", steps=3, memory=104 * MIB)
    assert found["oom"]["evaluates"] is evaluates


def test_a_batch_that_is_larger_than_the_one_before_is_not_kept(tmp_path):
    body = """\
        train_step()
        with torch.no_grad():
            for rows in torch.utils.data.DataLoader(range(1000, 2000)):
                out = model(torch.randn(int(rows), 8, device="cuda"))
        print("rows", int(rows))
        """
    found = estimate(tmp_path, script(body), steps=3)
    assert found["printed"] == "rows 1999\n" and len(found["covered"]) == 1


EVALUATES = {  # by the sizes of 60 rounds: how many of these are run, and whether the last is among them
    "alike": (7, "4"),
    "a first one that is larger": (7, "64 if n == 0 else 4"),
    "growing": (60, "4 + n"),
    "by turns": (60, "4 + n % 2"),
}


@pytest.mark.parametrize("what", EVALUATES)
def test_rounds_of_an_evaluation_that_take_the_same_are_shortened(tmp_path, what):
    """Over a range, without gradients; the last number comes last, and what the rounds keep is counted."""
    most, size = EVALUATES[what]
    body = f"""
    train_step()
    with torch.no_grad():
        ran = [n for n in range(60)]  # calls nothing
        ran.clear()
        for n in range(60):
            model(torch.randn({size}, 8, device="cuda")).sum().item()
            ran.append(n)
    train_step()
    print(len(ran), ran[-1], len(range(60)))
    kept = []
    with torch.no_grad():
        for n in range(60):
            kept.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    """
    found = estimate(tmp_path, script(body), steps=3)
    count, last, _ = map(int, found["printed"].split())
    assert last == 59 and (count == 60 if most == 60 else count <= most), found["printed"]
    assert found["peak_allocated"] >= 60 * MIB
    assert found["shortened"] == (["batches"] if most < 60 else [])


def test_what_is_imported_is_shortened_and_its_bytecode_stays_the_scripts(tmp_path):
    (tmp_path / "engine.py").write_text(
        "def fit(step):\n    taken = 0\n    while taken < 1000:\n        step()\n        taken += 1\n    return taken\n"
    )
    for how in (3, None):
        found = estimate(
            tmp_path, script("import engine\nprint(engine.fit(train_step), 'steps')\n"), steps=how
        )
        assert found["printed"] == ("3 steps\n" if how else "1000 steps\n")
    assert not list(Path(tmp_path).glob("__pycache__/*"))


def test_a_compiler_reads_loops_as_they_are(tmp_path):
    body = """\
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        def several(x):
            n = 0
            for layer in [model] * 3:
                x = layer(x)
            while n < 2:
                n += 1
                x = layer(x)
            return x
        torch.compile(several, backend=backend, fullgraph=True)(torch.randn(4, 8, device="cuda"))
        calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
        print(len(graphs), len(calls))
        """
    assert estimate(tmp_path, script(body), steps=3)["printed"] == "1 5\n"


def test_a_missing_triton_is_told_with_its_remedy(tmp_path):
    body = """\
        from torch._inductor.exc import TritonMissing
        try:
            raise TritonMissing(None)
        except Exception as error:
            raise RuntimeError("backend failed") from error
        """
    found = estimate(tmp_path, script(body))
    assert (
        found["error"].startswith("RuntimeError: backend failed\n") and "pip install triton" in found["error"]
    )
