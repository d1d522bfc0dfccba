# SPDX-License-Identifier: Apache-2.0
"""Log files on the node have every line exactly once, whatever happens to the daemon."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}\S+) (stdout|stderr) ([PF]) (.*)")
MUCH_SECONDS = 100.0  # that hundreds of thousands of lines may take where all processors are busy
COUNTING = """
i=0; until [ -e {enough} ]; do echo line $i; i=$((i+1)); sleep 0.02; done
echo $i > {written}; mv {written} {count}
"""


def _is_larger(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size > size


@needs_registry
class LogTests(DaemonCase):
    """The real output of real processes."""

    async def setUp(self) -> None:
        super().setUp()
        await self.start()

    def lines(self, path: Path) -> list[tuple[str, str, str]]:
        """Return each line's stream, tag and text. A malformed line fails the test."""
        found = []
        for line in path.read_text().splitlines():
            parsed = _LINE.fullmatch(line)
            self.assertIsNotNone(parsed, line)
            assert parsed is not None
            found.append((parsed[2], parsed[3], parsed[4]))
        return found

    def texts(self, path: Path) -> list[str]:
        return [text for _, _, text in self.lines(path)] if path.exists() else []

    @property
    def counting(self) -> str:
        """The script of a container that writes lines until `all_counted`."""
        enough, written, count = (self.root / name for name in ("enough", "written", "count"))
        return COUNTING.format(enough=enough, written=written, count=count)

    async def all_counted(self) -> list[str]:
        """End the container that counts. Return all that it has written."""
        (self.root / "enough").touch()
        count = self.root / "count"
        await self.until(count.exists, "the container ends")
        return [f"line {number}" for number in range(int(count.read_text()))]

    async def test_what_is_written_to_both_streams(self) -> None:
        sandbox = await self.run_pod()
        script = "echo one; sleep 0.1; echo two >&2; sleep 0.1; printf 'no newline'"
        container = await self.run_container(sandbox, self.box(script=script))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        path = Path(status.log_path)
        self.assertEqual(path, self.log_directory / "web" / "main.log")
        await self.stop_pod(sandbox)
        self.assertEqual([text for _, _, text in self.lines(path)], ["one", "two", "no newline", ""])
        self.assertEqual(
            [stream for stream, _, _ in self.lines(path)], ["stdout", "stderr", "stdout", "stdout"]
        )

    async def test_last_words_are_a_termination_message_as_they_are(self) -> None:
        sandbox = await self.run_pod()
        policy = {"io.kubernetes.container.terminationMessagePolicy": "FallbackToLogsOnError"}
        box = self.box(script="echo no; printf DONE; exit 1", annotations=policy)
        status = await self.in_state(await self.run_container(sandbox, box), cri.CONTAINER_EXITED)
        await self.stop_pod(sandbox)
        found = [(tag, text) for _, tag, text in self.lines(Path(status.log_path))]
        self.assertEqual(found, [("F", "no"), ("P", "DONE")])

    async def test_it_is_written_while_the_container_runs(self) -> None:
        sandbox = await self.run_pod()
        await self.run_container(sandbox, self.box(script="echo now; sleep 1000"))
        path = self.log_directory / "web" / "main.log"
        await self.until(lambda: self.texts(path) == ["now"], "a line of a running container")

    async def test_a_stop_writes_all_that_was_said_before_it_answers(self) -> None:
        sandbox = await self.run_pod()
        ready = self.root / "ready"
        script = f"trap 'for i in 1 2 3 4 5; do echo last $i; done; exit 0' TERM; touch {ready}"
        container = await self.run_container(
            sandbox, self.box(script=f"{script}; while :; do sleep 0.05; done")
        )
        await self.until(ready.exists, "it has set the trap")
        stop = cri.StopContainerRequest(container_id=container, timeout=10)
        await self.runtime.StopContainer(stop, timeout=20.0)
        path = self.log_directory / "web" / "main.log"
        self.assertEqual(self.texts(path), [f"last {i}" for i in range(1, 6)])

    @slow(7, "hundreds of thousands of lines, twice")
    async def test_of_much_that_is_written_at_once_nothing_is_cut(self) -> None:
        """A Job that has written much and ended, and whose pod kubelet stops at once."""
        count = 300_000
        for number, stopped in enumerate((False, True)):
            sandbox = await self.run_pod(f"job-{number}")
            container = await self.run_container(sandbox, self.box(script=f"seq 1 {count}"))
            if not stopped:
                await self.in_state(container, cri.CONTAINER_EXITED, MUCH_SECONDS)
            await self.stop_pod(sandbox)
            path = self.log_directory / f"job-{number}" / "main.log"
            texts = [line.rpartition(" ")[2] for line in path.read_text().splitlines()]
            if not stopped:
                self.assertEqual(texts, [str(each) for each in range(1, count + 1)])
            else:  # it was killed while it wrote, maybe in the middle of a line, which an empty part ends
                self.assertEqual(texts[:-2], [str(each) for each in range(1, len(texts) - 1)])

    @slow(7, "hundreds of thousands of lines, and two restarts")
    async def test_killed_while_it_brings_much_nothing_is_cut_either(self) -> None:
        count = 300_000
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script=f"seq 1 {count}"))
        path = self.log_directory / "web" / "main.log"
        for size in (1_000_000, 4_000_000):
            await self.until(partial(_is_larger, path, size), "some is there")
            await self.restart()
            old = path.with_name("main.log.1")
            if not old.exists():  # kubelet rotates it meanwhile
                path.rename(old)
                await self.runtime.ReopenContainerLog(
                    cri.ReopenContainerLogRequest(container_id=container), timeout=10.0
                )
        await self.in_state(container, cri.CONTAINER_EXITED, MUCH_SECONDS)
        await self.stop_pod(sandbox)
        lines = [line for file in (old, path) for line in file.read_text().splitlines()]
        self.assertEqual([line.rpartition(" ")[2] for line in lines], [str(n) for n in range(1, count + 1)])

    async def test_killed_again_and_again_no_line_is_lost_or_doubled(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script=self.counting))
        path = self.log_directory / "web" / "main.log"
        for _ in range(3):
            seen = len(self.texts(path))
            await self.until(lambda seen=seen: len(self.texts(path)) > seen + 5, "more lines")  # type: ignore[misc]
            await self.restart()
        written = await self.all_counted()
        await self.in_state(container, cri.CONTAINER_EXITED)
        await self.stop_pod(sandbox)
        self.assertEqual(self.texts(path), written)

    async def test_what_was_said_while_there_was_no_daemon(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script=self.counting))
        path = self.log_directory / "web" / "main.log"
        await self.until(lambda: len(self.texts(path)) > 5, "some lines")
        await self.kill()
        written = await self.all_counted()
        self.assertLess(len(self.texts(path)), len(written))
        await self.start()
        await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual(self.texts(path), written)
        await self.restart()
        await self.stop_pod(sandbox)  # which waits for logs
        self.assertEqual(self.texts(path), written)

    async def test_reopened_after_kubelet_renamed_it(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script=self.counting))
        path, old = (self.log_directory / "web" / name for name in ("main.log", "main.log.1"))
        await self.until(lambda: len(self.texts(path)) > 5, "some lines")
        path.rename(old)
        request = cri.ReopenContainerLogRequest(container_id=container)
        await self.runtime.ReopenContainerLog(request, timeout=10.0)
        self.assertTrue(path.exists())
        await self.until(lambda: len(self.texts(path)) > 5, "lines in the new file")
        await self.restart()
        written = await self.all_counted()
        await self.in_state(container, cri.CONTAINER_EXITED)
        await self.stop_pod(sandbox)
        self.assertEqual(self.texts(old) + self.texts(path), written)
        await self.refused(Code.FAILED_PRECONDITION, self.runtime.ReopenContainerLog(request, timeout=5.0))

    async def test_a_last_line_without_a_newline_ends_with_its_container(self) -> None:
        """Across rotation and restarts of the daemon; kubelet then reads DONE, and not DONE\\n."""
        sandbox = await self.run_pod()
        script = "echo whole; while [ ! -e %s ]; do sleep 0.1; done; printf DONE"
        flag = self.root / "flag"
        paths = [self.log_directory / "web" / f"{name}.log" for name in ("one", "two")]
        ids = [await self.run_container(sandbox, self.box(path.stem, script=script % flag)) for path in paths]
        for path in paths:
            await self.until(lambda path=path: len(self.texts(path)) == 1, "a line")  # type: ignore[misc]
        old = paths[0].with_name("one.log.1")
        paths[0].rename(old)
        request = cri.ReopenContainerLogRequest(container_id=ids[0])
        await self.runtime.ReopenContainerLog(request, timeout=10.0)
        await self.kill()
        flag.touch()
        await self.start()
        for id in ids:
            await self.in_state(id, cri.CONTAINER_EXITED)
        self.assertEqual([self.tags(path) for path in (old, *paths)], [["F"], ["P", "F"], ["F", "P", "F"]])
        await self.restart()
        self.assertEqual([self.tags(path) for path in (old, *paths)], [["F"], ["P", "F"], ["F", "P", "F"]])

    def tags(self, path: Path) -> list[str]:
        return [line.split(" ", 3)[2] for line in path.read_text().splitlines()]

    async def test_a_container_without_a_log(self) -> None:
        sandbox = await self.run_pod()
        config = self.box(script="echo into the void; sleep 1000")
        config.log_path = ""
        container = await self.run_container(sandbox, config)
        request = cri.ReopenContainerLogRequest(container_id=container)
        await self.refused(Code.FAILED_PRECONDITION, self.runtime.ReopenContainerLog(request, timeout=5.0))
        await self.remove_pod(sandbox)
        self.assertEqual(list((self.log_directory / "web").iterdir()), [])
