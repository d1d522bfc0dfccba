# SPDX-License-Identifier: Apache-2.0
"""A zsh in a terminal, and what it makes of what a person types."""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path

import attrs

SECONDS = 60.0  # for a start on a busy machine
PROMPT = "what next> "
ALL = "\x18a"  # Ctrl-X A: inserts all that TAB offers
# The first style is what zsh proposes to a new user. The command only tells with which words it was run.
STARTUP = """\
PROMPT='{prompt}'
fpath=({functions} $fpath)
autoload -Uz compinit && compinit -u -D
zstyle ':completion:*' completer _expand _complete _correct _approximate
zstyle ':completion:all:*' completer _all_matches _complete
zstyle ':completion:all:*' insert true
zle -C all complete-word _generic
bindkey '^Xa' all
{command}() {{ print -rN -- "$@" >{told} }}
"""


@attrs.frozen
class Zsh:
    """What is typed at a fresh zsh for one command.

    :ivar directory: where its own files may be.
    :ivar functions: where the files of its completions are.
    """

    directory: Path
    functions: Path
    command: str

    def typed(self, keys: str) -> list[str]:
        """Type `keys` behind the command, and Enter; return the words that the command was run with."""
        told = self.directory / "told"
        told.unlink(missing_ok=True)
        startup = STARTUP.format(prompt=PROMPT, functions=self.functions, command=self.command, told=told)
        (self.directory / ".zshrc").write_text(startup)
        master, slave = os.openpty()
        try:
            process = subprocess.Popen(
                ["zsh", "-d", "-i"],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                cwd=self.directory,
                env={"PATH": os.environ["PATH"], "TERM": "vt100", "ZDOTDIR": str(self.directory)},
            )
            try:
                seen = _read_until(master, f"{PROMPT}")
                os.write(master, f"{self.command} {keys}\r".encode())
                seen += _read_until(master, f"{PROMPT}")
            finally:
                process.kill()
                process.wait()
        finally:
            os.close(master)
            os.close(slave)
        if not told.exists():
            raise AssertionError(f"zsh did not run the command: {seen!r}")
        return told.read_text().split("\0")[:-1]


def _read_until(terminal: int, words: str) -> str:
    """Read what a terminal shows until it shows these words."""
    seen = ""
    until = time.monotonic() + SECONDS
    while words not in seen:
        if not select.select([terminal], [], [], max(until - time.monotonic(), 0.0))[0]:
            raise AssertionError(f"zsh did not show {words!r} but {seen!r}")
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
