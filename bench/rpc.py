# SPDX-License-Identifier: Apache-2.0
"""txgrpc compared with grpcio's asyncio server, as `bench.txgrpc` measures them."""

from __future__ import annotations

from twisted.internet.threads import deferToThread

from bench.figures import Report
from infranetes_common.reactors import IReactor


async def run(reactor: IReactor, report: Report) -> None:
    from bench import txgrpc

    found = await deferToThread(txgrpc.run)
    note = f"unary calls, {found['in_flight']} in flight, grpcio's client"
    for name in ("txgrpc", "grpcio"):
        report.add("rpc", "unary calls", found[name]["calls_per_second"], "calls/s", note=note, whose=name)
        report.add(
            "rpc", "a unary call", found[name]["p50_us"] / 1000, "ms", note=note, whose=name, percent=50
        )
        memory = found["resident"][f"{name}_server_bytes"] / 2**20
        report.add("rpc", "the server, resident", memory, "MiB", note=note, whose=name)
