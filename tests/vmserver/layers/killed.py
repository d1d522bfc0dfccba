# SPDX-License-Identifier: Apache-2.0
"""An agent that is killed at each step of a layer's life; the next agent takes over what it leaves.

``python -m tests.vmserver.layers.killed DIRECTORY restart|boot`` prints the number of steps. Each step runs
in a process of its own with a reactor of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from twisted.internet.epollreactor import EPollReactor

from infranetes_common.concurrency import Coro, start
from tests.support.erofs import Layer, layer
from vmserver.layers.arrival import Arrival, BroughtLayer
from vmserver.layers.images import LayerImages
from vmserver.layers.store import LayerStore
from vmserver.machine import mounts

EVENTS = {
    "fcntl.ioctl",
    "open",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
}
LAYER = layer({"hello": b"hello", "big": b"0123456789abcdef" * 20_000})
BIG = hashlib.sha256(b"0123456789abcdef" * 20_000).digest()
CONFIGURATION = json.dumps({"rootfs": {"diff_ids": [LAYER.diff_id]}}).encode()
IMAGE = f"sha256:{hashlib.sha256(CONFIGURATION).hexdigest()}"

Life = Callable[[LayerStore, LayerImages], Coro[None]]


class Killer:
    """Kill this process at its Nth step: before or after an effect that outlives it."""

    def __init__(self, step: int, base: Path) -> None:
        self._left = step
        self._base = str(base)
        sys.addaudithook(self._heard)
        mounts.system_mount = self._around(mounts.system_mount)
        mounts._unmount = self._around(mounts._unmount)
        Arrival.write = self._around(Arrival.write)  # type: ignore[method-assign]

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:  # Any: as the interpreter has it
        if event in EVENTS and (event == "fcntl.ioctl" or self._base in str(args[0])):
            self._step()

    def _around(self, work: Callable[..., Any]) -> Callable[..., Any]:  # Any: whatever it is
        def run(*args: Any) -> Any:
            self._step()
            result = work(*args)
            self._step()
            return result

        return run

    def _step(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    """Yield `content` in pieces."""
    for at in range(0, len(content), 65536):
        yield content[at : at + 65536]


def header(one: Layer, offset: int) -> BroughtLayer:
    """Return the header of a PutLayer call."""
    return BroughtLayer(one.diff_id, len(one.content), one.digest, offset)


async def live(store: LayerStore, images: LayerImages) -> None:
    """Send a layer in two calls, make an image, and remove both."""
    half = len(LAYER.content) // 2
    try:
        await store.put(header(LAYER, 0), pieces(LAYER.content[:half]))
    except Exception as error:
        assert "ended after" in str(error), error
    await store.put(header(LAYER, half), pieces(LAYER.content[half:]))
    await images.add(IMAGE, CONFIGURATION)
    await images.remove(IMAGE)
    await store.remove([LAYER.diff_id])


async def take_up(store: LayerStore, images: LayerImages) -> None:
    """Continue from whatever exists, as a node does; nothing is left in the end."""
    for image_id in await images.ids():
        assert image_id == IMAGE
        [directory] = await images.directories(await images.get(image_id))
        assert (directory / "hello").read_bytes() == b"hello"
    [found] = await store.arrived([LAYER.diff_id])
    offset = found.size if found.digest == LAYER.digest else 0
    await store.put(header(LAYER, offset), pieces(LAYER.content[offset:]))
    await images.add(IMAGE, CONFIGURATION)
    await store.remove([LAYER.diff_id])
    [directory] = await images.directories(await images.get(IMAGE))
    assert hashlib.sha256((directory / "big").read_bytes()).digest() == BIG
    await images.remove(IMAGE)
    await store.remove([LAYER.diff_id])


def in_child(base: Path, life: Life, step: int = 0) -> int:
    """Run a life in a separate process. Return how it ended, like `os.waitstatus_to_exitcode`."""
    pid = os.fork()
    if not pid:
        try:
            _run(base, life, step)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run(base: Path, life: Life, step: int) -> NoReturn:
    reactor: Any = EPollReactor()  # Any: an IReactor, which its stubs do not say
    store = LayerStore(reactor, base / "files", base / "points")
    images = LayerImages(reactor, store, base / "images")
    if step:
        Killer(step, base)
    failures: list[Any] = []

    def begin() -> None:
        start(life(store, images)).addErrback(failures.append).addBoth(lambda _: reactor.stop())

    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=False)
    for failure in failures:
        failure.printTraceback()
    sys.stderr.flush()
    os._exit(bool(failures))


def boot(base: Path) -> None:
    """Do what a boot does to the mounts."""
    for one in reversed(mounts.mounts_below(base)):
        mounts.unmount(one.point)
    shutil.rmtree(base / "points", ignore_errors=True)


def left(base: Path) -> list[str]:
    """Return what should be gone: mounts, files, loop devices; some end a moment after their process."""
    found = [one.point for one in mounts.mounts_below(base)]
    found += [str(path) for path in base.rglob("*") if path.is_file() or path.is_symlink()]
    loops = subprocess.run(["losetup", "--list"], check=True, capture_output=True, text=True).stdout
    return found + [line for line in loops.splitlines() if f"{base}/" in line]


def main(base: Path, how: str) -> int:
    """Kill at one step after the other, until a life ends before the next."""
    for step in count(1):
        ended = in_child(base, live, step)
        if ended not in (0, -signal.SIGKILL):
            return ended
        if how == "boot":
            boot(base)
        if in_child(base, take_up):
            print(f"after a kill at step {step}")
            return 1
        deadline = time.monotonic() + 60
        while found := left(base):
            if time.monotonic() > deadline:
                print(f"after a kill at step {step} there are {found}")
                return 1
            time.sleep(0.01)
        if not ended:
            print(step - 1)
            return 0
    raise AssertionError("not reached")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
