# SPDX-License-Identifier: Apache-2.0
"""The session of one run of infranetes-ctl: its command line, its connection and its output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import attrs

from infranetes.ctl.arguments import DEFAULT_CONFIG
from infranetes.ctl.view import JSON, YAML
from infranetes_common.reactors import IReactor
from infranetes_common.wire.control_rpcs import ControlStub

DONE, FAILED, USAGE, DOWN, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses."""


def config_file(options: argparse.Namespace) -> Path | None:
    """Return the file of the daemon's configuration; None: there is none."""
    if options.config is None and DEFAULT_CONFIG.exists():
        return DEFAULT_CONFIG
    given: Path | None = options.config
    return given


def written(content: object, options: argparse.Namespace, *, in_line: bool = False) -> str:
    """Return a document as JSON, or as YAML if the command line asks for that."""
    if getattr(options, "form", JSON) == YAML:
        import yaml  # late: few ask for it

        text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        return ("---\n" if in_line else "") + text.rstrip("\n")
    return json.dumps(content, indent=None if in_line else 2)


@attrs.frozen
class Session:
    """A command that is being carried out.

    :ivar stub: asks the daemon's Control service. :ivar options: what the command line says.
    """

    reactor: IReactor
    stub: ControlStub
    options: argparse.Namespace

    def print(self, text: str) -> None:
        """Print a line, at once: a reader at the other end of a pipe waits for it."""
        print(text, flush=True)

    def document(self, content: object, *, in_line: bool = False) -> None:
        """Print a document in the form that the command line asks for, at once.

        :param in_line: JSON in one line; of YAML, each is a document of a stream."""
        self.print(written(content, self.options, in_line=in_line))

    def write(self, text: str) -> None:
        """Print text without ending the line, at once."""
        print(text, end="", flush=True)

    @property
    def on_terminal(self) -> bool:
        """Whether a person sees the output as it is printed."""
        return sys.stdout.isatty()
