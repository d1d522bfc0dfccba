# SPDX-License-Identifier: Apache-2.0
"""RunPodSandbox on a simulated cloud with a boot time of 45 s: with a warm pool, without, 100 at once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from bench.client import side_by_side
from bench.daemon import Daemon
from bench.density import _end_farm
from bench.figures import Report, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri

BOOT_SECONDS = 45.0
TABLE = {"boot_seconds": BOOT_SECONDS, "jitter_seconds": 0.0}
POOL = 40
COLD = 5
AT_ONCE = 100
POOL_TARGET = {95: 1.0}
OVER_TARGET = 5.0  # percent of the time that the cloud itself takes
Measure = Callable[[IReactor, Daemon, Report], Awaitable[None]]


async def run(reactor: IReactor, report: Report) -> None:
    pool = f"[pool]\nparallel = {POOL}\nper_minute = {POOL}\n[[pool.sizes]]\ncount = {POOL}\n"
    await _with(reactor, report, pool, _warm)
    await _with(reactor, report, "", _cold)


async def _with(reactor: IReactor, report: Report, more: str, measure: Measure) -> None:
    daemon = Daemon(reactor, "simulated", TABLE, more=more)
    try:
        await daemon.start()
        await measure(reactor, daemon, report)
    finally:
        daemon.kill()
        _end_farm(daemon)
        await daemon.close()


async def _warm(reactor: IReactor, daemon: Daemon, report: Report) -> None:
    say(f"  booting a pool of {POOL}")
    took = await daemon.pool_filled(POOL)
    report.add("pool", f"filling a pool of {POOL}, all at a time", took, "s")

    async def one(number: int) -> float:
        seconds, _ = await daemon.client.timed(lambda: daemon.client.run_pod(f"warm-{number}", daemon.logs))
        return seconds

    half = POOL // 2
    seconds = [await one(number) for number in range(half)]
    note = f"{half} pods, one after the other; the cloud boots for {BOOT_SECONDS:g} s"
    report.latencies("pool", "RunPodSandbox with a warm pool", seconds, (50, 95), POOL_TARGET, "s", note)
    seconds = await side_by_side(half, half, lambda number: one(half + number))
    note = f"{half} pods at once"
    label = f"RunPodSandbox with a warm pool, {half} at once"
    report.latencies("pool", label, seconds, (50, 95), POOL_TARGET, "s", note)


async def _cold(reactor: IReactor, daemon: Daemon, report: Report) -> None:
    async def one(number: int) -> float:
        seconds, _ = await daemon.client.timed(lambda: daemon.client.run_pod(f"cold-{number}", daemon.logs))
        return seconds

    say(f"  {COLD} pods without a pool, then {AT_ONCE} at once")
    seconds = await side_by_side(COLD, COLD, one)
    report.latencies("pool", "RunPodSandbox without a pool", seconds, (50, 95), unit="s")
    before = await _requests(daemon)
    begun = reactor.seconds()
    await side_by_side(AT_ONCE, AT_ONCE, lambda number: one(COLD + number))
    took = reactor.seconds() - begun
    report.add("pool", f"{AT_ONCE} pods at once, until the last is ready", took, "s")
    over = (took / BOOT_SECONDS - 1) * 100
    report.add("pool", "that over the cloud's own time", over, "%", target=OVER_TARGET)
    calls = (await _requests(daemon) - before) / AT_ONCE
    report.add("pool", "the cloud's API calls for each of them", calls, "calls")


async def _requests(daemon: Daemon) -> int:
    answer = await daemon.client.runtime.Status(cri.StatusRequest(verbose=True), timeout=30.0)
    return int(json.loads(answer.info["provider"])["requests"])
