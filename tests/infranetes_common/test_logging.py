# SPDX-License-Identifier: Apache-2.0
"""Logs: what a line holds, and what is kept out of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.logger import Logger, LogLevel, LogPublisher
from twisted.logger._legacy import publishToNewObserver
from twisted.python.log import textFromEventDict
from twisted.trial.unittest import SynchronousTestCase

import infranetes_common
from infranetes_common import logging
from infranetes_common.errors import ConfigError

TEXT = st.text(st.characters() | st.sampled_from("\n\r\x1b\x85\u2028\udc80"))
KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY-----"


def logged(write: Any, format: logging.Format = "text", level: str = "info") -> str:
    """What comes out where `write` is given a Logger."""
    stream = io.StringIO()
    write(Logger(namespace="some.where", observer=LogPublisher(logging.observer(format, level, stream))))
    return stream.getvalue()


def fail(log: Logger, error: Exception) -> None:
    try:
        raise error
    except type(error):
        log.failure("it broke", sandbox="abc")


class JournalTests(SynchronousTestCase):
    """Lines for systemd's journal, which shows warnings on a VM's console."""

    def written(self, journal: str) -> list[str]:
        """What is written to a file, where the journal is said to be this device and inode."""
        with (Path(self.mktemp())).open("w+") as file:
            status = os.fstat(file.fileno())
            text = journal.format(device=status.st_dev, inode=status.st_ino)
            self.patch(os, "environ", {**os.environ, "JOURNAL_STREAM": text})
            log = Logger(namespace="here", observer=LogPublisher(logging.observer("text", "debug", file)))
            log.debug("one")
            log.info("two")
            log.warn("three")
            log.error("four")
            fail(log, ValueError("five"))
            file.seek(0)
            return file.read().splitlines()

    def test_each_line_has_its_events_priority(self) -> None:
        lines = self.written("{device}:{inode}")
        self.assertEqual([line[:3] for line in lines[:4]], ["<7>", "<6>", "<4>", "<3>"])
        self.assertGreater(len(lines), 5, "a traceback is several lines")
        self.assertEqual({line[:3] for line in lines[4:]}, {"<2>"})

    def test_no_other_output_has_priorities(self) -> None:
        for journal in ("{device}:1{inode}", "", "nonsense"):
            self.assertNotIn("<", self.written(journal)[0][:3])


class TextTests(SynchronousTestCase):
    def test_a_line_has_time_level_namespace_and_message(self) -> None:
        line = logged(lambda log: log.info("made {what}", what="it"))
        self.assertRegex(line, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info some\.where: made it\n$")

    def test_fields_that_the_message_does_not_show_are_appended(self) -> None:
        line = logged(
            lambda log: log.info(
                "{sandbox} is ready", sandbox="abc", vm="i-5", seconds=1.23456, other="x", container=None
            )
        )
        self.assertTrue(line.endswith("some.where: abc is ready vm=i-5 seconds=1.235\n"), line)

    def test_a_field_with_spaces_is_quoted(self) -> None:
        line = logged(lambda log: log.info("made", vm='a "b" c=d'))
        self.assertTrue(line.endswith('made vm="a \\"b\\" c=d"\n'), line)

    def test_nothing_in_a_message_makes_another_line(self) -> None:
        line = logged(lambda log: log.info("from {who}", who="a\nb\x1b[2J", vm="c\nd"))
        self.assertTrue(line.endswith("from a\\nb\\x1b[2J vm=c\\nd\n"), line)

    def test_a_traceback_stands_indented_below(self) -> None:
        first, *rest = logged(lambda log: fail(log, ValueError("no"))).splitlines()
        self.assertTrue(first.endswith(" critical some.where: it broke sandbox=abc"), first)
        self.assertTrue(all(line.startswith("    ") for line in rest))
        self.assertIn("ValueError: no", rest[-1])


class LegacyTests(SynchronousTestCase):
    """What Twisted's own transports say in its earlier way, as each listens or stops."""

    def legacy(self, level: str, **event: Any) -> str:
        stream = io.StringIO()
        told = logging.observer("text", level, stream)
        publishToNewObserver(told, {"system": "-", "time": 1.0, "isError": 0, **event}, textFromEventDict)
        return stream.getvalue()

    def test_it_is_for_who_looks_closely(self) -> None:
        words = {"message": ("_ServerFactory starting on '/run/infranetes.sock'",)}
        self.assertEqual(self.legacy("info", **words), "")
        self.assertIn("_ServerFactory starting", self.legacy("debug", **words))

    def test_errors_are_told(self) -> None:
        self.assertIn("it broke", self.legacy("info", message=("it broke",), isError=1))


