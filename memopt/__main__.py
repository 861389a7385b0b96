# PYTHON_ARGCOMPLETE_OK
"""python -m memopt COMMAND: one file a command, in memopt/_cli."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import Any

import memopt
from memopt._cli import check_writable, demo, diff, doctor, estimate, fit, gpu_check, replay, report, run
from memopt._runtime import log, torch_version

COMMANDS = [demo, run, estimate, fit, report, diff, replay, doctor, gpu_check]


def add_loudness(to: argparse.ArgumentParser, **default: Any) -> None:
    to.add_argument("-v", "--verbose", action="count", help="print more messages (twice: all)", **default)
    to.add_argument("-q", "--quiet", action="store_true", help="print errors only", **default)


def in_words(argv: list[str]) -> list[str]:
    """Translate `memopt help`, `memopt help COMMAND` and `memopt version` into options."""
    if argv[:1] == ["help"]:
        return [*argv[1:2], "--help"]
    return ["--version"] if argv == ["version"] else argv


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="memopt",
        description="Train bigger models in the memory you have.",
        epilog="exit codes: 0 success; 1 success, but the answer is no; 2 invalid call; 130 interrupted",
    )
    top.add_argument("--version", action="version", version=f"memopt {memopt.__version__}")
    add_loudness(top)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        sub = commands.add_parser(module.NAME, help=module.HELP, description=module.__doc__)
        add_loudness(sub, default=argparse.SUPPRESS)  # what stands before COMMAND stays
        sub.add_argument(
            "-o", "--output", metavar="FILE", help="write the answer to FILE instead of the screen"
        )
        sub.add_argument("-f", "--force", action="store_true", help="overwrite FILE if it exists")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: list[str] | None = None) -> int:
    top = parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        import argcomplete  # type: ignore[import-not-found]

        argcomplete.autocomplete(top)
    options = top.parse_args(in_words(sys.argv[1:] if argv is None else argv))
    if options.quiet:
        log.show(logging.ERROR)
    elif options.verbose:
        log.show(logging.INFO if options.verbose == 1 else logging.DEBUG)
    try:
        if options.output and not (options.command == run.NAME and run.is_one_of_several()):
            check_writable(options.output, options.force)
        status = options.run(options)
        sys.stdout.flush()
        return int(status)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # work under way ends by itself
        print(f"memopt {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ImportError as error:
        if error.name != "torch" and not torch_version.is_of_torch(error):
            raise
        feature = f"memopt {options.command}"
        if isinstance(error, ModuleNotFoundError):
            print(torch_version.missing(feature), file=sys.stderr)
        elif error.name == "torch":
            print(error, file=sys.stderr)
        else:
            print(f"{feature} needs PyTorch, which cannot be loaded: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"memopt {options.command}: {said}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
