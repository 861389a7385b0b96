"""memopt in sub-interpreters, one after the other and two at once, each ended; the main one goes on. CPython has had
them under several names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import memopt
from memopt import _C

USE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import memopt
from memopt import _C
assert _C.parse_size("8GiB") == 8 << 30
for wrong in ("nonsense", -1):
    try:
        _C.parse_size(wrong)
    except ValueError:
        pass
    else:
        raise AssertionError(wrong)
try:
    _C.allocator_prepare()
except memopt.Error as error:
    assert error.status == "MO_NO_LIBRARY"
else:
    raise AssertionError("prepared without torch")
"""


def interpreters():
    """(create, run, destroy) of this CPython."""
    if sys.version_info < (3, 13):
        import _xxsubinterpreters as module

        return lambda: module.create(isolated=False), module.run_string, module.destroy
    import _interpreters as module

    def run(which: int, code: str) -> None:
        failure = module.exec(which, code)
        if failure:
            raise RuntimeError(failure)

    # The extension does not ask for an interpreter lock of its own (Py_mod_multiple_interpreters came with 3.12).
    return lambda: module.create("legacy"), run, module.destroy


create, run, destroy = interpreters()
count = 0
for _ in range(3):
    which = create()
    run(which, USE)
    destroy(which)
    count += 1
both = [create(), create()]
for which in both:
    run(which, USE)
for which in both:
    destroy(which)
    count += 1
assert _C.parse_size("1KiB") == 1024
try:
    _C.allocator_prepare()
except memopt.Error:
    pass
print(f"{count} sub-interpreters")
