# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider's contract, continued: logs and images."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import ClassVar

from twisted.internet.defer import CancelledError, Deferred
from zope.interface.verify import verifyObject

from infranetes_common.cri_log import checked, render
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from infranetes_common.wire import cri
from infranetes_common.wire.vmserver import LogRecord
from tests.contract.container_provider_case import ContainerProviderCase, pieces
from vmserver.containers.interface import ITakesLayers


class LogContract(ContainerProviderCase):
    """ReadLog."""

    async def test_lines_with_their_streams_and_times(self) -> None:
        id = await self.run_container(
            "sh", "-c", "echo one; sleep 0.2; echo two >&2; sleep 0.2; printf three"
        )
        state = await self.ended(id)
        records = await self.lines(id)
        self.assertEqual([record.line for record in records], [b"one", b"two", b"three"])
        self.assertEqual(
            [record.stream for record in records], [LogRecord.STDOUT, LogRecord.STDERR, LogRecord.STDOUT]
        )
        times = [record.time_nanos for record in records]
        self.assertEqual(times, sorted(times))
        self.assertGreaterEqual(times[0], state.started_at - 10**9)
        self.assertLessEqual(times[-1], state.finished_at + 10**9)
        self.assertFalse(any(record.gap for record in records))
        self.assertEqual([record.partial for record in records], [False, False, True])

    async def test_it_runs_once_however_often_it_is_started(self) -> None:
        for _ in range(3):
            id = await self.create("sh", "-c", "echo ran")
            starts = [self.provider.start_container(id) for _ in range(6)]
            starts[0].cancel()  # the first caller has gone away
            for starting in starts:
                with contextlib.suppress(CancelledError, FailedPrecondition):
                    await starting
            await self.ended(id)
            await self.refused(FailedPrecondition, self.provider.start_container(id))
            self.assertEqual([record.line for record in await self.lines(id)], [b"ran"])

    async def test_a_last_line_without_a_newline_is_not_whole(self) -> None:
        """kubelet adds no newline to it: `DONE` is the termination message, and not `DONE\\n`."""
        script = "echo whole; printf ' last words'; echo more >&2; printf DONE >&2"
        id = await self.run_container("sh", "-c", script)
        await self.ended(id)
        records = await self.lines(id)
        for stream, wanted in (
            (LogRecord.STDOUT, [(b"whole", False), (b" last words", True)]),
            (LogRecord.STDERR, [(b"more", False), (b"DONE", True)]),
        ):
            found = [(one.line, one.partial) for one in records if one.stream == stream]
            self.assertEqual(found, wanted)
        await self.restarted()
        self.assertEqual(await self.lines(id), records)
        for number, record in enumerate(records, 1):
            self.assertEqual(await self.lines(id, record.cursor), records[number:])

    async def test_a_last_line_of_just_a_part_is_not_whole(self) -> None:
        for size in (16384, 16385, 40000):
            id = await self.run_container("sh", "-c", f"head -c {size} /dev/zero | tr '\\0' x")
            await self.ended(id)
            records = await self.lines(id)
            self.assertEqual(b"".join(record.line for record in records), b"x" * size)
            self.assertEqual({record.partial for record in records}, {True})

    async def test_from_each_cursor_on_comes_exactly_the_rest(self) -> None:
        id = await self.run_container("sh", "-c", "for i in 1 2 3 4 5; do echo line $i; done")
        await self.ended(id)
        records = await self.lines(id)
        self.assertEqual(len(records), 5)
        for number, record in enumerate(records, 1):
            self.assertEqual(await self.lines(id, record.cursor), records[number:])

    async def test_many_lines_come_as_one_record_if_that_is_asked_for(self) -> None:
        id = await self.run_container("sh", "-c", "seq 1 300; echo no >&2; printf end")
        await self.ended(id)
        records = await self.lines(id)
        self.assertEqual(len(records), 302)
        found = [record async for record in self.provider.read_log(id, "", True, text=True)]
        self.assertLess(len(found), 100)
        text, good = checked(b"".join(record.text for record in found))
        self.assertTrue(good)
        self.assertEqual(text, b"".join(render(record) for record in records))
        self.assertEqual(found[-1].cursor, records[-1].cursor)
        for number, record in enumerate(found, 1):
            rest = [each async for each in self.provider.read_log(id, record.cursor, False, text=True)]
            self.assertEqual(
                b"".join(each.text for each in rest), b"".join(each.text for each in found[number:])
            )

    async def test_cursors_hold_in_another_agent(self) -> None:
        id = await self.run_container("sh", "-c", "for i in 1 2 3; do echo line $i; done; sleep 600")

        async def three() -> bool:
            return len(await self.lines(id)) == 3

        await self.until(three, "three lines are there")
        records = await self.lines(id)
        await self.restarted()
        self.assertEqual(await self.lines(id), records)
        self.assertEqual(await self.lines(id, records[0].cursor), records[1:])

    async def test_a_long_line_comes_in_parts(self) -> None:
        script = "head -c 40000 /dev/zero | tr '\\0' x; echo; echo short"
        id = await self.run_container("sh", "-c", script)
        await self.ended(id)
        records = await self.lines(id)
        self.assertEqual(b"".join(record.line for record in records[:-1]), b"x" * 40000)
        self.assertTrue(all(len(record.line) <= 16384 for record in records))
        self.assertEqual([record.partial for record in records], [True] * (len(records) - 2) + [False, False])
        self.assertEqual(records[-1].line, b"short")
        for number, record in enumerate(records, 1):
            self.assertEqual(await self.lines(id, record.cursor), records[number:])

    async def test_empty_lines_and_other_scripts_are_kept(self) -> None:
        id = await self.run_container("sh", "-c", "echo; printf '%s\\n' 'żółw \"x\" \\t'; echo")
        await self.ended(id)
        self.assertEqual(
            [record.line for record in await self.lines(id)], [b"", 'żółw "x" \\t'.encode(), b""]
        )

    async def test_following_goes_on_until_the_end(self) -> None:
        id = await self.run_container("sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.3; done")
        records = await self.lines(id, follow=True)
        self.assertEqual([record.line for record in records], [b"line 1", b"line 2", b"line 3"])
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_EXITED)

    async def test_following_may_begin_before_it_runs(self) -> None:
        id = await self.create("sh", "-c", "echo at last")
        following = Deferred.fromCoroutine(self.lines(id, follow=True))
        await self.provider.start_container(id)
        self.assertEqual([record.line for record in await following], [b"at last"])

    async def test_following_ends_when_the_container_is_removed(self) -> None:
        id = await self.run_container("sh", "-c", "echo here; sleep 600")
        following = Deferred.fromCoroutine(self.lines(id, follow=True))
        await self.until(lambda: self.lines(id), "it has written")
        await self.provider.remove(id)
        self.assertEqual([record.line for record in await following], [b"here"])

    async def test_a_follower_may_leave(self) -> None:
        id = await self.run_container("sh", "-c", "while :; do echo more; sleep 0.05; done")
        records = self.provider.read_log(id, "", True)
        async for _ in records:
            break
        await records.aclose()

    async def test_without_following_what_is_there_is_all(self) -> None:
        id = await self.run_container("sleep", "600")
        self.assertEqual(await self.lines(id), [])
        made = await self.create("true")
        self.assertEqual(await self.lines(made), [])

    async def test_what_is_no_cursor_is_refused(self) -> None:
        id = await self.run_container("echo", "hello")
        await self.ended(id)
        for cursor in ("x", "1.2", "1.-1.0.0.0", "1.1.1.1." + "9" * 40, "2.1.1.1.1", "1.\u0661.0.0.0"):
            with self.assertRaises(InvalidArgument):
                await self.lines(id, cursor)


