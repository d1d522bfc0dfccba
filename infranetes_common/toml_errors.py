# SPDX-License-Identifier: Apache-2.0
"""Errors of tomllib in the words of who wrote the file: the line that is wrong, its key, and what to do."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Sequence

_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)")
_KEY = r"[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'"
_NAMED = re.compile(rf"\s*(\[{{0,2}}\s*(?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*\s*\]{{0,2}})")
_STATEMENT = re.compile(rf"\s*(\[|(?:{_KEY})\s*=)")
_MOST_TEXT = 65536  # characters of a document whose statements are told apart
_MOST_LINES = 50  # before the one where an error is found, that are looked at for its beginning
_QUOTES = "\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u201b\u00ab\u00bb\u2032\u2033`"  # typographic ones
# What tomllib says, and what is said in its place.
_WORDS = (
    (r"Cannot overwrite|Cannot declare", "is given a second time, or is both a value and a table"),
    (r"Duplicate inline table key|Cannot mutate", "a key in it is given a second time"),
    (
        r"Illegal character '\\n'|Unterminated string|Expected (\"'|'\")",
        "the line ends within a text, whose closing quote is missing",
    ),
    (r"Invalid value", "not a value: a string stands in quotes, true and false are in small letters"),
    (r"Unclosed array", "its list is not closed: a ], or a comma or quote before it, is missing"),
    (
        r"Unclosed inline table|Expected ',' or",
        "its table is not closed: a }, or a comma or quote before it, is missing",
    ),
    (r"Expected '=' after a key", "= and a value are missing behind it; the name of a table stands in [ ]"),
    (r"Expected '\]{1,2}' at the end", "the name of a table ends with as many ] as it begins with ["),
    (r"Expected newline or end of document", "something stands behind it: each key has a line of its own"),
    (r"hex value|[Uu]nescaped '\\'|[Ee]scape", r"a \ is written \\ in a text, or the text stands in '…'"),
    (r"Invalid statement", "a line is KEY = VALUE, the name of a table in [ ], or a comment behind a #"),
)


def explained(error: Exception, text: str) -> str:
    """Return the words for an error, with the line in which the wrong statement begins.

    :param text: the document."""
    words = str(error)
    match = _AT.search(words)
    if match is None:
        return "lists or tables stand too deep in each other" if isinstance(error, RecursionError) else words
    lines = text.replace("\r\n", "\n").split("\n")
    while len(lines) > 1 and not lines[-1].strip():
        lines.pop()
    number = min(int(match[1]), len(lines)) if match[1] else len(lines)
    begun = _beginning(lines, number) if len(text) < _MOST_TEXT else number
    line = lines[begun - 1]
    follows = not match[1] or (begun < number and _STATEMENT.match(lines[number - 1]))
    if "Invalid value" in words and "[" in line and follows:
        words = words.replace("Invalid value", "Unclosed array")  # what follows is no value of it
    # Where a line within a statement is wrong in itself, that is told.
    blamed = number if "'\\n'" in words or "Invalid value" in words else begun
    where = (
        f"(at line {blamed}, column {match[2]})" if match[2] and blamed == number else f"(at line {blamed})"
    )
    if match[2] and (odd := _odd(lines[number - 1], int(match[2]) - 1)):
        return f"{odd} {where}"
    said = _said(words.removesuffix(match[0]), line)
    named = _NAMED.match(line)
    key = named[1].strip() if named else ""
    if said.startswith("is given"):
        return f"{key or line.strip()[:80]} {said} {where}"
    if said.startswith("the name of a table") or not key:
        return f"{said} {where}"
    if said.startswith("the line ends"):
        return f"{said}: {key} {where}"
    return f"{key}: {said} {where}"


def _said(words: str, line: str) -> str:
    if "Expected newline" in words and re.search(r"=\s*[+-]?0\d", line):
        return "a number does not begin with 0"
    if "Invalid initial character for a key part" in words:
        if "{" in line:
            return "a table in { } stands on one line, and has no comma before the }"
        return "a key is missing"
    return next((said for pattern, said in _WORDS if re.search(pattern, words)), words)


def _beginning(lines: Sequence[str], number: int) -> int:
    """Return the number of the line in which the statement begins that is wrong in line `number`."""
    for begun in range(number, max(number - _MOST_LINES, 0), -1):
        try:
            tomllib.loads("\n".join(lines[: begun - 1]))
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
        while begun < number and (not lines[begun - 1].strip() or lines[begun - 1].lstrip().startswith("#")):
            begun += 1
        return begun
    return number


def _odd(line: str, column: int) -> str:
    """Return what is wrong with a character that looks like another or like none; "": it is none."""
    if not column < len(line) or " " <= (odd := line[column]) < "\x7f" or odd == "\t":
        return ""
    name = unicodedata.name(odd, "")
    named = f"the character U+{ord(odd):04X}" + (f" ({name})" if name else "")
    if odd in _QUOTES:
        return f"{named} is no quote: texts stand in \" or '"
    return f"{named} can't stand here" + (": lines end with LF, or CR and LF" if odd == "\r" else "")
