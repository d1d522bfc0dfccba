# SPDX-License-Identifier: Apache-2.0
"""Launches of VMs that boot images: real QEMUs, whose guests are a sector long."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import attrs
from pycdlib.pycdlib import PyCdlib
from twisted.trial.unittest import TestCase

from infranetes.providers.hypervisor import GuestState, IBootsImages
from infranetes.providers.interface import Instance, InstanceSpec, InstanceState, Size
from infranetes.providers.machine_images import (
    BaseDisk,
    BootDisk,
    Cd,
    Chipset,
    DiskBus,
    DiskFormat,
    Firmware,
    Hardware,
    NicModel,
)
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.host import firmware
from infranetes.providers.qemu.launch import image as image_launch
from infranetes.providers.qemu.launch.uplink import UplinkOfRecord
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.record import VmRecords
from infranetes_common.commands import Command, check
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.identity import AGENT_PORT
from tests.contract.pod_provider_case import reactor
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs, needs_qemu
from tests.infranetes.providers.qemu.image_case import ImageCase
from tests.infranetes.providers.qemu.launch import die_in_image_launch
from tests.support import boot_sector, warm

SECONDS = 30.0
_ROOT = Path(__file__).parents[5]


class LaunchCase(ImageCase):
    """Helpers."""

    async def writes(self, provider: QemuProvider, instance: Instance, expected: bytes) -> None:
        """Wait until the guest has written this to its console."""
        console = provider.hypervisor(instance.id).console
        deadline = 0.0
        while expected not in await console.read(0, 4096):
            await self.sleep(0.05)
            deadline += 0.05
            self.assertLess(deadline, SECONDS, f"the guest writes {expected!r}")

    async def boots(self, provider: QemuProvider, **fields: Any) -> Instance:
        """Return a VM whose guest has written hello."""
        instance = await self.prepared_vm(provider, **fields)
        await provider.hypervisor(instance.id).execute()
        await self.writes(provider, instance, b"hello")
        return instance

    def words(self, instance: Instance) -> list[str]:
        """Return the arguments of the VM's QEMU."""
        [pid] = self.pids(instance)
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@needs_netns
@needs_qemu
class ImageLaunchTests(LaunchCase, TestCase):
    """What becomes of a launch."""

    async def test_a_vm_is_prepared_with_an_address_and_without_an_agent(self) -> None:
        provider = await self.image_provider()
        self.assertTrue(IBootsImages.providedBy(provider))
        spec = self.image_spec()
        instance = await self.running(provider, spec)
        self.assertIn(ip_address(instance.address), ip_network(self.pod_cidr))
        self.assertEqual((instance.token, instance.agent_port), (spec.token, 0))
        self.assertEqual(await self.within(provider.launch(spec)), instance, "launched once")
        self.assertEqual(await self.within(provider.list()), [instance])
        self.assertEqual(len(self.pids(instance)), 1)
        for _ in range(2):
            await self.within(provider.destroy(instance.id))
        self.assertEqual(await self.within(provider.list()), [])
        self.assertRaises(NotFound, provider.hypervisor, instance.id)
        self.assertEqual(self.leftovers(), [])

    async def test_a_clone_of_the_template_has_no_hypervisor_that_anybody_else_may_use(self) -> None:
        provider = await self.image_provider()
        instance = await self.running(provider, self.spec())
        self.assertRaises(NotFound, provider.hypervisor, instance.id)

    async def test_one_with_our_agent_executes_at_once_and_its_identity_is_in_memory_alone(self) -> None:
        provider = await self.image_provider()
        instance = await self.prepared_vm(provider, base=attrs.evolve(self.base, has_agent=True))
        self.assertEqual(instance.agent_port, AGENT_PORT)
        self.assertIs((await provider.hypervisor(instance.id).status()).state, GuestState.RUNNING)
        await self.writes(provider, instance, b"hello")
        self.assertTrue((self.run_dir / "qemu" / instance.token / "identity.json").exists())
        for each in (self.vms() / instance.token).iterdir():
            self.assertNotIn(b"PRIVATE KEY", each.read_bytes(), each.name)

    async def test_its_qemu_has_no_right_and_a_user_of_its_own(self) -> None:
        provider = await self.image_provider()
        users = set()
        for _ in range(2):
            [pid] = self.pids(await self.prepared_vm(provider))
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            users |= set(fields["Uid"].split() + fields["Gid"].split())
            self.assertEqual((fields["Groups"].strip(), fields["NoNewPrivs"]), ("", "1"))
            self.assertEqual(fields["Seccomp"], "2")
            self.assertEqual({fields[each].strip("0") for each in ("CapEff", "CapPrm", "CapBnd")}, {""})
        self.assertEqual(len(users), 2)
        self.assertNotIn("0", users)

    async def test_the_image_is_never_written_to_and_all_vms_share_it(self) -> None:
        provider = await self.image_provider()
        before = self.disk.read_bytes()
        self.disk.chmod(0o400)
        instances = [await self.boots(provider) for _ in range(2)]
        for instance in instances:
            [pid] = self.pids(instance)
            modes = [
                Path(f"/proc/{pid}/fdinfo/{each.name}").read_text()
                for each in Path(f"/proc/{pid}/fd").iterdir()
                if os.readlink(each) == str(self.disk)
            ]
            self.assertTrue(modes)
            for mode in modes:
                self.assertEqual(int(mode.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE, os.O_RDONLY)
        self.assertEqual(self.disk.read_bytes(), before)
        self.disk.unlink()
        await provider.hypervisor(instances[0].id).console.write(b"R")
        await self.writes(provider, instances[0], b"hello\r\nhello")

    async def test_the_end_of_a_guest_is_no_end_of_its_vm(self) -> None:
        provider = await self.image_provider()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.boots(provider)
        hypervisor = provider.hypervisor(instance.id)
        await hypervisor.console.write(b"O")
        await self.until(lambda: hypervisor.console.ended, "the guest has ended")
        self.assertEqual(self.pids(instance), [], "its memory is given back")
        after = await self.within(provider.get(instance.id))
        self.assertEqual(attrs.evolve(after, detail=""), instance)
        self.assertEqual(after.detail, "its guest has ended with 0")
        await self.within(provider.wait_running(instance.id, 1.0))
        other = await self.prepared_vm(provider)
        self.assertNotEqual(other.address, instance.address, "its address stays its own")
        for call in (
            provider.show_disks(instance.id, []),
            provider.place(instance.id, "/pods/one", Size()),
            provider.pin(instance.id, "0", ""),
        ):
            await self.refused(Unavailable, call)
        self.assertEqual(list(await provider.shown_disks(instance.id)), [])
        next_provider = await self.restarted(provider)
        assert isinstance(next_provider, QemuProvider)
        self.assertEqual(await self.within(next_provider.get(instance.id)), after)
        self.assertEqual(ended, [])
        await self.within(next_provider.destroy(instance.id))
        self.assertNotIn(instance.id, [each.id for each in await self.within(next_provider.list())])

    async def test_a_resize_is_refused(self) -> None:
        provider = await self.image_provider()
        instance = await self.prepared_vm(provider)
        await self.refused(FailedPrecondition, provider.resize(instance.id, Size(memory_bytes=1 << 30)))

    async def test_it_is_as_large_as_its_pod_asks(self) -> None:
        provider = await self.image_provider()
        for size, memory, cpus in (
            (Size(), "size=256M", "cpus=1,"),
            (Size(cpu_millis=1500, memory_bytes=64 << 20), "size=64M", "cpus=2,"),
            (Size(cpu_millis=90_000, memory_bytes=64 << 20, huge_bytes=2 << 20), "size=66M", "cpus=2,"),
        ):
            spec = self.image_spec()
            spec = attrs.evolve(spec, request=attrs.evolve(spec.request, size=size))
            words = self.words(await self.running(provider, spec))
            self.assertEqual(words[words.index("-m") + 1], memory)
            self.assertTrue(words[words.index("-smp") + 1].startswith(cpus))
        for size in (Size(memory_bytes=1 << 50), Size(memory_bytes=1 << 20), Size(cpu_millis=-1)):
            spec = self.image_spec()
            spec = attrs.evolve(spec, request=attrs.evolve(spec.request, size=size))
            await self.refused(InvalidArgument, provider.launch(spec))


@needs_netns
@needs_qemu
class BrokenImageLaunchTests(LaunchCase, TestCase):
    """Launches that fail, and daemons that end in one."""

    async def fails(
        self, provider: QemuProvider, error: type[Exception] = InfranetesError, **fields: Any
    ) -> str:
        """Assert that a launch fails and leaves nothing; return the error's words."""
        refused = await self.refused(error, provider.launch(self.image_spec(**fields)))
        self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(self.leftovers(), [])
        return str(refused)

    async def broken(self, *args: object) -> Any:
        raise Unavailable("the step is broken")

    @slow(6, "each of the steps is broken once")
    async def test_each_step_that_fails_leaves_nothing(self) -> None:
        provider = await self.image_provider()

        def disk_full(*args: object) -> Any:
            raise OSError(28, "No space left on device", "/somewhere")

        for where, name, breaks, words in (
            (VmRecords, "add_filled", disk_full, "disk is full"),
            (image_launch, "thd_check", disk_full, "disk is full"),
            (image_launch, "open_tap", disk_full, "disk is full"),
            (image_launch, "spawn", disk_full, "disk is full"),
            (Placement, "place", self.broken, "step is broken"),
            (VmConnections, "open_monitor", self.broken, "step is broken"),
            (UplinkOfRecord, "join", self.broken, "step is broken"),
            (UplinkOfRecord, "tell", self.broken, "step is broken"),
            (VmRecords, "update", disk_full, "disk is full"),
        ):
            patch = self.patch(where, name, breaks)
            self.assertIn(words, await self.fails(provider), name)
            patch.restore()
        await self.prepared_vm(provider)

    async def test_a_qemu_that_does_not_start_says_why(self) -> None:
        self.settings["qemu"] = self.wrapper('case "$*" in *-action*) echo out of luck >&2; exit 1;; esac')
        self.assertIn("out of luck", await self.fails(await self.image_provider()))

    async def test_nor_does_one_with_an_unknown_feature_of_its_processor(self) -> None:
        words = await self.fails(await self.image_provider(), hardware=Hardware(cpu_model="qemu64,+nonsense"))
        self.assertIn("nonsense", words)

    async def test_what_can_not_be_is_refused_before_anything_is_made(self) -> None:
        provider = await self.image_provider()
        self.patch(VmRecords, "add_filled", lambda *_: self.fail("nothing is made"))
        uefi = attrs.evolve(self.base, boots_by_bios=False, boots_by_uefi=True)
        for fields, words in (
            ({"hardware": Hardware(disk=DiskBus.IDE)}, "the chipset pc"),
            ({"hardware": Hardware(cpu_model="nonsense")}, "no processor model 'nonsense'"),
            ({"hardware": Hardware(firmware=Firmware.UEFI)}, "boots by BIOS only"),
            ({"base": uefi}, "boots by UEFI only"),
            ({"root_bytes": 1 << 50}, "max_disk"),
            ({"disks": (BootDisk("a b", self.disk, DiskFormat.RAW),)}, "serial"),
        ):
            self.assertIn(words, await self.fails(provider, InvalidArgument, **fields))

    async def test_what_the_node_lacks_is_named_with_its_package(self) -> None:
        provider = await self.image_provider()
        self.patch(firmware, "SWTPM", "swtpm-that-is-not-there")
        words = await self.fails(provider, FailedPrecondition, hardware=Hardware(tpm=True))
        self.assertIn("apt-get install swtpm", words)
        base = attrs.evolve(self.base, boots_by_bios=False)
        self.patch(firmware, "OVMF", Path("/nowhere"))
        words = await self.fails(
            provider, FailedPrecondition, base=base, hardware=Hardware(firmware=Firmware.UEFI)
        )
        self.assertIn("apt-get install ovmf", words)

    async def test_an_image_that_is_gone_is_to_be_pulled_again(self) -> None:
        provider = await self.image_provider()
        self.disk.unlink()
        self.assertIn("pull the image again", await self.fails(provider, FailedPrecondition))

    @slow(15, "twelve daemons are killed in launches, and six go on")
    async def test_a_daemon_killed_at_any_step_leaves_what_the_next_one_makes_again_or_ends(self) -> None:
        for step in ("start", "place", "monitor", "join", "tell", "save"):
            again, dropped = self.image_spec(), self.image_spec()
            for spec in (again, dropped):
                await self.dies_before(spec, step)
            provider = await self.image_provider()
            listed = await self.within(provider.list())
            self.assertEqual({each.token for each in listed}, {again.token, dropped.token}, step)
            for each in listed:
                self.assertIsNot(each.state, InstanceState.RUNNING, step)
            instance = await self.running(provider, again)
            await provider.hypervisor(instance.id).execute()
            await self.writes(provider, instance, b"hello")
            for each in listed:
                await self.within(provider.destroy(each.id))
            self.assertEqual(await self.within(provider.list()), [], step)
            await self.within(provider.stop())
            self.assertEqual(self.leftovers(), [], step)

    async def dies_before(self, spec: InstanceSpec, step: str) -> None:
        """Launch the VM in a process of its own, which kills itself by SIGKILL before a step."""
        job = self.run_dir / f"{spec.token}.json"
        context = {key: str(value) for key, value in attrs.asdict(self.context()).items()}
        document = {
            "table": dict(self.table()),
            "context": context,
            "pod_cidr": self.pod_cidr,
            "token": spec.token,
            "image": str(self.disk),
            "step": step,
        }
        job.write_text(json.dumps(document, default=str))
        output = self.run_dir / f"{spec.token}.log"
        with output.open("wb") as file:
            arguments = ("-m", die_in_image_launch.__name__, str(job))
            daemon = warm.Process(arguments, file.fileno(), _ROOT, os.environ)
        try:
            await self.until(lambda: daemon.poll() is not None, "the daemon kills itself", SECONDS)
        finally:
            job.unlink()
            daemon.kill()
        self.assertEqual(daemon.returncode, -signal.SIGKILL, output.read_text(errors="replace"))
        output.unlink()


@needs_netns
@needs_qemu
@needs_programs("swtpm")
class HardwareTests(LaunchCase, TestCase):
    """Virtual hardware, as QEMU takes it."""

    @slow(12, "some thirty QEMUs are started")
    async def test_each_combination_is_one_that_qemu_can_make(self) -> None:
        """In the sandbox that clones have, and by a user who may read none of its files."""
        provider = await self.image_provider()
        base = attrs.evolve(self.base, boots_by_bios=False)
        volume = self.state_dir / "volume.raw"
        volume.write_bytes(bytes(1 << 20))
        volume.chmod(0o600)
        disks = (BootDisk("volume", volume, DiskFormat.RAW),)
        cards = itertools.cycle(NicModel)
        for firmware_kind, chipset, bus in itertools.product(Firmware, Chipset, DiskBus):
            if firmware_kind is Firmware.SECURE_BOOT and chipset is Chipset.PC:
                continue
            if bus is DiskBus.IDE and chipset is Chipset.Q35:
                continue
            rest = bus in (DiskBus.SATA, DiskBus.IDE)
            hardware = Hardware(
                firmware_kind,
                chipset,
                bus,
                next(cards),
                tpm=rest,
                hyperv=rest,
                local_time=rest,
                watchdog=rest,
            )
            instance = await self.prepared_vm(provider, base=base, hardware=hardware, disks=disks)
            hypervisor = provider.hypervisor(instance.id)
            await hypervisor.insert_cds([Cd("cidata", {"meta-data": b"x"}), Cd("sysprep", {"a.xml": b"y"})])
            self.assertIs((await hypervisor.execute()).state, GuestState.RUNNING, hardware)
            await self.within(provider.destroy(instance.id))

    @slow(15, "six guests boot")
    async def test_a_guest_boots_by_bios_from_each_bus(self) -> None:
        provider = await self.image_provider()
        for chipset, bus in (
            (Chipset.Q35, DiskBus.VIRTIO),
            (Chipset.Q35, DiskBus.SCSI),
            (Chipset.Q35, DiskBus.SATA),
            (Chipset.Q35, DiskBus.NVME),
            (Chipset.PC, DiskBus.IDE),
            (Chipset.PC, DiskBus.SATA),
        ):
            instance = await self.boots(provider, hardware=Hardware(chipset=chipset, disk=bus))
            await self.within(provider.destroy(instance.id))

    async def test_a_tpm_ends_with_its_vm_and_has_its_user(self) -> None:
        provider = await self.image_provider()
        instance = await self.boots(provider, hardware=Hardware(tpm=True))
        [pid] = self.pids(instance)
        [tpm] = self.tpms(pid)
        for each in ("Uid", "Gid", "CapEff", "NoNewPrivs"):
            self.assertEqual(_field(tpm, each), _field(pid, each))
        self.assertIn("tpm2-00.permall", os.listdir(self.vms() / instance.token / "tpm"))
        hypervisor = provider.hypervisor(instance.id)
        await hypervisor.console.write(b"O")
        await self.until(lambda: hypervisor.console.ended, "the guest has ended")
        await self.until(lambda: not Path(f"/proc/{tpm}").exists(), "its TPM ends")

    async def test_a_daemon_that_is_replaced_leaves_the_tpm_where_it_is(self) -> None:
        provider = await self.image_provider()
        instance = await self.boots(provider, hardware=Hardware(tpm=True))
        [pid] = self.pids(instance)
        [tpm] = self.tpms(pid)
        provider = await self.image_provider_after(provider)
        self.assertEqual(self.tpms(pid), [tpm])
        await self.within(provider.destroy(instance.id))
        self.assertFalse(Path(f"/proc/{tpm}").exists())

    async def image_provider_after(self, provider: QemuProvider) -> QemuProvider:
        restarted = await self.restarted(provider)
        assert isinstance(restarted, QemuProvider)
        return restarted

    def tpms(self, qemu: int) -> list[int]:
        """Return the processes of a QEMU's user that are a TPM."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if b"swtpm" in (each / "cmdline").read_bytes() and _field(int(each.name), "Uid") == _field(
                    qemu, "Uid"
                ):
                    found.append(int(each.name))
            except OSError:
                continue
        return found


@needs_netns
@needs_qemu
class RootDiskTests(LaunchCase, TestCase):
    """The root disk."""

    async def root_size(self, provider: QemuProvider, instance: Instance) -> int:
        vm: Any = provider._find(instance.id)
        monitor = await vm.monitor(reactor)
        nodes = await monitor.qmp.execute("query-named-block-nodes")
        [size] = [each["image"]["virtual-size"] for each in nodes if each["node-name"] == "root"]
        return int(size)

    async def test_it_is_as_large_as_the_image_or_as_asked_if_that_is_more(self) -> None:
        provider = await self.image_provider()
        for asked, size in ((0, boot_sector.SIZE), (512, boot_sector.SIZE), (1 << 30, 1 << 30)):
            instance = await self.boots(provider, root_bytes=asked)
            self.assertEqual(await self.root_size(provider, instance), size)
            disk = self.vms() / instance.token / "disk.qcow2"
            self.assertLess(disk.stat().st_size, 1 << 20)
            self.assertEqual(disk.stat().st_mode & 0o777, 0o600)

    async def test_an_image_of_the_format_qcow2_boots_too(self) -> None:
        provider = await self.image_provider()
        path = self.state_dir / "image.qcow2"
        await check(
            reactor, Command(["qemu-img", "convert", "-O", "qcow2", str(self.disk), str(path)], SECONDS)
        )
        path.chmod(0o400)
        await self.boots(provider, base=attrs.evolve(self.base, path=path, format=DiskFormat.QCOW2))

    async def test_what_looks_like_qcow2_in_a_raw_image_is_not_looked_into(self) -> None:
        """Such a header names more files, which QEMU would open."""
        provider = await self.image_provider()
        self.disk.write_bytes(b"QFI\xfb" + self.disk.read_bytes()[4:])
        instance = await self.prepared_vm(provider, base=attrs.evolve(self.base, boots_by_bios=False))
        self.assertEqual(await self.root_size(provider, instance), boot_sector.SIZE)

    async def test_a_volume_can_be_the_root_and_outlives_the_vm(self) -> None:
        provider = await self.image_provider()
        volume = boot_sector.write(self.state_dir / "volume.raw")
        root = BootDisk("data", volume, DiskFormat.RAW)
        instance = await self.boots(provider, root=root)
        self.assertFalse((self.vms() / instance.token / "disk.qcow2").exists())
        words = await self.refused(FailedPrecondition, provider.launch(self.image_spec(root=root)))
        self.assertIn("attached to another VM", str(words))
        await self.within(provider.destroy(instance.id))
        await self.boots(provider, root=root)
        self.assertTrue(volume.exists())

    async def test_a_volume_smaller_than_the_image_is_no_root(self) -> None:
        provider = await self.image_provider()
        small = self.state_dir / "small.raw"
        small.write_bytes(bytes(4096))
        root = BootDisk("data", small, DiskFormat.RAW)
        words = await self.refused(FailedPrecondition, provider.launch(self.image_spec(root=root)))
        self.assertIn("larger", str(words))
        self.assertEqual(await self.within(provider.list()), [])

    async def test_an_iso_is_booted_beside_an_empty_disk(self) -> None:
        provider = await self.image_provider()
        base = BaseDisk("sha256:0", self.bootable_iso(), DiskFormat.ISO, 1 << 20)
        for hardware in (
            Hardware(),
            Hardware(disk=DiskBus.SCSI),
            Hardware(disk=DiskBus.SATA),
            Hardware(chipset=Chipset.PC, disk=DiskBus.IDE),
        ):
            instance = await self.boots(provider, base=base, hardware=hardware, root_bytes=4 << 20)
            self.assertEqual(await self.root_size(provider, instance), 4 << 20)
            await self.within(provider.destroy(instance.id))

    def bootable_iso(self) -> Path:
        """Return a CD that BIOS boots, which has the tests' guest."""
        path = self.state_dir / "image.iso"
        image = PyCdlib()
        image.new()
        sector = self.disk.read_bytes()[:2048]
        image.add_fp(io.BytesIO(sector), len(sector), "/BOOT.;1")
        image.add_eltorito("/BOOT.;1", bootcatfile="/BOOT.CAT;1")
        image.write(str(path))
        image.close()
        return path


def _field(pid: int, name: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise AssertionError(f"process {pid} has no {name}")
