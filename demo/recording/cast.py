# SPDX-License-Identifier: Apache-2.0
"""What a terminal showed and when, in the format asciicast v2, which asciinema's players take too."""

from __future__ import annotations

import json

import attrs

VERSION = 2


class BadCast(ValueError):
    """A file is no recording, and the message says why."""


@attrs.frozen
class Output:
    """What a program wrote. :ivar at: seconds after its start."""

    at: float
    text: str


@attrs.frozen
class Cast:
    """One run of a program in a terminal.

    :ivar command: as a person types it.
    :ivar taken_on: the machine, in words for whoever sees the picture.
    :ivar release: the version that ran.
    """

    columns: int
    rows: int
    command: str
    taken_on: str
    release: str
    outputs: tuple[Output, ...]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.outputs[-1].at if self.outputs else 0.0

    def text(self) -> str:
        """Return the file: one JSON document a line, a header and then what was written."""
        header = {
            "version": VERSION,
            "width": self.columns,
            "height": self.rows,
            "command": self.command,
            "title": f"{self.command}, Infranetes {self.release}",
            "infranetes": {"release": self.release, "taken_on": self.taken_on},
        }
        lines = [json.dumps(header), *(json.dumps([each.at, "o", each.text]) for each in self.outputs)]
        return "\n".join(lines) + "\n"


def read(text: str) -> Cast:
    """Return the recording that a file has.

    :raise BadCast: it is none, or one that this program did not make."""
    try:
        header, *rows = (json.loads(line) for line in text.splitlines())
        if header["version"] != VERSION:
            raise BadCast(f"this is asciicast {header['version']}, not {VERSION}: record again")
        ours = header["infranetes"]
        outputs = tuple(Output(float(at), str(shown)) for at, kind, shown in rows if kind == "o")
        return Cast(
            int(header["width"]),
            int(header["height"]),
            str(header["command"]),
            str(ours["taken_on"]),
            str(ours["release"]),
            outputs,
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadCast):
            raise
        raise BadCast(f"this is no recording of the demo ({error!r}): record again") from None
