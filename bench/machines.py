# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is a VM of anybody's: until they answer, beside plain QEMU; their disks; their memory.

The VM is that of `tests.guests`: a kernel and busybox that know nothing but DHCP. Its page is asked for again
and again until it answers. The image of 2 GiB is the same disk with as many random bytes behind it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import attrs
from twisted.internet.task import deferLater

from bench.client import Client, Pod
from bench.daemon import Daemon
from bench.figures import Missing, Report, say
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.guests import catalogue, tiny
from tests.guests.machine import Machine
from tests.support import oci, process_memory
from tests.support.registry import Registry
from txgrpc import GrpcError

HANDLER = "machine"
BOOTS, MANY = 3, 10
ANSWER_SECONDS = 300.0
IDLE_SECONDS = 20.0
LARGE_BYTES = 2 << 30
START_TARGET = 0.3  # seconds
READY_FACTOR, PULL_FACTOR = 2.0, 1.5  # of plain QEMU's boot, of skopeo's copy
MEMORY_TARGET = 40.0  # MiB
#: The ways into guests that have what they need, and seconds that a command may take, once warm.
WAYS = {
    "ssh": ("debian-ssh.qcow2", 0.3),
    "guest-agent": ("debian-agent.qcow2", 0.5),
    "agent": ("infranetes.qcow2", 0.2),
}
_BOOT_SECONDS = 900.0  # of Debian, emulated
_COMMANDS = 10
_AGENT: dict[str, object] = {"Labels": {"io.infranetes.agent": "true"}}
_MORE = f'[handlers.{HANDLER}]\nprovider = "qemu"\nimages = "machine"\n'

_T = TypeVar("_T")


async def run(reactor: IReactor, report: Report, choice: str = "", mib: int = LARGE_BYTES >> 20) -> None:
    """Take the figures. :param choice: `ways`: of commands in Debian, by each way into it, instead."""
    if not catalogue.path("tiny.qcow2").exists():
        raise Missing("the tiny VM has not been made: make test-guests")
    lacking = [file for file, _ in WAYS.values() if not catalogue.path(file).exists()]
    if choice and lacking:
        raise Missing(f"{', '.join(lacking)} have not been made: make test-guests-large")
    with Registry() as registry, _scratch() as scratch:
        daemon = Daemon(reactor, "qemu", report.setup.qemu(), registry.host, more=_MORE)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            bench = _Bench(reactor, report, registry, daemon, scratch)
            if choice:
                for way in WAYS:
                    await bench.commands(way)
            else:
                await bench.boots()
                await bench.large(mib << 20)
        finally:
            await daemon.close()


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-machines-", dir="/var/tmp") as directory:
        yield Path(directory)


