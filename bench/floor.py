# SPDX-License-Identifier: Apache-2.0
"""A pod and its container beside the least that they can cost under the same QEMU, and what each step takes.

The floor is the same template, resumed by QEMU with the same arguments until a static program in it answers,
and the same program executed as a container by hand: `floor.c`. It is in the bench's copy of the guest image,
whose template the daemon's pods are clones of too. One pod, one floor, in turn.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from bench.daemon import ROOT, Daemon
from bench.figures import Missing, Report, say
from infranetes.guest import image as images
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.open_files import open_files
from infranetes.providers.qemu.program.process import WatchedProcess, spawn
from infranetes.providers.qemu.program.sockets import AGENT, IDENTITY, QMP
from infranetes.providers.qemu.template.template import DISK, OVERLAY, STATE
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci, process_memory
from tests.support.registry import Registry

PODS = 6
ANSWER_SECONDS = 60.0
COMMAND, TRUE = ("sleep", "100000"), ("true",)
RUN, CONTAINER, AGAIN = "RunPodSandbox", "Create- and StartContainer", "the same, the pod's second container"
EXEC, EXEC_AGAIN = "ExecSync, the first", "ExecSync, a later one"
STEPS = (RUN, CONTAINER, AGAIN, EXEC, EXEC_AGAIN)
FLOOR = "floor"
_CACHE = ROOT / "build" / "bench" / "floor"
_SOURCE = Path(__file__).with_name("floor.c")
_IN_GUEST = "/usr/sbin/infranetes-floor"
_PORT = "infranetes.floor"
_PORT_FD = max(Fd) + 1
_UNIT = f"""[Unit]
Before=vmserver.service
[Service]
ExecStart={_IN_GUEST}
"""


@attrs.frozen
class Step:
    """What one step took: seconds of the clock, and of QEMU's processor."""

    seconds: float
    processor: float


async def run(reactor: IReactor, report: Report, pods: int = PODS) -> None:
    guest = await run_in_thread(reactor, _image, report.setup.guest())
    table = {**report.setup.qemu(), "image_dir": str(guest)}
    with Registry() as registry:
        image = registry.push("busybox", "1", oci.busybox())
        daemon = Daemon(reactor, "qemu", table, registry.host)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
            await daemon.client.images.PullImage(pull, timeout=60.0)
            ours: list[dict[str, Step]] = []
            floors: list[dict[str, Step]] = []
            for number in range(-1, pods):  # the first of each brings files into memory
                pod, machine = await _pod(daemon, f"pod-{number}", image)
                floor = await _floor(reactor, machine)
                if number >= 0:
                    ours.append(pod)
                    floors.append(floor)
            _report(report, ours, floors)
        finally:
            await daemon.close()


def _report(report: Report, ours: Sequence[dict[str, Step]], floors: Sequence[dict[str, Step]]) -> None:
    note = f"median of {len(ours)}, in turn"
    for step in STEPS:
        for name, what in ((step, "seconds"), (f"{step}: QEMU's processor", "processor")):
            pod, floor = (
                statistics.median(getattr(each[step], what) for each in taken) for taken in (ours, floors)
            )
            report.add("floor", name, pod, "s", note=note)
            report.add("floor", name, floor, "s", note=note, whose=FLOOR)
            report.add("floor", f"{name} beside the floor's", pod / floor, "x", note=note)


# A pod of the daemon


@attrs.frozen
class _Machine:
    """How the daemon runs the QEMU of a pod.

    :ivar ram: an open descriptor of the memory that its template was saved with.
    """

    arguments: tuple[str, ...]
    template: Path
    image_disk: Path
    ram: int


class _Watch:
    """Measures steps of a process."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self._began, self._used = time.monotonic(), self._processor()

    def step(self) -> Step:
        """Return what was taken since the step before."""
        began, used = self._began, self._used
        self._began, self._used = time.monotonic(), self._processor()
        return Step(self._began - began, self._used - used)

    def _processor(self) -> float:
        """Return the seconds of processor that the process has taken (clock_getcpuclockid(3))."""
        return time.clock_gettime((~self.pid << 3) | 2) if self.pid else 0.0


async def _pod(daemon: Daemon, name: str, image: str) -> tuple[dict[str, Step], _Machine]:
    client, took = daemon.client, {}
    watch = _Watch()
    pod = await client.run_pod(name, daemon.logs)
    try:
        [watch.pid] = process_memory.pids_of_vms(daemon.root / "state")
        took[RUN] = watch.step()
        container = await client.run_container(pod, "first", image, COMMAND)
        took[CONTAINER] = watch.step()
        for step in (EXEC, EXEC_AGAIN):
            await client.exec_sync(container, TRUE)
            took[step] = watch.step()
        await client.run_container(pod, "second", image, COMMAND)
        took[AGAIN] = watch.step()
        return took, _machine(watch.pid)
    finally:
        await client.remove_pod(pod[1])


def _machine(pid: int) -> _Machine:
    process = Path("/proc", str(pid))
    arguments = (process / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
    template, image = (
        Path(os.readlink(process / "fd" / str(int(fd)))) for fd in (Fd.TEMPLATE_DISK, Fd.IMAGE_DISK)
    )
    ram = os.open(process / "fd" / str(int(Fd.RAM)), os.O_RDWR | os.O_CLOEXEC)
    return _Machine(tuple(arguments), template.parent, image, ram)


# The floor


class _Port(Protocol):
    """The line to the program in the guest."""

    def __init__(self) -> None:
        self._received = b""
        self._waiting: Deferred[str] | None = None

    def line(self) -> Deferred[str]:
        """Return the next line that the program says."""
        waiting: Deferred[str] = Deferred()
        self._waiting = waiting
        self._tell()
        return waiting

    def dataReceived(self, data: bytes) -> None:
        self._received += data
        self._tell()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._waiting is not None:
            self._waiting.errback(reason)

    def _tell(self) -> None:
        line, newline, rest = self._received.partition(b"\n")
        if newline and self._waiting is not None:
            self._received = rest
            waiting, self._waiting = self._waiting, None
            waiting.callback(line.decode(errors="replace"))


async def _floor(reactor: IReactor, machine: _Machine) -> dict[str, Step]:
    """Resume the template, and have the program do what the pod's containers do."""
    took: dict[str, Step] = {}
    watch = _Watch()
    async with _clone(reactor, machine, watch) as port:
        await _answer(reactor, port, "", "ready")
        took[RUN] = watch.step()
        for step, word in ((CONTAINER, "run"), (EXEC, "exec"), (EXEC_AGAIN, "exec"), (AGAIN, "run")):
            await _answer(reactor, port, word, "ok")
            took[step] = watch.step()
    return took


