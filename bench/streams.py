# SPDX-License-Identifier: Apache-2.0
"""exec and port-forward by crictl, compared with Debian's containerd, and the daemon's memory meanwhile."""

from __future__ import annotations

from bench.conformance import beside_containerd, prepare
from bench.figures import Report, say
from infranetes_common.reactors import IReactor

__all__ = ["prepare", "run"]

MIB = 100
TARGET = 20.0


async def run(reactor: IReactor, report: Report, mib: int = MIB) -> None:
    say(f"  {mib} MiB through each stream and runtime")
    taken = await beside_containerd(reactor, report.setup, "--streams", str(mib))
    ours, theirs = taken["infranetes"], taken["containerd"]
    note = f"{mib} MiB, once, by crictl; without the start of the command or connection"
    for name, rate in ours["rates"].items():
        other = theirs["rates"][name]
        report.add("streams", name, rate, "MB/s", TARGET, note, at_least=True)
        report.add("streams", name, other, "MB/s", note=note, whose="containerd")
        report.add("streams", f"{name}, as a part of containerd's", 100 * rate / other, "%")
    report.add("streams", "daemon before the streams", ours["before_mib"], "MiB", note="resident")
    report.add("streams", "daemon during the streams, peak", ours["peak_mib"], "MiB", note="resident")