class ImageContract(ContainerProviderCase):
    """Images, no matter how they were brought."""

    async def test_another_agent_has_the_images(self) -> None:
        await self.restarted()
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_an_image_in_use_stays(self) -> None:
        id = await self.create("true")
        for _ in range(2):
            await self.refused(FailedPrecondition, self.provider.remove_image(self.image_id))
        self.assertEqual(await self.provider.images(), [self.image_id])
        await self.provider.remove(id)
        for _ in range(2):
            await self.provider.remove_image(self.image_id)
        self.assertEqual(await self.provider.images(), [])

    async def test_an_unknown_image_is_removed_already(self) -> None:
        await self.provider.remove_image("sha256:" + "b" * 64)


class ArchiveContract(ImageContract):
    """Images that come as archives, and their layers."""

    keeps_layers: ClassVar[bool] = True

    async def test_loading_twice_is_once(self) -> None:
        taken: list[bytes] = []

        async def counted() -> AsyncIterator[bytes]:
            async for piece in pieces(self.archive(self.built)):
                taken.append(piece)
                yield piece

        await self.provider.load_image(self.image_id, counted())
        self.assertEqual(len(b"".join(taken)), len(self.archive(self.built)))
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_loading_side_by_side_is_once(self) -> None:
        other = self.build({"etc/other": b"1"})
        loads = [self.provider.load_image(other.id, pieces(self.archive(other))) for _ in range(3)]
        for load in loads:
            await load
        self.assertEqual(sorted(await self.provider.images()), sorted([self.image_id, other.id]))

    async def test_layers_that_are_there_are_known_and_may_be_left_out(self) -> None:
        other = self.build({"etc/other": secrets.token_bytes(8)})
        found = await self.provider.missing_layers(other.diff_ids)
        self.assertEqual(found, 1 if self.keeps_layers else 2)
        self.assertEqual(await self.provider.missing_layers(self.built.diff_ids), 2)
        if self.keeps_layers:
            # Layers are listed lowest first: in another order they are not the same ones.
            self.assertEqual(await self.provider.missing_layers(other.diff_ids[::-1]), 0)
            self.assertEqual(await self.provider.missing_layers(["sha256:" + "0" * 64]), 0)
        await self.provider.load_image(other.id, pieces(self.archive(other, present=found)))
        self.assertIn(other.id, await self.provider.images())
        self.assertEqual(await self.provider.missing_layers(other.diff_ids), 2)

    async def test_an_archive_of_another_image_is_refused_and_nothing_stays(self) -> None:
        other = self.build({"etc/other": b"2"})
        wrong = "sha256:" + "a" * 64
        for _ in range(2):
            loading = self.provider.load_image(wrong, pieces(self.archive(other)))
            self.assertIn(wrong, await self.refused(InvalidArgument, loading))
            self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_what_is_no_archive_is_refused(self) -> None:
        wrong = "sha256:" + "a" * 64
        for data in (b"", b"x" * 5000, bytes(4096), self.archive(self.built)[:3000]):
            await self.refused(InvalidArgument, self.provider.load_image(wrong, pieces(data)))
            self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_a_load_whose_source_fails_leaves_nothing(self) -> None:
        other = self.build({"etc/other": secrets.token_bytes(300000)})

        async def failing() -> AsyncIterator[bytes]:
            async for piece in pieces(self.archive(other)[:200000]):
                yield piece
            raise Unavailable("the node is gone")

        self.assertIn(
            "node is gone", await self.refused(Unavailable, self.provider.load_image(other.id, failing()))
        )
        self.assertEqual(await self.provider.images(), [self.image_id])
        await self.provider.load_image(other.id, pieces(self.archive(other)))
        self.assertIn(other.id, await self.provider.images())

    async def test_a_load_that_is_cancelled_leaves_nothing(self) -> None:
        other = self.build({"etc/other": secrets.token_bytes(300000)})
        never: Deferred[None] = Deferred()

        async def endless() -> AsyncIterator[bytes]:
            async for piece in pieces(self.archive(other)[:200000]):
                yield piece
            await never

        loading = self.provider.load_image(other.id, endless())
        loading.addErrback(lambda failure: None)
        loading.cancel()
        await loading
        self.assertEqual(await self.provider.images(), [self.image_id])
        await self.provider.load_image(other.id, pieces(self.archive(other)))
        self.assertIn(other.id, await self.provider.images())