class JsonTests(SynchronousTestCase):
    def test_each_line_is_an_object(self) -> None:
        text = logged(
            lambda log: (log.info("{sandbox} is up", sandbox="abc", seconds=2.0), log.warn("and\nnow")),
            "json",
        )
        first, second = map(json.loads, text.splitlines())
        self.assertRegex(first.pop("time"), r"^\d{4}-.*Z$")
        expected = {"level": "info", "namespace": "some.where", "message": "abc is up"}
        self.assertEqual(first, {**expected, "sandbox": "abc", "seconds": 2.0})
        self.assertEqual((second["level"], second["message"]), ("warn", "and\\nnow"))

    def test_a_traceback_is_one_of_its_values(self) -> None:
        self.assertIn(
            "ValueError: no", json.loads(logged(lambda log: fail(log, ValueError("no")), "json"))["traceback"]
        )

    def test_a_field_without_words_breaks_nothing(self) -> None:
        class Mute:
            def __str__(self) -> str:
                raise RuntimeError

        found = json.loads(logged(lambda log: log.info("made", vm=Mute()), "json"))
        self.assertEqual(found["vm"], "(no text: RuntimeError)")


class FileTests(SynchronousTestCase):
    def test_a_file_of_the_log_is_its_owners_and_stays_small(self) -> None:
        path = Path(self.mktemp()).absolute()
        self.patch(logging, "LOG_FILE_BYTES", 2000)
        write = logging.observer(stream=logging.file_output(str(path)))
        for number in range(100):
            write({"log_level": LogLevel.info, "log_namespace": "x", "log_format": f"line {number}"})
        lines = path.read_text().splitlines()
        before = path.with_name(f"{path.name}.1").read_text().splitlines()
        self.assertEqual(len(list(path.parent.glob(f"{path.name}*"))), 2)
        numbers = [int(line.split()[-1]) for line in (*before, *lines)]
        self.assertEqual(numbers, [*range(numbers[0], 100)])
        self.assertLess(path.stat().st_size, 2200)
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)

    def test_one_that_can_not_be_written_is_named(self) -> None:
        error = self.assertRaises(ConfigError, logging.file_output, "/proc/none/log")
        self.assertIn("/proc/none/log", str(error))


class LevelTests(SynchronousTestCase):
    def test_what_is_below_the_level_is_left_out(self) -> None:
        def write(log: Logger) -> None:
            log.debug("one")
            log.info("two")
            log.warn("three")

        self.assertEqual(len(logged(write, level="debug").splitlines()), 3)
        self.assertEqual(len(logged(write, level="info").splitlines()), 2)
        self.assertEqual(len(logged(write, level="warn").splitlines()), 1)

    def test_an_unknown_level_or_format_is_refused_with_the_known_ones(self) -> None:
        error = self.assertRaises(ConfigError, logging.observer, "text", "loud")
        self.assertEqual(
            str(error), "log level 'loud' is not known; known are debug, info, warn, error, critical"
        )
        error = self.assertRaises(ConfigError, logging.observer, "xml")
        self.assertEqual(str(error), "log format 'xml' is not known; known are text, json")