@attrs.frozen
class _Bench:
    reactor: IReactor
    report: Report
    registry: Registry
    daemon: Daemon
    scratch: Path

    @property
    def client(self) -> Client:
        return self.daemon.client

    async def boots(self) -> None:
        """Take how long the tiny VM takes, by itself and as a pod, and what a pod's VM has of memory."""
        alone = [await self._alone(last=number == BOOTS - 1) for number in range(BOOTS)]
        note = f"median of {BOOTS}, one after the other"
        what = "the tiny VM, until its page answers"
        self.report.add("machines", what, statistics.median(alone), "s", note=note, whose="QEMU alone")
        image = await run_in_thread(self.reactor, self._push, "tiny", catalogue.path("tiny.qcow2"))
        await self.pull(image)
        starts, readies = [], []
        for number in range(BOOTS):
            pod, started, ready = await self._pod(f"tiny-{number}", image)
            starts.append(started)
            readies.append(ready)
            if number == BOOTS - 1:
                [pid] = process_memory.pids_of_vms(self.daemon.root / "state")
                await self._memory(pid)
            await self.client.remove_pod(pod[1])
        target = READY_FACTOR * statistics.median(alone)
        self.report.add(
            "machines", what, statistics.median(readies), "s", target, f"{note}; from RunPodSandbox on"
        )
        self.report.add("machines", "StartContainer", statistics.median(starts), "s", START_TARGET, note)

    async def _alone(self, last: bool) -> float:
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        began = self.reactor.seconds()
        accelerator = "kvm" if self.report.accelerator.startswith("kvm") else "tcg"
        machine = Machine(
            catalogue.path("tiny.qcow2"), directory, port=tiny.PORT, memory=1024, accelerator=accelerator
        )
        try:
            await self._until(machine.answers)
            taken = self.reactor.seconds() - began
            if last:
                await self._memory(machine.process.pid, "QEMU alone")
            return taken
        finally:
            machine.end()

    async def _pod(self, name: str, image: str) -> tuple[Pod, float, float]:
        """Run a pod. Return it, what StartContainer took, and all until its page answered."""
        began = self.reactor.seconds()
        pod, container = await self.created(name, image)
        started, _ = await self.client.timed(partial(self.client.start_container, container))
        address = await self.address(pod)
        await self._until(partial(_answers, address))
        return pod, started, self.reactor.seconds() - began

    async def created(self, name: str, image: str, **annotations: str) -> tuple[Pod, str]:
        """Make a pod and its container, whose VM executes nothing yet."""
        told = {f"infranetes.io/{key}": value for key, value in annotations.items()}
        pod = await self.client.run_pod(name, self.daemon.logs, told, handler=HANDLER)
        return pod, await self.client.create_container(pod, "main", image, ())

    async def pull(self, image: str) -> float:
        """Pull an image. Return the seconds it took."""
        request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
        seconds, _ = await self.client.timed(lambda: self.client.images.PullImage(request, timeout=600.0))
        return seconds

    async def address(self, pod: Pod) -> str:
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=pod[1])
        status = await self.client.runtime.PodSandboxStatus(request, timeout=30.0)
        return str(status.status.network.ip)

    async def _until(self, answers: Callable[[], bool]) -> None:
        deadline = self.reactor.seconds() + ANSWER_SECONDS
        while not await run_in_thread(self.reactor, answers):
            if self.reactor.seconds() > deadline:
                raise AssertionError(f"no page after {ANSWER_SECONDS:g} s")
            await deferLater(self.reactor, 0.05)

    async def _memory(self, pid: int, whose: str = "") -> None:
        """Add what an idle VM has of memory: QEMU's proportional set size."""
        await deferLater(self.reactor, IDLE_SECONDS)
        guest, code, rest = _proportions(Path(f"/proc/{pid}/smaps").read_text())
        what, target = "an idle VM's memory", None if whose else MEMORY_TARGET
        self.report.add("machines", f"{what}: the guest's own", guest, "MiB", note="PSS", whose=whose)
        self.report.add(
            "machines", f"{what}: beyond the guest's own", code + rest, "MiB", target, whose=whose
        )
        self.report.add("machines", f"{what}: of that, translated code", code, "MiB", whose=whose)

    async def large(self, size: int) -> None:
        """Take an image of 2 GiB from the registry to a VM that executes, and ten pods of it."""
        name = f"an image of {size / (1 << 30):.2g} GiB"
        disk = await run_in_thread(self.reactor, self._large_disk, size)
        artifact = await run_in_thread(self.reactor, self._push_artifact, "artifact", disk)
        container = await run_in_thread(self.reactor, self._push, "container", disk)
        disk.unlink()
        copied = await self._copied(artifact)
        self.report.add("machines", f"{name}, copied from the registry", copied, "s", whose="skopeo")
        target = PULL_FACTOR * copied
        before = _used(self.daemon.root / "state")
        for how, image in (("as an artifact", artifact), ("as a container image's layer", container)):
            began = self.reactor.seconds()
            pulled = await self.pull(image)
            pod, id = await self.created("large", image)
            await self.client.start_container(id)
            taken = self.reactor.seconds() - began
            self.report.add("machines", f"{name}, {how}, to a VM that executes", taken, "s", target)
            self.report.add("machines", f"{name}, {how}: of that, PullImage", pulled, "s")
            await self.client.remove_pod(pod[1])
            if image == artifact:
                await self._many(name, image, before)

    async def _many(self, name: str, image: str, before: int) -> None:
        pods = []
        base = _used(self.daemon.root / "state") - before
        for number in range(MANY):
            pod, _, _ = await self._pod(f"many-{number}", image)
            pods.append(pod)
        used = _used(self.daemon.root / "state") - before
        target = base / 1e6 + MANY * 4.0
        self.report.add("machines", f"{name}: on the node", base / 1e6, "MB")
        self.report.add("machines", f"{name}: with {MANY} pods that have booted", used / 1e6, "MB", target)
        for pod in pods:
            await self.client.remove_pod(pod[1])

    async def commands(self, way: str) -> None:
        """Take how long ExecSync of `true` takes by a way into a guest."""
        file, target = WAYS[way]
        config = _AGENT if way == "agent" else None
        image = await run_in_thread(
            self.reactor, self._push, file.removesuffix(".qcow2"), catalogue.path(file), config
        )
        await self.pull(image)
        pod, container = await self.created(way, image, guest=way)
        await self.client.start_container(container)
        await self._first(container)
        seconds = [await self.client.exec_sync(container, ["true"]) for _ in range(_COMMANDS)]
        self.report.latencies("machines", f"ExecSync, {way}", seconds, (50, 95), {50: target}, "s")
        await self.client.remove_pod(pod[1])

    async def _first(self, container: str) -> None:
        """Wait until a command runs in the guest."""
        deadline = self.reactor.seconds() + _BOOT_SECONDS
        while True:
            try:
                await self.client.exec_sync(container, ["true"])
                return
            except GrpcError:
                if self.reactor.seconds() > deadline:
                    raise
                await deferLater(self.reactor, 1.0)

    # What the registry has. Blocking.

    def _push(self, name: str, disk: Path, config: dict[str, object] | None = None) -> str:
        """Push a container image whose one layer has this disk, and is not compressed."""
        layer = self.scratch / f"{name}.tar"
        with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as tar:
            tar.add(disk, f"disk/{disk.name}")
        diff = {"rootfs": {"type": "layers", "diff_ids": [_digest(layer)]}}
        about = {"architecture": "amd64", "os": "linux", "config": config or {}, **diff}
        return self._push_layer(name, layer, oci.OCI + "layer.v1.tar", about, oci.OCI + "config.v1+json")

    def _push_artifact(self, name: str, disk: Path) -> str:
        """Push an artifact whose one layer is this disk."""
        copy = self.scratch / f"{name}.qcow2"
        os.link(disk, copy)
        return self._push_layer(name, copy, "application/vnd.qemu.disk", {}, oci.OCI + "empty.v1+json")

    def _push_layer(self, name: str, layer: Path, kind: str, about: object, about_kind: str) -> str:
        """Push an image of one layer, a file that goes with it."""
        layout = self.scratch / f"{name}.layout"
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)

        def blob(data: bytes, media_type: str) -> dict[str, object]:
            made = oci.Blob(media_type, data)
            (blobs / made.digest.removeprefix("sha256:")).write_bytes(data)
            return made.descriptor

        digest, size = _digest(layer), layer.stat().st_size
        layer.rename(blobs / digest.removeprefix("sha256:"))
        config = blob(json.dumps(about).encode(), about_kind)
        layers = [{"mediaType": kind, "digest": digest, "size": size}]
        manifest = {"schemaVersion": 2, "config": config, "layers": layers}
        manifest["mediaType"] = oci.OCI + "manifest.v1+json"
        index = {
            "schemaVersion": 2,
            "manifests": [blob(json.dumps(manifest).encode(), str(manifest["mediaType"]))],
        }
        (layout / "index.json").write_text(json.dumps(index))
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        _skopeo(
            "copy",
            "--dest-tls-verify=false",
            f"oci:{layout}",
            f"docker://{self.registry.reference(name, '1')}",
        )
        shutil.rmtree(layout)
        return self.registry.reference(name, "1")

    def _large_disk(self, size: int) -> Path:
        raw, disk = self.scratch / "large.raw", self.scratch / "large.qcow2"
        shutil.copyfile(catalogue.path("tiny.raw"), raw)
        with raw.open("ab") as file:
            while file.tell() < size:
                file.write(os.urandom(min(16 << 20, size - file.tell())))
        subprocess.run(["qemu-img", "convert", "-O", "qcow2", raw, disk], check=True)
        raw.unlink()
        return disk

    async def _copied(self, image: str) -> float:
        target = self.scratch / "copied"
        began = self.reactor.seconds()
        command = ("copy", "--src-tls-verify=false", f"docker://{image}", f"oci:{target}")
        await run_in_thread(self.reactor, _skopeo, *command)
        taken = self.reactor.seconds() - began
        await run_in_thread(self.reactor, shutil.rmtree, target)
        return taken


