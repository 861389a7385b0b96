"""In a Python without torch: each public name, help() and what can be called without an argument. Says "ok"."""

from __future__ import annotations

import importlib
import pydoc
import sys

import memopt

REMEDY = "needs PyTorch, which is not installed: pip install 'torch>=2.10'"


def refusal(call) -> str:
    """The message about torch, or nothing; any other exception passes."""
    try:
        call()
    except ModuleNotFoundError as error:
        assert error.name == "torch" and "\n" not in str(error), error
        assert error.__context__ is None or error.__suppress_context__, error.__context__
        assert REMEDY in str(error), error
        return str(error)
    return ""


refused = {name: refusal(lambda: getattr(memopt, name)) for name in memopt.__all__}  # noqa: B023
for name, said in refused.items():
    assert said in ("", f"memopt.{name} {REMEDY}"), said
    assert (name in dir(memopt)) == (not said), name
assert refused["backward"] and refused["find_batch_size"] and not refused["chain"]

there = {name: getattr(memopt, name) for name, said in refused.items() if not said}
modules = [name for name, value in there.items() if type(value) is type(sys)]
assert {"amp", "batch_sizes", "compress", "data", "deploy", "optim"} <= set(modules)
for module in modules:
    package = importlib.import_module(f"memopt.{module}")
    for name in package.__all__:
        said = refusal(lambda: getattr(package, name))  # noqa: B023
        assert said in ("", f"memopt.{module}.{name} {REMEDY}"), said
    assert package.__name__ in pydoc.render_doc(package)
assert refusal(lambda: memopt.amp.clip_grad_norm_) and not refusal(lambda: memopt.data.SharedList([1, 2]))

text = pydoc.render_doc(memopt)
assert "train bigger models" in text and "doctor" in text

for call, asks in (
    (memopt.enable, True),
    (memopt.patch, True),
    (lambda: memopt.estimate(None, None), True),
    (lambda: memopt.load_ipython_extension(None), True),
    (memopt.cuda.allocator, True),
    (lambda: memopt.cuda.CudaPool("1MiB"), True),
    (lambda: memopt.cuda.memory_stats("cuda:0"), True),
    (memopt.cuda.record_trace, True),
    (memopt.cuda.memory_stats, False),
    (memopt.doctor, False),
    (memopt.disable, False),
):
    assert bool(refusal(call)) == asks, call
assert "torch" not in sys.modules
print("ok")
