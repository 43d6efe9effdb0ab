"""Tables state what was measured, byte for byte the same, and their LaTeX compiles whatever a run is called."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from experiments import files
from experiments.analysis.statistics import summarize
from experiments.analysis.tables import Cell, Column, Table, bold, check_latex, escape_latex

HARD_NAMES = [
    *("gpt2_small", "lr=1e-3 & wd", "100%", "a#b", "x^2", "C:\\t", "C:\t", "$5", "{x}", "~", "a ± b", "a — b", "−3"),
    *("[b]", "*", "--lr", "a|b", "<x>", "naïve", "λ ≤ 2", "\\", "\\\\", "%\\%", "a\nb", "two “quotes”", "[red]x[/red]"),
]
FIVE = {seed: 350.0 + seed for seed in range(5)}


def table(*cells: Cell, **options: str) -> Table:
    column = Column("test_ppl", "Test perplexity", options.get("format", ".1f"))
    rows = [{"arm": f"arm {index}", "test_ppl": cell} for index, cell in enumerate(cells)]
    return Table([Column("arm", "Arm"), column], rows, caption=options.get("caption", "Perplexity"))


def printed(one: Table, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    one.print_terminal(console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def body(text: str, cell_of: str) -> str:
    return next(line for line in text.splitlines() if cell_of in line)


def test_one_seed_is_printed_without_a_spread() -> None:
    one = table(summarize({0: 352.8}))
    for text in (one.to_markdown(), one.to_latex(), printed(one)):
        row = body(text, "arm 0")
        assert "352.8" in row
        assert "±" not in row
        assert r"\pm" not in row
        assert "nan" not in text
    assert "n = 1" in one.to_markdown()
    assert "352.0 ± 1.6" in table(summarize(FIVE)).to_markdown()
    assert r"$352.0 \pm 1.6$" in table(summarize(FIVE)).to_latex()


def test_the_spread_and_the_number_of_seeds_are_named() -> None:
    for text in (
        table(summarize(FIVE)).to_markdown(),
        table(summarize(FIVE)).to_latex(),
        printed(table(summarize(FIVE))),
    ):
        assert "standard deviation over seeds (ddof = 1)" in text
        assert "n = 5" in text


def test_missing_seeds_are_counted_in_the_cell() -> None:
    lost = summarize({**FIVE, 3: None, 4: float("nan")})
    one = table(summarize(FIVE), lost)
    assert "(n=" not in body(one.to_markdown(), "arm 0")
    assert "351.0 ± 1.0 (n=3/5)" in one.to_markdown()
    assert r"$351.0 \pm 1.0$ ($n=3/5$)" in one.to_latex()
    assert "351.0 ± 1.0 (n=3/5)" in printed(one)


def test_no_seed_prints_a_dash_and_is_empty_in_csv() -> None:
    one = table(summarize(FIVE), summarize(dict.fromkeys(range(5))), None, float("nan"))
    assert "| — (n=0/5) |" in one.to_markdown()
    assert "--- ($n=0/5$)" in one.to_latex()
    assert one.to_csv().splitlines() == [
        "arm,test_ppl,test_ppl_std,test_ppl_n,test_ppl_seeds",
        "arm 0,352,1.58114,5,5",
        "arm 1,,,0,5",
        "arm 2,,,,",
        "arm 3,,,,",
    ]
    assert "nan" not in one.to_markdown() + one.to_latex() + printed(one)


def test_lower_is_better_stands_in_the_header_where_asked() -> None:
    one = Table([Column("a", "Perplexity", lower_is_better=True), Column("b", "Score")], [{"a": 1.0, "b": 2.0}])
    for text in (one.to_markdown(), one.to_latex(), printed(one)):
        assert "Perplexity (lower is better)" in text
        assert text.count("lower is better") == 1


def test_only_what_the_caller_marks_is_bold_and_ties_share_it() -> None:
    one = table(bold(summarize(FIVE)), bold(summarize(FIVE)), 349.0, bold("a_b"))
    assert one.to_markdown().count("**352.0 ± 1.6**") == 2
    assert one.to_latex().count(r"$\mathbf{352.0 \pm 1.6}$") == 2
    assert r"\textbf{a\_b}" in one.to_latex()
    assert "**" not in body(one.to_markdown(), "arm 2")
    assert "mathbf" not in table(summarize(FIVE)).to_latex()


def test_numbers_stay_math_and_small_ones_become_powers_of_ten() -> None:
    assert "$-1.5$" in table(-1.5).to_latex()
    assert r"$1 \times 10^{-5}$" in table(1e-5, format=".2g").to_latex()
    assert r"$12\%$" in table(0.12, format=".0%").to_latex()
    assert "$12{,}345$" in table(12345, format=",.0f").to_latex()
    assert "$0.0$" in table(-0.01).to_latex()  # never minus zero


def test_csv_has_six_significant_digits_whole_integers_and_no_noise() -> None:
    seven: Any = np.int64(7)  # numpy integers are whole numbers too
    one = table(0.1 + 0.2, 12345678, seven, 1 / 3, np.float64(352.81249), 1e-7, True)
    assert [line.split(",")[1] for line in one.to_csv().splitlines()[1:]] == [
        *("0.3", "12345678", "7", "0.333333", "352.812", "1e-07", "1")
    ]


def test_csv_gives_every_name_back() -> None:
    rows: list[dict[str, Cell]] = [{"arm": name} for name in HARD_NAMES]
    text = Table([Column("arm", "Arm")], rows).to_csv()
    assert [row["arm"] for row in csv.DictReader(io.StringIO(text, newline=""))] == HARD_NAMES
    assert "\r" not in text


def test_the_same_table_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in table(summarize(FIVE)).write(tmp_path / "a", "table_2")]
    again = [
        path.read_bytes() for path in table(summarize(dict(reversed(FIVE.items())))).write(tmp_path / "b", "table_2")
    ]
    other = [path.read_bytes() for path in table(summarize({**FIVE, 4: 360.0})).write(tmp_path / "c", "table_2")]
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["table_2.csv", "table_2.md", "table_2.tex"]
    assert all(b"\r" not in content and content.endswith(b"\n") for content in first)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(summarize(FIVE)).write(tmp_path, "t")[0]
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        table(1.0).write(tmp_path, "t")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", HARD_NAMES)
def test_any_name_compiles_wherever_it_stands(name: str) -> None:
    one = Table(
        [Column("a", name), Column("b", "B", lower_is_better=True)],
        [{"a": name, "b": summarize(FIVE)}, {"a": bold(name), "b": bold(1e-9)}, {"b": name}],
        caption=name,
        notes=[name],
    )
    check_latex(one.to_latex(label=name))
    rows = [line for line in one.to_latex().splitlines() if line.endswith(r"\\")]
    assert len(rows) == 4
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row.replace(r"\\", ""))) == 1
        outside = re.sub(r"(?<!\\)\$[^$]*(?<!\\)\$", "", row)
        assert not re.search(r"(?<!\\)[%_#^]", outside)


@pytest.mark.parametrize("name", [name for name in HARD_NAMES if re.search(r"[_&%#^$\\{}]", name)])
def test_without_the_escape_the_same_name_is_caught(name: str) -> None:
    good = r"\begin{tabular}{lr} NAME & $1$ \\ \end{tabular}"
    check_latex(good.replace("NAME", escape_latex(name)))
    if name not in ("{x}", "%\\%"):
        with pytest.raises(ValueError, match="LaTeX"):
            check_latex(good.replace("NAME", name))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (r"\begin{tabular}{lr} 100% & $1$ \\ \end{tabular}", "unescaped %"),
        (r"\begin{tabular}{lr} a#b & $1$ \\ \end{tabular}", "unescaped #"),
        (r"\begin{tabular}{lr} a_b & $1$ \\ \end{tabular}", "_ outside math"),
        (r"\begin{tabular}{lr} a & b & $1$ \\ \end{tabular}", "2 & in a row of 2 columns"),
        (r"\begin{tabular}{lr} a \\ \end{tabular}", "0 & in a row of 2 columns"),
        (r"\begin{tabular}{lr} a & $1 \\ \end{tabular}", r"odd number of \$"),
        (r"\begin{tabular}{lr} a & $1$ \end{tabular}", "does not end in"),
        (r"\begin{tabular}{lr} a & {$1$ \\ \end{tabular}", "outside a table row"),
        (r"\begin{tabular}{lr} a & $\mathbf{1$} \\ \end{tabular}", "overlap"),
        (r"\begin{tabular}{lr} a} & $1$ \\ \end{tabular}", "} without {"),
        (r"\begin{table} a & b \end{table}", "unescaped & outside"),
        (r"\begin{table} a", "still open"),
        (r"\begin{table} a \end{tabular}", "does not close"),
        (r"\begin{table} C:\temp \end{table}", r"unknown command \\temp"),
        (r"\begin{table} $1 \end{table}", "still open"),
        ("a $", r"odd number of \$"),
        ("1 ± 2", "outside ASCII"),
        ("a\\", "unescaped"),
    ],
)
def test_broken_latex_is_refused(bad: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_latex(bad)


def test_broken_latex_is_named_by_its_line_and_good_latex_passes() -> None:
    good = table(summarize(FIVE)).to_latex("table_2")
    check_latex(good)
    assert r"\label{tab:table-2}" in good
    with pytest.raises(ValueError, match="line 9 "):
        check_latex(good.replace("arm 0", "arm_0"))


def test_a_symbol_without_escape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'☃' in 'a ☃' has no LaTeX escape"):
        escape_latex("a ☃")


def test_names_with_brackets_are_no_markup_on_the_terminal() -> None:
    one = table("[red]x[/red]", "[/]")
    assert "[red]x[/red]" in printed(one)
    assert "[/]" in printed(one)


def test_markdown_cells_cannot_break_the_row() -> None:
    text = Table([Column("a", "A"), Column("b", "B")], [{"a": "x|y\nz", "b": "*bold* <b> a_b"}]).to_markdown()
    row = text.splitlines()[2]
    assert row == r"| x\|y z | \*bold\* \<b> a_b |"


def test_mistakes_in_a_table_are_named() -> None:
    with pytest.raises(ValueError, match="'test_pl', which is no column; did you mean 'test_ppl'"):
        Table([Column("test_ppl", "P")], [{"test_pl": 1.0}])
    with pytest.raises(ValueError, match="a name of its own"):
        Table([Column("a", "A"), Column("a", "B")], [])
    with pytest.raises(ValueError, match="is no text, number"):
        Table([Column("a", "A")], [{"a": [1.0]}])  # type: ignore[dict-item]


def test_the_table_compiles_or_passes_the_strict_parser(tmp_path: Path) -> None:
    rows: list[dict[str, Cell]] = [{"a": name, "b": summarize(FIVE)} for name in HARD_NAMES]
    text = Table([Column("a", "A_b"), Column("b", "100 %")], rows, caption="50 % ± 1").to_latex("t")
    check_latex(text)
    if shutil.which("pdflatex") is None:
        return
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}\end{{document}}"
    (tmp_path / "t.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
