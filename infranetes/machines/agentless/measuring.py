# SPDX-License-Identifier: Apache-2.0
"""What a Linux guest uses, by a command of its own: for all ways that can run one."""

from __future__ import annotations

from infranetes_common.machine_usage import FILES, cards, first_lines, usage
from infranetes_common.processor_rates import Rates
from infranetes_common.wire import vmserver

COMMAND = ("grep", "-Hs", "", *(f"/proc/{name}" for name in FILES))
"""Prints each line behind the name of its file. One program, since programs start slowly in emulated VMs; it
exits with 2 where a file is missing, as that of an older kernel."""
MAX_OUTPUT = 256 * 1024  # bytes
MAX_LINES = 8192  # of all files


class Measuring:
    """Makes answers of what `COMMAND` prints in one guest, whatever that is."""

    def __init__(self) -> None:
        self._rates = Rates()

    def response(self, stdout: bytes, time_nanos: int) -> vmserver.StatsResponse | None:
        """Return what the guest uses; None: it is no Linux, or doesn't show it.

        :param time_nanos: the node's time. :param stdout: up to MAX_OUTPUT."""
        files: dict[str, list[str]] = {name: [] for name in FILES}
        for line in first_lines(stdout[:MAX_OUTPUT].decode(errors="replace"), MAX_LINES):
            path, _, text = line.partition(":")
            lines = files.get(path.removeprefix("/proc/"))
            if lines is not None:
                lines.append(text)
        texts = {name: "\n".join(lines) for name, lines in files.items()}
        used = usage(texts, time_nanos)
        if not (used.cpu.total_nanos and used.memory.limit):
            return None
        self._rates.put("", used)
        return vmserver.StatsResponse(machine=used, cards=cards(texts))
