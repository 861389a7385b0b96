"""In an environment without torch: what an import of memopt loads, and what a feature that needs torch says. The last
line printed is memopt's version."""

import sys
import time

start = time.perf_counter()
import memopt  # noqa: E402

took = time.perf_counter() - start

heavy = {"torch", "numpy", "ctypes", "argparse", "subprocess", "asyncio", "dataclasses", "inspect"} & set(
    sys.modules
)
assert not heavy, f"import memopt loads {heavy}"
assert "site-packages" in memopt.__file__, memopt.__file__

from memopt import _C  # noqa: E402

assert _C.parse_size("8GiB") == 8 << 30
assert _C.build["level"] == 0, "a wheel has no assertions"

for feature in (memopt.cuda.allocator,):
    try:
        feature()
    except ImportError as error:
        assert "pip install 'torch>=2.10'" in str(error), error
    else:
        raise AssertionError(f"{feature} works without torch")

try:
    _C.allocator_prepare()
except memopt.Error as error:
    assert error.status == "MO_NO_LIBRARY" and "import torch first" in str(error)
else:
    raise AssertionError("allocator_prepare() works without torch")

try:
    memopt.sim.activate()
except Exception as error:
    assert "torch" in str(error).lower(), error
else:
    raise AssertionError("memopt.sim.activate() works without torch")

assert "torch" not in sys.modules
print(f"import memopt: {took * 1000:.1f} ms")
print(memopt.__version__)
