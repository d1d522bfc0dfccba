# SPDX-License-Identifier: Apache-2.0
"""Time list calls from a client in a process of its own, so that its cost is not counted as the daemon's.

    python -m bench.lists SOCKET DAEMON_PID COUNT METHOD SECONDS-BETWEEN-CALLS

The client is grpcio. Writes JSON: the number of items, the seconds of each call, and the daemon's processor
seconds per call.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

from infranetes_common.wire import cri

_ITEMS = {"ListContainers": "containers", "ListPodSandbox": "items", "ListPodSandboxStats": "stats"}
_WARM_UP = 5


def measure(socket: str, pid: int, count: int, method: str, pause: float) -> dict[str, object]:
    """Make `count` calls, one after the other."""
    import grpc

    options = [("grpc.max_receive_message_length", 64 * 2**20)]
    with grpc.insecure_channel(f"unix://{socket}", options=options) as channel:
        request = getattr(cri, f"{method}Request")()
        call = channel.unary_unary(
            f"/runtime.v1.RuntimeService/{method}",
            type(request).SerializeToString,
            getattr(cri, f"{method}Response").FromString,
        )
        for _ in range(_WARM_UP):
            answer = call(request, timeout=60)
            time.sleep(pause)
        gc.disable()
        seconds = []
        before = processor_seconds(pid)
        for _ in range(count):
            start = time.perf_counter()
            call(request, timeout=60)
            seconds.append(time.perf_counter() - start)
            time.sleep(pause)
        spent = processor_seconds(pid) - before
    return {
        "items": len(getattr(answer, _ITEMS[method])),
        "bytes": answer.ByteSize(),
        "seconds": seconds,
        "processor_seconds": spent / count,
    }


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    path, daemon, calls, name, between = sys.argv[1:]
    json.dump(measure(path, int(daemon), int(calls), name, float(between)), sys.stdout)