class SecretTests(SynchronousTestCase):
    def test_credentials_are_blotted_out_everywhere(self) -> None:
        for secret in (
            f"key: {KEY}",
            f"cut off: {KEY[:40]}",
            "Authorization: Bearer MHcCAQ.MHcCAQ",
            "authorization: basic MHcCAQ==",
            "https://me:MHcCAQ@registry/v2",
            "https://registry/v2?token=MHcCAQ",
        ):
            for format in ("text", "json"):
                for text in (
                    logged(lambda log, secret=secret: log.info("got {what}", what=secret), format),
                    logged(lambda log, secret=secret: log.info("got", vm=secret), format),
                    logged(lambda log, secret=secret: fail(log, ValueError(secret)), format),
                ):
                    self.assertIn("(hidden)", text)
                    self.assertNotIn("MHcCAQ", text)

    def test_of_a_very_long_message_the_end_is_dropped_but_no_secret_is_halved(self) -> None:
        begins = "x" * (logging.MAX_TEXT - 20)
        text = logged(lambda log: log.info("{m}", m=f"{begins} https://me:MHcCAQ@registry/v2 {begins}"))
        self.assertLess(len(text), logging.MAX_TEXT + 100)
        self.assertTrue(text.endswith("x …\n"), text[-20:])
        self.assertNotIn("MHcCAQ", text)

    def test_of_a_very_long_message_with_one_space_most_is_kept(self) -> None:
        text = logged(lambda log: log.info("{m}", m="a " + "x" * 3 * logging.MAX_TEXT))
        self.assertGreater(len(text), logging.MAX_TEXT)

    def test_of_a_very_long_traceback_the_end_is_kept(self) -> None:
        long = "https://me:MHcCAQ@registry/v2 refused it\n" * 2000 + "as it does"
        _, *lines = logged(lambda log: fail(log, ValueError(long))).splitlines()
        self.assertLess(len("".join(lines)), logging.MAX_TEXT * 1.1)
        self.assertEqual(set(lines[:-1]), {"    https://(hidden)@registry/v2 refused it"})
        self.assertEqual(lines[-1], "    as it does")

    def test_a_very_long_field_is_cut(self) -> None:
        self.assertLess(len(logged(lambda log: log.info("made", vm="x" * 10**6))), logging.MAX_TEXT + 100)

    def test_other_keys_of_an_event_stay_out(self) -> None:
        text = logged(lambda log: log.info("made", password="hunter2", identity={"key": KEY}), "json")
        self.assertNotIn("hunter2", text)
        self.assertNotIn("MHcCAQ", text)


class AnythingTests(SynchronousTestCase):
    @given(TEXT, TEXT, st.sampled_from(["text", "json"]))
    def test_an_event_is_always_one_line(self, message: str, field: str, format: logging.Format) -> None:
        text = logged(lambda log: log.info("{m}", m=message, vm=field), format)
        text.encode()
        self.assertEqual(len(text.splitlines()), 1)
        if format == "json":
            json.loads(text)


TAC = """
import sys
from twisted.application.service import Application, Service
from twisted.internet import reactor
from twisted.logger import Logger
from infranetes_common import logging

class Speaker(Service):
    def startService(self):
        Logger(namespace="speaker").info("here I am", sandbox="abc")
        reactor.callLater(0, reactor.stop)

application = Application("test")
outermost = logging.LoggedService(logging.observer("json"))
outermost.setServiceParent(application)
Speaker().setServiceParent(outermost)
"""


class ProcessTests(SynchronousTestCase):
    def run_python(self, *arguments: str) -> list[dict[str, Any]]:
        root = str(Path(infranetes_common.__file__).parent.parent)
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_twistd_logs_to_the_outermost_services_observer(self) -> None:
        Path("speaker.tac").write_text(TAC)
        twistd = "from twisted.scripts.twistd import run; run()"
        lines = self.run_python("-c", twistd, "--nodaemon", "--pidfile=", "--python=speaker.tac")
        spoken = [line for line in lines if line["namespace"] == "speaker"]
        self.assertEqual([(line["message"], line["sandbox"]) for line in spoken], [("here I am", "abc")])

    def test_a_program_of_its_own_starts_logging_itself(self) -> None:
        lines = self.run_python(
            "-c",
            "from infranetes_common import logging; from twisted.logger import Logger\n"
            "logging.start('json', 'warn'); log = Logger(namespace='x'); log.info('no'); log.warn('yes')",
        )
        self.assertEqual([line["message"] for line in lines], ["yes"])
