"""Tables of results, as text and as HTML."""

from memopt._runtime.table import Code, Facts, Html, ResultTable, folded_lines, with_command


def test_columns_are_aligned_and_cells_are_no_markup():
    table = ResultTable([("a<b", "1", "says"), ("c", "23", "")], ("", "n", "note"), left=(0, 2))
    assert table.lines() == ["        n  note", "  a<b   1  says", "  c    23"]
    assert ResultTable([]).lines() == []
    page = table.html()
    assert page.count("<tr>") == 3 and "a&lt;b" in page and "<td>23</td>" in page and "left'>says<" in page
    assert (
        "<thead>" not in ResultTable([("x",)]).html()
        and "<b>x</b>" in ResultTable([(Html("<b>x</b>"),)]).html()
    )


def test_facts_are_folded_at_the_terminals_width_and_source_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    source = "x  =  1 " * 20
    facts = Facts("found " * 9, [("first", "word " * 20), ("", Code(source)), ("<last>", "end")])
    lines = str(facts).splitlines()
    assert lines[1].startswith("  found") and lines[2].startswith("  first      word")
    assert lines[-2] == " " * 13 + source and lines[-1] == "  <last>     end"
    assert max(len(line) for line in lines if line != lines[-2]) <= 40
    assert "<code>x  =" in facts.html() and "&lt;last&gt;" in facts.html()
    monkeypatch.setenv("COLUMNS", "400")
    assert str(Facts("found " * 30, [])) == "found " * 30  # no narrow terminal: programs may look for it
    assert 100 < max(len(line) for line in str(facts).splitlines() if source not in line) <= 118


def test_lines_are_cut_behind_the_columns_that_stay_whole():
    rows = [("1 MiB", "a/long/path.py:7", "activations", "y = f(x)"), ("9 B", "b.py:1", "inputs", "")]
    table = ResultTable(rows, left=(1, 2, 3))
    first, second = "1 MiB  a/long/path.py:7", "  9 B  b.py:1"
    assert table.lines("", width=80, whole=2) == table.lines("")
    assert table.lines("", width=40, whole=2) == [f"{first}  activations  y…", f"{second}            inputs"]
    assert table.lines("", width=37, whole=2)[0] == f"{first}  activations"  # the end of a cell: no "…"
    assert table.lines("", width=30, whole=2) == [f"{first}  acti…", f"{second}            inpu…"]
    assert table.lines("", width=9, whole=2) == [first, second]


def test_a_command_is_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    told = "the changes of this: `memopt fit --gpu 24GiB train.py` finds them"
    assert "  `memopt fit --gpu 24GiB train.py`" in folded_lines(told, 30, further="  ")
    command = "python -m memopt report out.mopt"
    assert with_command("recorded", command, 60) == [f"  recorded: {command}"]
    assert with_command("recorded", command, 30) == ["  recorded:", f"    {command}"]


def test_a_wide_last_column_is_folded_and_rows_are_sentences_where_it_has_no_room():
    table = ResultTable(
        [("fits", "1 MiB", "one two three four five six seven")], ("is", "peak", "plan"), (0, 2)
    )
    assert table.lines("", width=46) == table.lines("") and ResultTable([]).lines(width=9) == []
    assert table.lines("", width=40)[1:] == [
        "fits  1 MiB  one two three four five six",
        "             seven",
    ]
    assert table.lines("", width=30) == ["fits; peak 1 MiB; plan one two three four five six seven"]
    short = ResultTable([("fits", "1 MiB", "one")], ("is", "peak", "plan"), (0, 2))
    assert short.lines("", width=20) == short.lines("")


def test_text_is_folded_at_spaces_alone_so_that_paths_can_be_pasted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "/home/someone/pytest-of-root/a-folder-with-hyphens/train.py:7"
    assert path in str(Facts("found", [("ends", f"out of memory at {path} (loss.backward())")]))
    assert path in "".join(ResultTable([("at", path)]).lines("", width=40))