async def _answer(reactor: IReactor, port: _Port, word: str, expected: str) -> None:
    answer = port.line()
    if word:
        assert port.transport is not None
        port.transport.write(f"{word}\n".encode())
    said = await answer.addTimeout(ANSWER_SECONDS, reactor)
    if said != expected:
        raise AssertionError(f"the program in the guest says {said!r} to {word!r}")


@asynccontextmanager
async def _clone(reactor: IReactor, machine: _Machine, watch: _Watch) -> AsyncIterator[_Port]:
    """Run QEMU as the daemon does, with a port for the program; yield its line once the guest executes."""
    with _scratch() as directory:
        async with open_files(reactor) as files:
            shutil.copyfile(machine.template / OVERLAY, directory / OVERLAY)
            files.add(Fd.RAM, machine.ram)
            files.open(Fd.STATE, machine.template / STATE)
            files.open(Fd.DISK, directory / OVERLAY, os.O_RDWR)
            files.open(Fd.TEMPLATE_DISK, machine.template / DISK)
            files.open(Fd.IMAGE_DISK, machine.image_disk)
            files.open(Fd.CONSOLE, directory / "console", os.O_RDWR | os.O_CREAT)
            files.set_standard_streams(directory / "output")
            files.listen(Fd.QMP, directory / QMP)
            files.listen(Fd.IDENTITY, directory / IDENTITY)
            files.listen(Fd.AGENT, directory / AGENT)
            files.listen(_PORT_FD, directory / FLOOR)
            files.add(Fd.TAP, open_tap("inffloor"))
            port = ("-chardev", f"socket,id={FLOOR},fd={_PORT_FD},server=on,wait=off")
            child = spawn(reactor, [*machine.arguments, *port], files.by_number())
        watch.pid = child.pid
        process = WatchedProcess(reactor, child.pid, lambda: None, child)
        connections = VmConnections(reactor)
        try:
            await connections.open(directory)
            endpoint = UNIXClientEndpoint(reactor, str(directory / FLOOR))
            line = await endpoint.connect(Factory.forProtocol(_Port))
            await connections.load_state(ANSWER_SECONDS)
            await connections.qmp.execute(
                "device_add", driver="virtserialport", chardev=FLOOR, name=_PORT, id=FLOOR
            )
            await connections.resume()
            yield line
        finally:
            connections.close()
            await process.kill()


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-floor-") as directory:
        yield Path(directory)


# The guest image with the program


def _image(directory: Path) -> Path:
    """Return a directory of guest images whose current one has the program. It is made once.

    :raise Missing: there is no image, or no compiler."""
    try:
        base = images.current(directory)
    except FailedPrecondition as error:
        raise Missing(str(error)) from None
    lacking = [name for name in ("gcc", "debugfs") if shutil.which(name) is None]
    if lacking:
        raise Missing(f"{', '.join(lacking)}: apt-get install gcc libc6-dev e2fsprogs")
    key = hashlib.sha256(base.key.encode() + _SOURCE.read_bytes() + _UNIT.encode()).hexdigest()[:24]
    made, current = _CACHE / key, _CACHE / images.CURRENT
    if not made.exists():
        say("  making a guest image with the program")
        shutil.rmtree(_CACHE, ignore_errors=True)
        work = _CACHE / "work"
        work.mkdir(parents=True)
        subprocess.run(
            ["cp", "-a", "--sparse=always", "--reflink=auto", f"{base.directory}/.", work], check=True
        )
        images.write(attrs.evolve(base, directory=work, key=key))
        _add_program(work)
        work.rename(made)
        current.symlink_to(key)
    return _CACHE


def _add_program(work: Path) -> None:
    program, unit = work / "floor", work / "floor.service"
    subprocess.run(["gcc", "-static", "-O2", "-o", program, _SOURCE], check=True)
    unit.write_text(_UNIT)
    units = "/etc/systemd/system"
    commands = [
        f"write {program} {_IN_GUEST}",
        f"sif {_IN_GUEST} mode 0100755",
        f"write {unit} {units}/infranetes-floor.service",
        f"symlink {units}/multi-user.target.wants/infranetes-floor.service {units}/infranetes-floor.service",
    ]
    for command in commands:
        done = subprocess.run(
            ["debugfs", "-w", "-R", command, work / "disk.raw"], check=True, capture_output=True, text=True
        )
        said = done.stderr.partition("\n")[2]
        if said.strip():
            raise AssertionError(f"debugfs: {command}: {said}")
