# SPDX-License-Identifier: Apache-2.0
"""What the programs can't do that read strangers' disks."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.erofs.limits import BAD, FAILED
from infranetes.images.machine.limits import DiskLimits
from infranetes.images.machine.orders import Order
from tests.infranetes.images.machine import builders
from tests.support.oci import layer

ATTEMPTS = r"""
sub attempt { my ($name, $work) = @_; print "$name ", ($work->() ? "done" : "refused"), "\n" }
attempt("read", sub { my $file; open($file, "<", $ARGV[0]) and defined(<$file>) });
attempt("write", sub { my $file; open($file, "+<", $ARGV[0]) and syswrite($file, "x") });
attempt("network", sub { socket(my $socket, 2, 1, 0) });
attempt("unix", sub { socketpair(my $one, my $other, 1, 1, 0) });
attempt("namespace", sub { syscall($ARGV[1], 0x10000000) == 0 });
attempt("trace", sub { syscall($ARGV[2], 0, 0, 0, 0) == 0 });
"""
_WORKER = ("-I", "-m", "infranetes.images.machine.worker")
CALLS = {"x86_64": ("272", "101"), "aarch64": ("97", "117")}  # unshare, ptrace


def work(order: Order, *program: str, inherited: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *_WORKER, json.dumps(attrs.asdict(order)), *program]
    return subprocess.run(words, capture_output=True, text=True, pass_fds=inherited)


class WorkerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.order = Order(os.getpid(), DiskLimits())

    def file(self, data: bytes = b"") -> int:
        descriptor = os.memfd_create("test", 0)
        self.addCleanup(os.close, descriptor)
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def test_a_program_reads_and_computes_and_gets_at_nothing_else(self) -> None:
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        directory.chmod(0o755)
        file = directory / "file"
        file.write_text("content\n")
        file.chmod(0o666)
        ended = work(self.order, "/usr/bin/perl", "-e", ATTEMPTS, str(file), *CALLS[platform.machine()])
        said = dict(line.split() for line in ended.stdout.splitlines())
        refused = dict.fromkeys(("write", "network", "unix", "namespace", "trace"), "refused")
        self.assertEqual(said, {"read": "done", **refused}, ended.stderr)

    def test_a_disk_is_taken_out_of_a_layer(self) -> None:
        source, target = self.file(layer({"disk/a.img": builders.mbr()})), self.file()
        order = attrs.evolve(self.order, layers=((source, ""),), target=target)
        ended = work(order, inherited=(source, target))
        answer = json.loads(ended.stdout)
        self.assertEqual((answer["format"], answer["name"], answer["bios"]), ("raw", "a.img", True))
        self.assertEqual(os.pread(target, 1000, 0), builders.mbr())

    def test_what_can_not_be_used_is_told_by_code_and_words(self) -> None:
        source, target = self.file(layer({})), self.file()
        order = attrs.evolve(self.order, layers=((source, ""),), target=target)
        ended = work(order, inherited=(source, target))
        self.assertEqual((ended.returncode, ended.stdout), (BAD, ""))
        self.assertIn("no disk", ended.stderr)

    def test_a_daemon_with_lower_limits_has_it_keep_to_these(self) -> None:
        source, target = self.file(builders.mbr()), self.file()
        order = attrs.evolve(self.order, file=source, target=target)
        limited = ["prlimit", "--cpu=100:100", sys.executable, *_WORKER, json.dumps(attrs.asdict(order))]
        ended = subprocess.run(limited, capture_output=True, text=True, pass_fds=(source, target))
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_it_does_not_work_for_a_daemon_that_has_died(self) -> None:
        ended = work(attrs.evolve(self.order, parent=1))
        self.assertEqual(ended.returncode, FAILED)

    def test_more_memory_than_it_may_have_is_a_fault_of_the_disk(self) -> None:
        """zstd's largest window, say."""
        small = attrs.evolve(self.order.limits, memory_bytes=100 << 20)
        source, target = self.file(b"\xfd7zXZ\0" + bytes(100)), self.file()
        ended = work(
            attrs.evolve(self.order, limits=small, file=source, target=target), inherited=(source, target)
        )
        self.assertEqual(ended.returncode, BAD)
