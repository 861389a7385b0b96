"""Compare two recordings at their peaks: the differences by category, line and module; with -o FILE.html as a page with
both timelines. The files are those that `memopt report` reads."""

from __future__ import annotations

import argparse
import json
import sys

from memopt._cli import write

NAME = "diff"
HELP = "compare two recordings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="a recording, or a torch snapshot")
    parser.add_argument("after", metavar="B", help="the recording to compare it with")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    from memopt._memory.recording import recording_file, summary

    try:
        before, after = recording_file.load(options.before), recording_file.load(options.after)
    except ValueError as error:
        raise OSError(error) from error
    if options.output and options.output.lower().endswith((".html", ".htm")):
        from memopt._memory.html import report_page

        names = [options.before, options.after]
        try:
            report_page.write([before, after], options.output, title=" and ".join(names), names=names)
        except ValueError as error:
            raise OSError(f"{' and '.join(names)}: {error}") from error
        except ImportError as error:
            raise OSError(error) from error
        if not options.quiet:
            print(f"written: {options.output}", file=sys.stderr)
        return 0
    found = summary.compare(before, after)
    write(json.dumps(found.as_dict(), indent=2) if options.json else str(found), options.output)
    return 0
