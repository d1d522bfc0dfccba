# SPDX-License-Identifier: Apache-2.0
"""`python -m demo.recording`: record `make demo` and draw it; with --draw, draw what has been recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from demo.daemon import TREE
from demo.recording.cast import BadCast, read
from demo.recording.record import COMMAND, NotRecorded, record
from demo.recording.screen import TooTall
from demo.recording.svg import drawn

CAST = TREE / "docs" / "demo.cast"
PICTURE = TREE / "docs" / "demo.svg"
TRIES = 2  # the first run may make what later ones find


def main(arguments: Sequence[str]) -> int:
    """Make the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo.recording", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the recording that is there again")
    parser.add_argument("--same-image", action="store_true", help="with the guest image that is there")
    try:
        options = parser.parse_args(arguments)
        if not options.draw:
            CAST.write_text(_recorded(("make", "-o", "image", "demo") if options.same_image else COMMAND))
        PICTURE.write_text(drawn(read(CAST.read_text())))
    except (BadCast, NotRecorded, TooTall, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _recorded(command: Sequence[str]) -> str:
    for left in reversed(range(TRIES)):
        try:
            return record(TREE, command).text()
        except (NotRecorded, TooTall) as error:
            if not left:
                raise
            print(f"{error}; once more", file=sys.stderr)
    raise AssertionError("not reached")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
