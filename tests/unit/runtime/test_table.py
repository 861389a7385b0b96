"""Tables of results, as text and as HTML."""

from memopt._runtime.table import Code, Facts, Html, ResultTable


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


def test_facts_are_folded_at_the_terminals_width_and_source_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    facts = Facts("found", [("first", "word " * 20), ("", Code("x = 1 " * 20)), ("<last>", "end")])
    lines = str(facts).splitlines()
    assert lines[0] == "found" and lines[1].startswith("  first      word") and max(map(len, lines)) <= 40
    assert sum("x = 1" in line for line in lines) == 1 and lines[-1] == "  <last>     end"
    assert "<code>x = 1" in facts.html() and "&lt;last&gt;" in facts.html()
    monkeypatch.setenv("COLUMNS", "400")
    assert max(map(len, str(facts).splitlines())) <= 118


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
