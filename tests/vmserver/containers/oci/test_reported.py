# SPDX-License-Identifier: Apache-2.0
"""What other runtimes were reported to do wrong, with the images and containers of the reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from tests.contract.container_semantics import SemanticsCase, number
from tests.contract.container_sessions import Heard
from tests.harness.durations import slow
from tests.harness.needs import needs_crun
from tests.support.oci import busybox_layer, image, layer
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.interface import Streams

Files = Mapping[str, bytes | tuple[str, str]]

PASSWD = (
    b"root:x:0:0:root:/root:/bin/sh\nmongodb:x:999:65534::/data:/bin/false\napp:x:1000:1000::/home:/bin/sh\n"
)
GROUP = b"root:x:0:\nwheel:x:10:root\nmongodb:x:999:mongodb\napp:x:1000:\nextra:x:2000:app\n"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


class ReportCase(OciCase, SemanticsCase, TestCase):
    """Busybox, and what a report has besides."""

    async def use(self, files: Files, config: Mapping[str, Any] | None = None) -> None:  # Any: JSON
        """Have the next containers made of an image with these files, and this configuration."""
        built = image([busybox_layer(), *([layer(files)] if files else [])], config)
        await self.load(built)
        self.image_id = built.id

    def bind(self, at: str, content: str | None = None, **fields: Any) -> cri.Mount:  # Any: of the mount
        """Return the mount of a file with this content, or of a directory with the file `in`."""
        source = self.base / f"source-{len(os.listdir(self.base))}"
        if content is None:
            source.mkdir()
            (source / "in").write_text("within\n")
        else:
            source.write_text(content)
        return cri.Mount(container_path=at, host_path=str(source), **fields)


@needs_crun
class UserReportTests(ReportCase):
    """Users and groups of images."""

    @slow(20, "a container for each")
    async def test_a_user_has_its_groups_also_one_of_its_own_name(self) -> None:
        for user, groups in (
            ("mongodb", "999 65534"), ("", "0 10"), (":0", "0 10"), ("1000", "1000 2000"),
            ("1000:", "1000 2000"), ("1000:1234", "1234 2000"), ("app:extra", "2000"), ("7:8", "8"),
        ):  # fmt: skip
            await self.use({"etc/passwd": PASSWD, "etc/group": GROUP}, {"User": user})
            self.assertEqual(
                (await self.said("grep ^Groups /proc/self/status")).split()[1:], groups.split(), user
            )

    async def test_what_is_no_user_is_not_taken_for_root(self) -> None:
        for user in (
            "4294967295",
            "4294967296",
            "2147483648",
            "-1",
            "0x10",
            " 0",
            "root ",
            "0\n",
            "1000:ghost",
            "ghost",
        ):
            await self.use({"etc/passwd": PASSWD, "etc/group": GROUP}, {"User": user})
            await self.refused(InvalidArgument, self.create("true"))

    async def test_accounts_and_the_directory_of_them_may_be_links(self) -> None:
        files: dict[str, bytes | tuple[str, str]] = {
            "usr/etc/passwd": PASSWD, "usr/etc/group": GROUP, "etc/passwd": ("link", "/usr/etc/passwd"),
            "etc/group": ("link", "../usr/etc/group"),
        }  # fmt: skip
        await self.use(files, {"User": "app"})
        self.assertEqual(await self.said("id"), "uid=1000(app) gid=1000(app) groups=1000(app),2000(extra)\n")


@needs_crun
class MountReportTests(ReportCase):
    """Mounts over, below and through links of the image."""

    @slow(20, "a container for each")
    async def test_secrets_are_there_though_run_is_a_volume_and_var_run_leads_to_it(self) -> None:
        for link in ("/run", "../run"):
            await self.use(
                {"run": ("dir", "755"), "var": ("dir", "755"), "var/run": ("link", link)},
                {"Volumes": {"/run": {}}},
            )
            secret, run = self.bind(TOKEN, readonly=True), self.bind("/run")
            for mounts in ([secret], [run, secret], [secret, run]):
                for read_only in (False, True):
                    context = self.secured(readonly_rootfs=read_only)
                    said = await self.said(f"cat {TOKEN}/in; touch /run/x && echo ok", context, mounts=mounts)
                    self.assertEqual(said, "within\nok\n", (link, read_only))

    async def test_links_on_the_way_lead_within_the_root(self) -> None:
        await self.use({
            "conf": ("link", "/elsewhere/conf"), "elsewhere/conf": ("dir", "755"),
            "up": ("link", "../../../../.."), "etc/localtime": ("link", "/usr/share/zoneinfo/none"),
        })  # fmt: skip
        mounts = [
            self.bind("/conf/stack"),
            self.bind("/etc/localtime", "time\n"),
            self.bind("/up/tmp/reported", "up\n"),
        ]
        script = "cat /elsewhere/conf/stack/in /etc/localtime /tmp/reported"
        self.assertEqual(await self.said(script, mounts=mounts), "within\ntime\nup\n")
        self.assertFalse(Path("/tmp/reported").exists())

    async def test_a_mounts_path_may_have_any_characters(self) -> None:
        paths = ["/a b", "/a,b:c", "/a\\b", "/a\nb", "/ä\u2028", "/a=b", '/a"b', "//c//d/", "/e/.", "/x/../y"]
        mounts = [self.bind(path) for path in paths]
        self.assertEqual(
            await self.said("cat /a*/in /ä*/in /c/d/in /e/in /y/in", mounts=mounts), "within\n" * 10
        )

    async def test_what_can_not_be_mounted_says_why(self) -> None:
        await self.use({"file": b"", "dir": ("dir", "755"), "loop": ("link", "loop")})
        for mount, error, words in (
            (self.bind("/file"), FailedPrecondition, "Not a directory"),
            (self.bind("/dir", ""), FailedPrecondition, "Not a directory"),
            (self.bind("/file/below", ""), FailedPrecondition, "Not a directory"),
            (self.bind("/loop/x", ""), InvalidArgument, "too many links"),
        ):
            self.assertIn(words, await self.refused(error, self.run_container("true", mounts=[mount])))


@needs_crun
class RootReportTests(ReportCase):
    """Images and directories that are to lead a runtime out of the container."""

    async def test_a_working_directory_leads_nowhere_and_says_nothing_in_other_files(self) -> None:
        for path in ("/proc/self/fd/7", "/proc/self/fd/8/../../..", "/dev/fd/7"):
            await self.refused(FailedPrecondition, self.run_container("true", working_dir=path))
        await self.use({"out": ("link", "/proc/self/fd/7")}, {"WorkingDir": "/out"})
        await self.refused(FailedPrecondition, self.run_container("true"))
        said = await self.said("grep -c . /etc/passwd; pwd", working_dir="/a\nroot:x:0:0")
        self.assertEqual(said, "2\n/a\nroot:x:0:0\n")

    async def test_devices_and_masked_paths_are_the_runtimes_whatever_the_image_has(self) -> None:
        await self.use({
            "dev/null": ("link", "/proc/sys/kernel/core_pattern"),
            "dev/console": ("link", "/proc/sysrq-trigger"), "dev/shm": ("link", "/etc"),
            "dev/pts": ("link", "/tmp"), "etc/mtab": ("link", "../../../../etc"),
        })  # fmt: skip
        context = self.secured(masked_paths=["/proc/timer_list", "/proc/keys"])
        said = await self.said(
            "test -c /dev/null && cat /proc/keys | wc -c; grep -c ' /dev/shm ' /proc/mounts", context
        )
        self.assertEqual(said, "0\n1\n")

    async def test_a_process_inherits_no_capabilities_and_has_no_terminal_that_was_not_asked_for(
        self,
    ) -> None:
        context = self.secured(capabilities=cri.Capability(add_capabilities=["NET_ADMIN"]))
        said = await self.said("grep -e CapInh -e CapAmb /proc/self/status; stty -g </dev/tty", context)
        zeros = "0" * 16
        self.assertEqual(
            said, f"CapInh:\t{zeros}\nCapAmb:\t{zeros}\nsh: can't open /dev/tty: No such device or address\n"
        )

    async def test_who_may_not_enter_the_working_directory_is_in_it_all_the_same(self) -> None:
        await self.use({"home/nonroot": ("dir", "700")}, {"WorkingDir": "/home/nonroot"})
        self.assertEqual(await self.said("pwd", self.secured(run_as_user=number(12345))), "/home/nonroot\n")


@needs_crun
class EndReportTests(ReportCase):
    """How containers end, and what is seen of it."""

    async def test_one_that_stands_still_is_stopped(self) -> None:
        id = await self.run_container("sh", "-c", "kill -STOP $$")
        status = Path(f"/proc/{(await self.state(id)).pid}/status")
        await self.until(lambda: "T (stopped)" in status.read_text(), "it stands still")
        await self.provider.stop_container(id, 1)
        self.assertEqual((await self.ended(id)).exit_code, 137)

    @slow(20, "a megabyte by each stream, of each kind")
    async def test_who_is_attached_sees_the_last_bytes_and_so_does_the_log(self) -> None:
        for tty in (True, False):
            script = "read x; yes | tr -d '\\n' | head -c 1000000; echo END; exit 7"
            id = await self.create("sh", "-c", script, stdin=True, tty=tty)
            await self.provider.start_container(id)
            streams = Streams(tty=tty, stdin=True, stdout=True, stderr=not tty)
            heard = Heard(await self.provider.attach_session(id, streams))
            await heard.session.write(b"go\n")
            self.assertEqual(await heard.over, 7)
            self.assertEqual(heard.out.count(b"y"), 1_000_000)
            self.assertTrue(heard.out.rstrip().endswith(b"yEND"), heard.out[-20:])
            await self.ended(id)
            logged = b"".join(line.line for line in await self.lines(id))
            self.assertEqual((logged.count(b"y"), logged.rstrip()[-3:]), (1_000_000, b"END"))

    async def test_a_command_in_a_directory_that_is_gone_says_so(self) -> None:
        id = await self.run_container("sh", "-c", "rm -rf /w; echo gone; sleep 600", working_dir="/w")
        await self.until(lambda: self.lines(id), "it is gone")
        ran = await self.provider.exec_sync(id, ["pwd"], 30.0, 1000)
        self.assertIn(b"/w", ran.stderr)
        self.assertNotEqual(ran.exit_code, 0)
