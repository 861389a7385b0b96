"""Show a recording: a .mopt file of `memopt run` or memopt.profile(), or a snapshot of
torch.cuda.memory._dump_snapshot(), of which nothing is executed. By default it becomes one page of HTML beside FILE,
which needs no network; with -o, the format follows the name: .html, .mopt, .pickle (memory_viz), .trace.json
(Perfetto), .json. FILE may be the folder of a job's ranks under `memopt run`: the report then covers all of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memopt._cli import check_writable, write

NAME = "report"
HELP = "show a recording as a page, or in other formats"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording, or a torch snapshot")
    parser.add_argument("--title", metavar="TEXT", help="title of the page (the recorded command)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, instead of a page")
    parser.add_argument("--text", action="store_true", help="print one screen of text, instead of a page")


def run(options: argparse.Namespace) -> int:
    if Path(options.file).is_dir():
        return _of_ranks(options)
    from memopt._memory.recording import leaks, recording_file, session, summary

    try:
        recordings = recording_file.load_all(options.file)
    except ValueError as error:
        raise OSError(error) from error
    recordings.sort(key=lambda recording: -recording.peak()[0])
    found = [leak for leak, _ in leaks.find(recordings[0])]
    if options.json:
        write(json.dumps(summary.as_dict(recordings[0], found, advice=True), indent=2), options.output)
        return 0
    if options.text:
        texts = [summary.text(recordings[0], found, advice=True), *map(summary.text, recordings[1:])]
        write("\n".join(texts), options.output)
        return 0
    path = Path(options.output or Path(options.file).with_suffix(".html").name)
    check_writable(path, options.force)
    try:
        session.write(recordings, path, leaks=found, title=options.title)
    except ValueError as error:
        raise OSError(f"{options.file}: {error}") from error
    except ImportError as error:
        raise OSError(error) from error
    if not options.quiet:
        print(f"written: {path}", file=sys.stderr)
    return 0


def _of_ranks(options: argparse.Namespace) -> int:
    from memopt._run import merged_report

    try:
        if options.json:
            write(json.dumps(merged_report.as_dict(options.file), indent=2), options.output)
        elif options.text:
            write(merged_report.text(options.file), options.output)
        else:
            path = Path(options.output or Path(options.file) / "report.html")
            check_writable(path, options.force or options.output is None)
            merged_report.write_page(options.file, path)
            if not options.quiet:
                print(f"written: {path}", file=sys.stderr)
    except (ValueError, ImportError) as error:
        raise OSError(error) from error
    return 0
