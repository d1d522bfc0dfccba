# SPDX-License-Identifier: Apache-2.0
"""The contract of `IHypervisor` and `IConsole`, over a guest that does what its console is told: see
`tests.support.boot_sector`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.providers.hypervisor import GuestState, GuestStatus, IConsole, IHypervisor
from infranetes.providers.machine_images import DRIVES, Cd
from infranetes_common.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from infranetes_common.reactors import installed
from tests.harness.durations import slow

reactor = installed()

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object

HELLO = b"hello\r\n"
BYE = b"bye\r\n"


class _Heard(Protocol):
    """What a server says first."""

    def __init__(self) -> None:
        self.first: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if not self.first.called:
            self.first.callback(data)


class HypervisorHelpers(_Base):
    """The hooks for an implementation, and helpers."""

    seconds: ClassVar[float] = 30.0  # until anything has happened
    console_size: ClassVar[int]  # bytes of a console that are kept

    # Hooks.

    async def prepared(self) -> IHypervisor:
        """Make a VM, which is PREPARED, and return its hypervisor."""
        raise NotImplementedError

    async def next_daemon(self, hypervisor: IHypervisor, meanwhile: Callable[[], object]) -> IHypervisor:
        """Replace the daemon by the next one; return the same VM's. :param meanwhile: called between both."""
        raise NotImplementedError

    async def killed(self, hypervisor: IHypervisor) -> None:
        """Kill the hypervisor itself."""
        raise NotImplementedError

    async def destroy(self, hypervisor: IHypervisor) -> None:
        """Destroy the VM."""
        raise NotImplementedError

    async def inserted(self, hypervisor: IHypervisor) -> list[bytes]:
        """Return the CDs in the VM's drives, as the guest reads them."""
        raise NotImplementedError

    # Helpers.

    async def until(self, holds: Callable[[], object], what: str, seconds: float | None = None) -> None:
        raise NotImplementedError

    async def refused(
        self, error: type[Exception], waiting: Deferred[Any]
    ) -> Exception:  # Any: a result that does not come
        raise NotImplementedError

    async def reads(self, console: IConsole, expected: bytes, offset: int = 0) -> None:
        """Read until the guest has written this."""
        found = b""
        deadline = reactor.seconds() + self.seconds
        while expected not in found:
            self.assertLess(reactor.seconds(), deadline, f"the guest writes {expected!r}, not {found!r}")
            if console.end <= offset + len(found):
                await console.changed().addTimeout(self.seconds, reactor)
            found += await console.read(offset + len(found), 4096)

    async def talking(self) -> IHypervisor:
        """Return a VM whose guest reads its console."""
        hypervisor = await self.prepared()
        await hypervisor.execute()
        await self.reads(hypervisor.console, HELLO)
        return hypervisor

    async def ends(self, hypervisor: IHypervisor, does: Callable[[], object]) -> GuestStatus:
        """Return the status when the guest has ended, by what this does. Its end is told once."""
        told: list[GuestStatus] = []
        hypervisor.watch(told.append)
        does()
        await self.until(lambda: told, "the end is told", self.seconds)
        status = await hypervisor.status()
        self.assertEqual(told, [status])
        self.assertLessEqual(status.started_at, status.finished_at)
        self.assertTrue(hypervisor.console.ended, "when the end is told, nothing more comes")
        self.assertEqual(await hypervisor.execute(), status, "it is not begun again")
        self.assertEqual(await hypervisor.switch_off(), status, "what has ended is left as it is")
        await self.refused(Unavailable, hypervisor.press_power_button())
        await self.refused(Unavailable, hypervisor.console.write(b"x"))
        await self.refused(Unavailable, hypervisor.usage())
        await self.refused(Unavailable, hypervisor.screenshot())
        await hypervisor.console.changed().addTimeout(self.seconds, reactor)
        return status