class LayersContract(ImageContract):
    """ITakesLayers: images made of layers that the VM already has."""

    async def test_it_provides_the_whole_interface(self) -> None:
        verifyObject(ITakesLayers, self.provider)

    async def test_adding_twice_is_once(self) -> None:
        for _ in range(2):
            await self.load(self.built)
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_adding_side_by_side_is_once(self) -> None:
        other = self.build({"etc/other": b"1"})
        await self.load(other)
        await self.provider.remove_image(other.id)
        for one in [self.provider.add_image(other.id, other.config.data) for _ in range(3)]:
            await one
        self.assertEqual(sorted(await self.provider.images()), sorted([self.image_id, other.id]))

    async def test_a_configuration_of_another_image_is_refused_and_nothing_stays(self) -> None:
        other = self.build({"etc/other": b"2"})
        wrong = "sha256:" + "a" * 64
        for configuration in (other.config.data, b"", b"{}", b"\xff"):
            adding = self.provider.add_image(wrong, configuration)
            self.assertIn(wrong, await self.refused(InvalidArgument, adding))
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_an_image_whose_layer_is_not_there_is_a_precondition(self) -> None:
        other = self.build({"etc/other": secrets.token_bytes(8)})
        for _ in range(2):
            await self.refused(FailedPrecondition, self.provider.add_image(other.id, other.config.data))
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_archives_are_not_taken(self) -> None:
        for work in (
            self.provider.missing_layers(self.built.diff_ids),
            self.provider.load_image(self.image_id, pieces(b"")),
        ):
            self.assertIn("layers", await self.refused(Unimplemented, work))
