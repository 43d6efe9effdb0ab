"""A small table that states the same facts as CSV, Markdown, LaTeX and on the terminal.

A cell is text, a number, None (missing) or a `Summary` over seeds; `bold` marks any of them. A standard deviation is
printed only where there is one, and the number of seeds wherever it is not the number the table announces.
The LaTeX needs ``\\usepackage{booktabs}``.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from experiments.analysis.statistics import Summary
from experiments.files import write_atomically

Value = str | int | float | Summary | None

MISSING = "—"
LOWER_IS_BETTER = "lower is better"

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: "\\" + character for character in "_%&#${}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "—": "---",
    "–": "--",
    "−": "$-$",
    "±": r"$\pm$",
    **{
        symbol: f"$\\{command}$"
        for symbol, command in zip(
            "×·≤≥→↓↑βλμση",
            re.findall("[a-z]+", "times cdot leq geq to downarrow uparrow beta lambda mu sigma eta"),
            strict=True,
        )
    },
    **dict(zip("‘’“”…", ("`", "'", "``", "''", r"\ldots{}"), strict=True)),
    **{character: f"{{{character}}}" for character in "[]*"},  # options, after the end of a row
}
_LATEX_COMMANDS = frozenset(
    re.findall("[a-z]+", "centering caption label par smallskip footnotesize toprule midrule bottomrule mathbf textbf")
    + re.findall(r"\\([A-Za-z]+)", " ".join(_LATEX_ESCAPES.values()))
)
_LATEX_TOKEN = re.compile(
    r"\\begin\{tabular\}\{(?P<columns>[lcr]+)\}|\\begin\{(?P<begin>[a-z]*)\}|(?P<placement>\[[a-zA-Z!]*\])"
    r"|\\end\{(?P<end>[a-z]*)\}|\\(?P<command>[A-Za-z]+)|\\(?P<symbol>.)|(?P<character>.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Bold:
    """A cell printed in bold; ties are all marked by the caller, who knows what the test supports."""

    value: Value


Cell = Value | Bold


@dataclass(frozen=True)
class Column:
    """``name`` heads the CSV column, ``header`` the printed one; ``format`` is a format specification for numbers."""

    name: str
    header: str
    format: str = ".6g"
    lower_is_better: bool = False

    @property
    def printed_header(self) -> str:
        return f"{self.header} ({LOWER_IS_BETTER})" if self.lower_is_better else self.header


@dataclass(frozen=True)
class Table:
    """Rows of cells keyed by column name; a key that a row lacks is a missing cell.

    Raises ValueError for two columns of one name, a cell of an unknown column or of an unknown type.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    caption: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"columns are {names}; a table needs columns, each with a name of its own")
        for number, row in enumerate(self.rows):
            for key, cell in row.items():
                if key not in names:
                    near = difflib.get_close_matches(key, names, n=1) or names
                    raise ValueError(f"row {number} has a cell {key!r}, which is no column; did you mean {near[0]!r}?")
                if not isinstance(_value(cell), str | Real | Summary | None):
                    raise ValueError(f"row {number}, {key!r}: {cell!r} is no text, number, Summary, Bold or None")

    @property
    def announced_seeds(self) -> int | None:
        """The largest number of seeds of any cell: the n that the table states once; None without summaries."""
        return max((value.n_seeds for value in self._values() if isinstance(value, Summary)), default=None)

    @property
    def printed_notes(self) -> list[str]:
        """The notes, after one that says what ± and n are."""
        n = self.announced_seeds
        if n is None:
            return list(self.notes)
        spread = any(isinstance(value, Summary) and value.std is not None for value in self._values())
        meaning = "Mean ± standard deviation over seeds (ddof = 1)" if spread else "Without standard deviations"
        return [f"{meaning}; n = {n} where no other n is given.", *self.notes]

    def to_csv(self) -> str:
        """Comma-separated values: numbers with 6 significant digits, missing cells empty, no bold.

        A column with summaries has four: ``name``, ``name_std``, ``name_n`` (seeds with a value) and ``name_seeds``.
        """
        summarised = {column.name: self._is_summarised(column) for column in self.columns}
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        suffixes = ("", "_std", "_n", "_seeds")
        writer.writerow(
            column.name + suffix
            for column in self.columns
            for suffix in (suffixes if summarised[column.name] else suffixes[:1])
        )
        for row in self.rows:
            fields: list[str] = []
            for column in self.columns:
                value = _value(row.get(column.name))
                if isinstance(value, Summary):
                    fields += map(_csv_field, (value.mean, value.std, value.n, value.n_seeds))
                else:
                    fields += [_csv_field(value)] + [""] * (3 if summarised[column.name] else 0)
            writer.writerow(fields)
        return buffer.getvalue()

    def to_markdown(self) -> str:
        """A GitHub table under the bold caption, with the notes as a list below it."""
        lines = [f"**{_escape_markdown(self.caption)}**", ""] if self.caption else []
        lines.append("| " + " | ".join(_escape_markdown(column.printed_header) for column in self.columns) + " |")
        lines.append("|" + "|".join(":---" if self._is_text(column) else "---:" for column in self.columns) + "|")
        for row in self.rows:
            cells = []
            for column in self.columns:
                cell = row.get(column.name)
                text = _escape_markdown(self._plain(cell, column))
                cells.append(f"**{text}**" if isinstance(cell, Bold) else text)
            lines.append("| " + " | ".join(cells) + " |")
        if self.printed_notes:
            lines += ["", *(f"- {_escape_markdown(note)}" for note in self.printed_notes)]
        return "\n".join(lines) + "\n"

    def to_latex(self, label: str = "") -> str:
        """A complete ``table`` environment with booktabs rules; text is escaped, numbers are math."""
        lines = [r"\begin{table}[t]", r"  \centering"]
        if self.caption:
            lines.append(rf"  \caption{{{escape_latex(self.caption)}}}")
        if label:
            lines.append(rf"  \label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', label)}}}")
        lines += [
            rf"  \begin{{tabular}}{{{''.join('l' if self._is_text(column) else 'r' for column in self.columns)}}}",
            r"    \toprule",
            "    " + " & ".join(escape_latex(column.printed_header) for column in self.columns) + r" \\",
            r"    \midrule",
            *(
                "    " + " & ".join(self._latex(row.get(column.name), column) for column in self.columns) + r" \\"
                for row in self.rows
            ),
            r"    \bottomrule",
            r"  \end{tabular}",
            *(rf"  \par\smallskip{{\footnotesize {escape_latex(note)}}}" for note in self.printed_notes),
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def write(self, directory: Path, stem: str) -> list[Path]:
        """Write ``stem``.csv, .md and .tex, each atomically and byte for byte the same for the same table."""
        return write_table(directory, stem, self, self)

    def print_terminal(self, console: Console | None = None) -> None:
        """Print the table on the terminal; cell text is never read as markup."""
        table = RichTable(title=Text(self.caption) if self.caption else None)
        for column in self.columns:
            table.add_column(Text(column.printed_header), justify="left" if self._is_text(column) else "right")
        for row in self.rows:
            cells = [(row.get(column.name), column) for column in self.columns]
            table.add_row(
                *(
                    Text(self._plain(cell, column), style="bold" if isinstance(cell, Bold) else "")
                    for cell, column in cells
                )
            )
        console = console or Console()
        console.print(table)
        for note in self.printed_notes:
            console.print(Text(note))

    def _values(self) -> list[Value]:
        return [_value(cell) for row in self.rows for cell in row.values()]

    def _is_summarised(self, column: Column) -> bool:
        return any(isinstance(_value(row.get(column.name)), Summary) for row in self.rows)

    def _is_text(self, column: Column) -> bool:
        values = [_value(row.get(column.name)) for row in self.rows]
        return all(isinstance(value, str) for value in values if not _is_missing(value))

    def _parts(self, value: Value, column: Column) -> tuple[str, str, str]:
        """What is printed of a cell: the number or text, the standard deviation, the seeds."""
        if not isinstance(value, Summary):
            return _formatted(value, column.format), "", ""
        seeds = "" if value.n == value.n_seeds == self.announced_seeds else seeds_text(value)
        std = "" if value.std is None else _formatted(value.std, column.format)
        return _formatted(value.mean, column.format), std, seeds

    def _plain(self, cell: Cell, column: Column) -> str:
        value = _value(cell)
        body, std, seeds = self._parts(value, column)
        body = body if isinstance(value, str) else body.replace("-", "−")
        return body + (f" ± {std}" if std else "") + (f" (n={seeds})" if seeds else "")

    def _latex(self, cell: Cell, column: Column) -> str:
        value = _value(cell)
        body, std, seeds = self._parts(value, column)
        if isinstance(value, str) or body == MISSING:
            text = escape_latex(body)
            text = rf"\textbf{{{text}}}" if isinstance(cell, Bold) else text
        else:
            text = _latex_number(body) + (rf" \pm {_latex_number(std)}" if std else "")
            text = rf"$\mathbf{{{text}}}$" if isinstance(cell, Bold) else f"${text}$"
        return text + (f" ($n={seeds}$)" if seeds else "")


def bold(cell: Cell) -> Bold:
    """The cell, marked to be printed in bold."""
    return Bold(_value(cell))


def seeds_text(summary: Summary) -> str:
    """ "5" where every seed has a value, "3/5" where some have none."""
    return f"{summary.n}" if summary.n == summary.n_seeds else f"{summary.n}/{summary.n_seeds}"


def escape_latex(text: str) -> str:
    """Text as LaTeX prints it literally, outside math.

    Raises ValueError for a symbol that pdfLaTeX cannot print and that has no entry here.
    """
    escaped: list[str] = []
    for character in text:
        if character.isspace():
            escaped.append(" ")
        elif character == "-" and escaped[-1:] == ["-"]:  # two hyphens would print as a dash
            escaped.append("{}-")
        elif character in _LATEX_ESCAPES:
            escaped.append(_LATEX_ESCAPES[character])
        elif _is_printable_in_latex(character):
            escaped.append(character)
        else:
            raise ValueError(f"{character!r} in {text!r} has no LaTeX escape; write it in words or add it to the list")
    return "".join(escaped)


def check_latex(text: str) -> None:
    """Raise ValueError, with the line, for LaTeX of a table that would not compile or would not print what it says.

    Checked: unescaped % and #, _ and ^ outside math, & outside a table row, rows whose number of & does not fit the
    columns, unbalanced braces, environments and $, commands that no table here uses, symbols outside ASCII.
    """
    open_scopes: list[str] = []
    math_opened_at: int | None = None
    columns = ampersands = 0
    for token in _LATEX_TOKEN.finditer(text):
        line = text.count("\n", 0, token.start()) + 1
        kind, found = token.lastgroup, token[token.lastgroup or 0]

        def require(condition: bool, problem: str, line: int = line) -> None:
            if not condition:
                raise ValueError(f"line {line} of the LaTeX: {problem}")

        if kind == "columns":
            require("tabular" not in open_scopes, "a tabular inside a tabular")
            open_scopes.append("tabular")
            columns, ampersands = len(found), 0
        elif kind == "begin":
            require(found != "tabular", "a tabular without columns of l, c and r")
            open_scopes.append(found)
        elif kind == "end":
            require(math_opened_at is None, f"$ still open at the end of {found}")
            require(
                bool(open_scopes) and open_scopes.pop() == found,
                f"\\end{{{found}}} does not close what is open",
            )
            require(found != "tabular" or ampersands == 0, "the last row does not end in \\\\")
        elif kind == "command":
            require(found in _LATEX_COMMANDS, f"unknown command \\{found}; was a backslash left unescaped?")
        elif kind == "symbol" and found == "\\":
            require(math_opened_at is None, "odd number of $ in a row")
            require(open_scopes[-1:] == ["tabular"], "\\\\ outside a table row")
            require(ampersands == columns - 1, f"{ampersands} & in a row of {columns} columns")
            ampersands = 0
        elif kind == "symbol":
            require(found in "%&#_${}", f"unknown command \\{found}")
        elif found == "&":
            require(math_opened_at is None and open_scopes[-1:] == ["tabular"], "unescaped & outside a table row")
            ampersands += 1
        elif found == "$":
            require(math_opened_at in (None, len(open_scopes)), "$ and braces overlap")
            math_opened_at = len(open_scopes) if math_opened_at is None else None
        elif found == "{":
            open_scopes.append("{")
        elif found == "}":
            require(bool(open_scopes) and open_scopes.pop() == "{", "} without {")
        elif kind == "character":
            require(found not in "%#\\", f"unescaped {found}")
            require(math_opened_at is not None or found not in "_^", f"{found} outside math")
            require(found.isspace() or _is_printable_in_latex(found), f"{found!r} is outside ASCII")
    if math_opened_at is not None:
        raise ValueError("the LaTeX ends with an odd number of $")
    if open_scopes:
        raise ValueError(f"the LaTeX ends with {open_scopes[-1]!r} still open")


def write_table(directory: Path, stem: str, printed: Table, csv: Table) -> list[Path]:
    """Write ``stem``.csv from one table and .md and .tex from another one of the same facts, each atomically."""
    latex = printed.to_latex(label=stem)
    check_latex(latex)
    contents = {".csv": csv.to_csv(), ".md": printed.to_markdown(), ".tex": latex}
    paths = [Path(directory) / f"{stem}{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomically(path, content.encode("utf-8"))
    return paths


def _value(cell: Cell) -> Value:
    return cell.value if isinstance(cell, Bold) else cell


def _is_missing(value: Value) -> bool:
    return value is None or (isinstance(value, Real) and not math.isfinite(value))


def _formatted(value: str | int | float | None, specification: str) -> str:
    if isinstance(value, str):
        return value
    if value is None or not math.isfinite(value):
        return MISSING
    if isinstance(value, Integral) and specification == Column.format:
        return str(int(value))
    text = format(float(value), specification)
    return text.replace("-", "", 1) if text.startswith("-") and not re.search("[1-9]", text) else text


def _csv_field(value: Value) -> str:
    if isinstance(value, str):
        return value
    return "" if _is_missing(value) or isinstance(value, Summary) else _formatted(value, Column.format)


def _latex_number(text: str) -> str:
    """A formatted number as math: 1e-05 becomes a power of ten, % and thousands separators are escaped."""
    power = re.fullmatch(r"(.*)e([+-]\d+)", text)
    text = rf"{power[1]} \times 10^{{{int(power[2])}}}" if power else text
    return text.replace("%", r"\%").replace(",", "{,}").replace("_", r"\_")


def _escape_markdown(text: str) -> str:
    text = re.sub(r"([\\`*|<~$\[\]])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    return re.sub(r"&(?=#?\w+;)", "&amp;", text)


def _is_printable_in_latex(character: str) -> bool:
    if character.isascii():
        return character.isprintable()
    return character.isalpha() and unicodedata.name(character, "").startswith("LATIN")