class HypervisorContract(HypervisorHelpers):
    """The promises of `IHypervisor`, and of its `IConsole`."""

    # Its power.

    async def test_it_provides_the_interfaces(self) -> None:
        hypervisor = await self.prepared()
        self.assertTrue(verifyObject(IHypervisor, hypervisor))
        self.assertTrue(verifyObject(IConsole, hypervisor.console))

    async def test_nothing_executes_until_it_is_told_to_and_then_once(self) -> None:
        hypervisor = await self.prepared()
        told: list[GuestStatus] = []
        end = hypervisor.watch(told.append)
        self.assertEqual(await hypervisor.status(), GuestStatus(GuestState.PREPARED))
        self.assertEqual((hypervisor.console.begin, hypervisor.console.end), (0, 0))
        first, second = hypervisor.execute(), hypervisor.execute()
        status = await first
        self.assertEqual(status, GuestStatus(GuestState.RUNNING, started_at=status.started_at))
        self.assertEqual(await second, status)
        self.assertEqual(await hypervisor.status(), status)
        self.assertEqual(told, [status])
        await self.reads(hypervisor.console, HELLO)
        end()
        end()
        await hypervisor.switch_off()
        self.assertEqual(told, [status], "who has ended watching is told nothing")

    async def test_a_guest_that_powers_off_has_ended_well(self) -> None:
        hypervisor = await self.talking()
        status = await self.ends(hypervisor, lambda: hypervisor.console.write(b"O"))
        self.assertEqual((status.state, status.exit_code, status.reason), (GuestState.OFF, 0, ""))
        self.assertEqual(await hypervisor.console.read(0, 100), HELLO + BYE, "its last words are kept")
        self.assertEqual(await hypervisor.console.read(hypervisor.console.end, 100), b"")

    async def test_so_has_one_whose_power_button_is_pressed(self) -> None:
        hypervisor = await self.prepared()
        await self.refused(Unavailable, hypervisor.press_power_button())
        await hypervisor.execute()
        await self.reads(hypervisor.console, HELLO)
        status = await self.ends(
            hypervisor, lambda: [hypervisor.press_power_button().addErrback(lambda _: None) for _ in "12"]
        )
        self.assertEqual((status.state, status.exit_code), (GuestState.OFF, 0))

    async def test_a_guest_that_does_not_listen_is_switched_off(self) -> None:
        hypervisor = await self.talking()
        await hypervisor.console.write(b"H")
        await self.reads(hypervisor.console, b"H", len(HELLO))
        await hypervisor.press_power_button()
        self.assertIs((await hypervisor.status()).state, GuestState.RUNNING)
        status = await self.ends(hypervisor, hypervisor.switch_off)
        self.assertEqual((status.state, status.exit_code), (GuestState.OFF, 137))

    async def test_one_that_never_executed_can_be_switched_off(self) -> None:
        hypervisor = await self.prepared()
        status = await hypervisor.switch_off()
        self.assertEqual((status.state, status.started_at), (GuestState.OFF, 0))
        self.assertEqual(await hypervisor.execute(), status)

    async def test_a_guest_that_reboots_goes_on(self) -> None:
        hypervisor = await self.talking()
        told: list[GuestStatus] = []
        hypervisor.watch(told.append)
        before = await hypervisor.status()
        await hypervisor.console.write(b"R")
        await self.reads(hypervisor.console, HELLO, len(HELLO))
        self.assertEqual(await hypervisor.status(), before)
        self.assertEqual(told, [])

    async def test_a_guest_that_panics_has_crashed(self) -> None:
        hypervisor = await self.talking()
        status = await self.ends(hypervisor, lambda: hypervisor.console.write(b"P"))
        self.assertEqual((status.state, status.reason), (GuestState.CRASHED, "GuestPanicked"))
        self.assertNotEqual(status.exit_code, 0)
        self.assertTrue(status.message)

    async def test_so_has_one_whose_hypervisor_is_killed(self) -> None:
        hypervisor = await self.talking()
        told: list[GuestStatus] = []
        hypervisor.watch(told.append)
        await self.killed(hypervisor)
        await self.until(lambda: told, "the end is told", self.seconds)
        [status] = told
        self.assertIs(status.state, GuestState.CRASHED)
        self.assertEqual(status.exit_code, 137)
        self.assertEqual(status.reason, "HypervisorFailed")
        self.assertEqual(await hypervisor.status(), status)

    async def test_a_watcher_that_fails_keeps_nobody_from_being_told(self) -> None:
        hypervisor = await self.prepared()
        told: list[GuestStatus] = []

        def fails(status: GuestStatus) -> None:
            raise ValueError("a watcher's own trouble")

        hypervisor.watch(fails)
        hypervisor.watch(told.append)
        await hypervisor.execute()
        self.assertEqual(len(told), 1)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    # Daemons that end.

    async def test_the_next_daemon_finds_one_that_is_prepared(self) -> None:
        hypervisor = await self.next_daemon(await self.prepared(), lambda: None)
        self.assertEqual(await hypervisor.status(), GuestStatus(GuestState.PREPARED))
        await hypervisor.execute()
        await self.reads(hypervisor.console, HELLO)

    async def test_and_one_that_runs_with_all_that_it_has_written(self) -> None:
        before = await self.talking()
        status = await before.status()
        hypervisor = await self.next_daemon(before, lambda: None)
        self.assertEqual(await hypervisor.status(), status)
        self.assertEqual(await hypervisor.execute(), status, "it is not begun again")
        self.assertEqual(await hypervisor.console.read(0, 100), HELLO)
        await hypervisor.console.write(b"abc")
        await self.reads(hypervisor.console, b"abc", len(HELLO))
        status = await self.ends(hypervisor, lambda: hypervisor.console.write(b"O"))
        self.assertIs(status.state, GuestState.OFF)

    @slow(6, "the guest powers off after two seconds")
    async def test_it_learns_of_one_that_powered_off_while_there_was_none(self) -> None:
        before = await self.talking()
        await before.console.write(b"L")
        await self.reads(before.console, b"L", len(HELLO))
        said = HELLO + b"L" + BYE
        off = lambda: self.until(lambda: before.console.end == len(said), "it powers off")  # noqa: E731
        hypervisor = await self.next_daemon(before, off)
        status = await hypervisor.status()
        self.assertEqual((status.state, status.exit_code), (GuestState.OFF, 0))
        self.assertTrue(status.started_at)
        self.assertTrue(status.finished_at)
        await self.until(lambda: hypervisor.console.ended, "its resources are given back")
        self.assertEqual(await hypervisor.console.read(0, 100), said)

    async def test_and_of_one_whose_hypervisor_was_killed_meanwhile(self) -> None:
        before = await self.talking()
        hypervisor = await self.next_daemon(before, lambda: self.killed(before))
        status = await hypervisor.status()
        self.assertEqual((status.state, status.reason), (GuestState.CRASHED, "HypervisorFailed"))
        self.assertNotEqual(status.exit_code, 0)

    async def test_an_end_is_the_same_for_each_daemon(self) -> None:
        before = await self.talking()
        status = await self.ends(before, lambda: before.console.write(b"O"))
        hypervisor = await self.next_daemon(before, lambda: None)
        self.assertEqual(await hypervisor.status(), status)
        self.assertTrue(hypervisor.console.ended)
        self.assertEqual(await hypervisor.console.read(0, 100), HELLO + BYE)

    # Its CDs.

    async def test_cds_are_inserted_exchanged_and_taken_out(self) -> None:
        hypervisor = await self.prepared()
        self.assertEqual(await self.inserted(hypervisor), [])
        first = Cd("cidata", {"meta-data": b"instance-id: one", "deep/er/user-data": b"#cloud-config"})
        other = Cd("config-2", {"openstack/latest/meta_data.json": b"{}"})
        for _ in range(2):
            await hypervisor.insert_cds([first])
            [disk] = await self.inserted(hypervisor)
            self.assertIn(b"instance-id: one", disk)
            self.assertEqual(disk[0x8028 : 0x8028 + 32].rstrip(), b"cidata")
        await hypervisor.execute()
        await self.reads(hypervisor.console, HELLO)
        second = Cd("cidata", {"meta-data": b"instance-id: two"})
        await hypervisor.insert_cds([second, other])
        two, config = await self.inserted(hypervisor)
        self.assertIn(b"instance-id: two", two)
        self.assertNotIn(b"instance-id: one", two)
        self.assertEqual(config[0x8028 : 0x8028 + 32].rstrip(), b"config-2")
        hypervisor = await self.next_daemon(hypervisor, lambda: None)
        self.assertEqual(await self.inserted(hypervisor), [two, config])
        await hypervisor.insert_cds([other])
        [only] = await self.inserted(hypervisor)
        self.assertNotIn(b"instance-id", only)
        await hypervisor.insert_cds([])
        self.assertEqual(await self.inserted(hypervisor), [])

    async def test_what_no_cd_can_hold_is_refused_and_those_before_stay(self) -> None:
        hypervisor = await self.prepared()
        good = Cd("cidata", {"meta-data": b"instance-id: one"})
        await hypervisor.insert_cds([good])
        for cds in (
            [good] * (DRIVES + 1),
            [good, Cd("x" * 40, {})],
            [good, Cd("cidata", {"../etc/shadow": b""})],
            [good, Cd("cidata", {"": b""})],
            [good, Cd("cidata", {"x" * 300: b""})],
        ):
            await self.refused(InvalidArgument, hypervisor.insert_cds(cds))
            self.assertEqual(len(await self.inserted(hypervisor)), 1)
        await hypervisor.switch_off()
        await self.refused(Unavailable, hypervisor.insert_cds([good]))

    async def test_it_knows_the_network_of_its_card(self) -> None:
        hypervisor = await self.prepared()
        network = await hypervisor.network()
        self.assertEqual(await (await self.next_daemon(hypervisor, lambda: None)).network(), network)
        self.assertRegex(network.mac, "^([0-9a-f]{2}:){5}[0-9a-f]{2}$")

    # What it uses and shows.

    async def test_what_it_uses_is_measured(self) -> None:
        hypervisor = await self.talking()
        usage = await hypervisor.usage()
        self.assertGreater(usage.cpu_nanos or 0, 0)
        self.assertGreater(usage.memory_bytes or 0, 1 << 20)

    async def test_its_screen_is_a_picture(self) -> None:
        hypervisor = await self.talking()
        for picture in (await hypervisor.screenshot(), await hypervisor.screenshot()):
            self.assertTrue(picture.startswith(b"\x89PNG\r\n\x1a\n"))
            self.assertTrue(picture.endswith(b"IEND\xaeB\x60\x82"))

    async def test_its_screen_can_be_connected_to_by_several(self) -> None:
        hypervisor = await self.talking()
        for endpoint in (hypervisor.screen(), hypervisor.screen()):
            self.assertTrue((await self.first_words(endpoint)).startswith(b"RFB 003."))

    async def first_words(self, endpoint: IStreamClientEndpoint) -> bytes:
        heard = await endpoint.connect(Factory.forProtocol(_Heard))
        assert isinstance(heard, _Heard)
        self.addCleanup(heard.transport.abortConnection)  # type: ignore[union-attr]
        return await heard.first.addTimeout(self.seconds, reactor)

    # Its console.

    async def test_what_is_typed_reaches_the_guest_in_order(self) -> None:
        hypervisor = await self.talking()
        for letter in b"abcdefgh":
            hypervisor.console.write(bytes([letter]))
        await self.reads(hypervisor.console, b"abcdefgh", len(HELLO))
        self.assertEqual(await hypervisor.console.read(len(HELLO) + 2, 3), b"cde")

    async def test_bytes_that_are_not_there_are_refused(self) -> None:
        hypervisor = await self.talking()
        for offset, size in ((-1, 1), (0, -1), (1000, 1)):
            await self.refused(InvalidArgument, hypervisor.console.read(offset, size))

    async def test_a_guest_that_reads_nothing_is_typed_only_so_much(self) -> None:
        hypervisor = await self.talking()
        await hypervisor.console.write(b"H")
        await self.reads(hypervisor.console, b"H", len(HELLO))
        waiting = hypervisor.console.write(b"x" * (64 << 10))
        waiting.addErrback(lambda failure: failure.trap(Unavailable))
        await self.refused(ResourceExhausted, hypervisor.console.write(b"y" * (64 << 10)))
        self.assertFalse(waiting.called, "it is not taken")
        await hypervisor.switch_off()
        await waiting

    @slow(5, "an emulated guest writes more than is kept, to an emulated serial port")
    async def test_a_flood_is_kept_to_its_end_alone_and_its_numbers_go_on(self) -> None:
        hypervisor = await self.talking()
        console = hypervisor.console
        await console.write(b"F")
        await self.until(lambda: console.begin, "the oldest is forgotten", self.seconds)
        await self.refused(InvalidArgument, console.read(0, 10))
        begin = console.begin
        self.assertEqual(await console.read(begin, 4), b"xxxx")
        hypervisor = await self.next_daemon(hypervisor, lambda: None)
        self.assertGreaterEqual(hypervisor.console.begin, begin)
        self.assertGreater(hypervisor.console.end, begin)
        await hypervisor.switch_off()
        console = hypervisor.console
        self.assertEqual(await console.read(console.end - 4, 100), b"xxxx")

    # Its end.

    async def test_of_one_that_is_destroyed_there_is_nothing(self) -> None:
        hypervisor = await self.talking()
        console = hypervisor.console
        waiting = console.changed()
        await self.destroy(hypervisor)
        await waiting.addTimeout(self.seconds, reactor)
        self.assertTrue(console.ended)
        self.assertEqual(console.end, len(HELLO))
        calls = (
            hypervisor.status,
            hypervisor.execute,
            hypervisor.press_power_button,
            hypervisor.network,
            lambda: hypervisor.insert_cds([]),
            hypervisor.switch_off,
            hypervisor.usage,
            hypervisor.screenshot,
            lambda: console.read(0, 1),
            lambda: console.write(b"x"),
        )
        for call in calls:
            await self.refused(NotFound, call())
        for look in (hypervisor.guest_agent, hypervisor.screen):
            self.assertRaises(NotFound, look)