def _skopeo(*words: str) -> None:
    done = subprocess.run(
        ["skopeo", "--insecure-policy", *words], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"skopeo: {done.stderr[-1000:]}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _answers(address: str) -> bool:
    try:
        with urlopen(f"http://{address}:{tiny.PORT}/", timeout=5) as answer:
            return bool(answer.read())
    except OSError:
        return False


def _used(directory: Path) -> int:
    """Return the bytes that the files below a directory take on their disk; of a linked file, once."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def _proportions(smaps: str) -> tuple[float, float, float]:
    """Return a QEMU's proportional set size in MiB: of its guest's memory, translated code, and the rest."""
    mappings: list[tuple[str, dict[str, int]]] = []
    for line in smaps.splitlines():
        if begin := re.fullmatch(r"[0-9a-f]+-[0-9a-f]+ (\S+) .*", line):
            mappings.append((begin[1], {}))
        elif field := re.fullmatch(r"(\w+): +(\d+) kB", line):
            mappings[-1][1][field[1]] = int(field[2])
    guest = max(mappings, key=lambda each: each[1].get("Size", 0))
    code = sum(fields.get("Pss", 0) for rights, fields in mappings if rights.startswith("rwx"))
    whole = sum(fields.get("Pss", 0) for _, fields in mappings)
    own = guest[1].get("Pss", 0)
    return own / 1024, code / 1024, (whole - own - code) / 1024
