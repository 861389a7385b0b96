"""The settings of memopt.cuda.allocator(), given once a process."""

SIM = None

START = """
import memopt.sim
memopt.sim.activate(memory="256MiB")
import torch, memopt
MIB = 1 << 20
def refused(kind, words, **settings):
    try:
        memopt.cuda.allocator(**settings)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{settings} were taken")
def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
"""


def run(run_script, source: str) -> None:
    done = run_script(START + source)
    assert (done.returncode, done.stderr) == (0, "")


def test_settings_that_make_no_sense_are_refused_and_leave_the_choice(run_script):
    run(
        run_script,
        """
refused(ValueError, "memory_budget=0", memory_budget=0)
refused(ValueError, "lots", memory_budget="lots")
refused(ValueError, "slack", slack=-0.01)
refused(ValueError, "slack", slack=float("nan"))
words = "preallocate (2.00 GiB) is more than memory_budget (1.00 GiB)"
refused(ValueError, words, memory_budget="1GiB", preallocate="2GiB")
first = memopt.cuda.allocator(memory_budget="64MiB", slack=0.05)
assert memopt.cuda.allocator() is first
assert memopt.cuda.allocator(memory_budget=64 * MIB, slack=0.05, recall=True) is first
refused(ValueError, "slack=0.05 and cannot change to 0.02", slack=0.02)
refused(ValueError, "memory_budget", memory_budget="65MiB")
assert not memopt._C.allocator_is_current()
""",
    )


def test_a_budget_is_what_is_held_at_most_and_a_fraction_may_lower_it(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(memory_budget="64MiB"))
assert not memopt._C.allocator_is_current()
assert block(60 * MIB).numel() == 60 * MIB
assert memopt._C.allocator_is_current()
def out_of_memory(size):
    try:
        block(size)
    except torch.OutOfMemoryError as error:
        return str(error)
    raise AssertionError(size)
assert "64.00 MiB allowed" in out_of_memory(70 * MIB)
assert memopt.sim.stats()["bytes_peak"] <= 64 * MIB
torch.cuda.set_per_process_memory_fraction(0.5)
assert "64.00 MiB allowed" in out_of_memory(70 * MIB)
torch.cuda.set_per_process_memory_fraction(0.125)
torch.cuda.empty_cache()  # what is held already may be used up
assert "32.00 MiB allowed" in out_of_memory(40 * MIB)
torch.cuda.set_per_process_memory_fraction(1.0)
assert "64.00 MiB allowed" in out_of_memory(70 * MIB)
""",
    )


def test_what_is_preallocated_is_held_from_the_first_use_on(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(preallocate="100MiB"))
assert memopt.sim.stats()["bytes"] == 0
x = block(1000)
assert memopt.sim.stats()["bytes"] == 100 * MIB
created = memopt.sim.calls("cuMemCreate")
for i in range(5):
    y = [block(18 * MIB) for _ in range(5)]
    del y
assert memopt.sim.calls("cuMemCreate") == created
torch.cuda.empty_cache()
assert memopt.sim.stats()["bytes"] == 100 * MIB
""",
    )


def test_a_preallocation_that_does_not_fit_is_an_out_of_memory(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(preallocate="1GiB"))
for _ in range(2):
    try:
        block(1000)
    except torch.OutOfMemoryError as error:
        assert str(error).startswith("CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has"), error
    else:
        raise AssertionError("it fitted")
""",
    )
