# SPDX-License-Identifier: Apache-2.0
"""The guest image's builder, over small trees; real images are made for the end-to-end tests."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import build as builder
from infranetes.guest import cli, image, quiet, recipe, shims, sources
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted
from tests.harness.needs import needs_programs, needs_root
from vmserver import config as agent


def check_syntax(script: str) -> None:
    compile(script, "warm", "exec")


class RecipeTests(SynchronousTestCase):
    """What goes into the image."""

    def test_docker_leaves_the_network_alone_and_bounds_its_logs(self) -> None:
        docker = json.loads(recipe.DOCKER.files["etc/docker/daemon.json"][1])
        self.assertEqual(
            (docker["bridge"], docker["iptables"], docker["live-restore"]), ("none", False, True)
        )
        self.assertEqual(set(docker["log-opts"]), {"max-size", "max-file"})

    def test_paths_stay_in_the_tree_and_scripts_can_be_run(self) -> None:
        files = [*recipe.FILES.items()]
        for containers in recipe.CONTAINERS.values():
            files += containers.files.items()
        for path, (mode, text) in files:
            self.assertFalse(path.startswith("/") or ".." in path, path)
            self.assertEqual(text.startswith("#!"), bool(mode & stat.S_IXUSR), path)
            self.assertTrue(text.endswith("\n"), path)
        check_syntax(recipe.DOCKER.files["usr/lib/infranetes/warm"][1])

    def test_whatever_runs_containers_is_in_one_image_alone(self) -> None:
        self.assertIn("docker.io", recipe.DOCKER.packages)
        self.assertNotIn("docker.io", (*recipe.PACKAGES, *recipe.OCI.packages))

    def test_the_agent_of_each_image_offers_what_is_in_it(self) -> None:
        for containers in recipe.CONTAINERS.values():
            _, text = containers.files.get("etc/infranetes/vmserver.toml", (0, ""))
            file = Path(self.mktemp())
            file.write_text(text)
            config = agent.load(file)
            self.assertEqual((config.provider, *config.choices), containers.providers, containers.name)

    def test_the_agent_of_each_image_does_what_udevd_and_the_journal_do_not(self) -> None:
        path = "etc/infranetes/vmserver.toml.d/guest.toml"
        file = Path(self.mktemp())
        file.write_text(recipe.FILES[path][1])
        config = agent.load(file)
        self.assertEqual((config.hotplug, config.log_file), (True, quiet.LOG))
        self.assertIn(quiet.UNIT_NAME, recipe.ENABLED)
        self.assertFalse([name for name in recipe.FILES if "80-infranetes" in name])

    def test_systemd_does_not_see_the_mounts_of_an_agent_whose_containers_are_its_own(self) -> None:
        for containers in recipe.CONTAINERS.values():
            _, text = containers.files.get("etc/infranetes/vmserver.toml.d/mounts.toml", (0, ""))
            file = Path(self.mktemp())
            file.write_text(text)
            kept = agent.load(file).mount_namespace
            self.assertEqual(bool(kept), containers.providers[0] == "oci", containers.name)
            units = "".join(text for _, text in containers.files.values())
            self.assertIn(f"unshare --mount={kept} " if kept else "", units)

    def test_docker_beside_another_does_not_run_before_it_is_wanted(self) -> None:
        both = recipe.BOTH
        self.assertIn("docker.io", both.packages)
        self.assertEqual(set(both.disabled), {"docker.service", "docker.socket", "containerd.service"})
        self.assertEqual(both.enabled, ())
        for path, (_, text) in both.files.items():
            self.assertNotIn("WantedBy", text, path)


class ShimTests(SynchronousTestCase):
    """The script that containerd runs as its shim, with a directory and a shim of the test's own."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.ready = self.root / "ready"
        self.bundle = self.root / "bundle"
        for folder in (self.ready, self.bundle):
            folder.mkdir(parents=True)
        real = self.root / "shim"
        real.write_text('#!/bin/sh\nprintf "really %s" "$*"\n')
        real.chmod(0o755)
        _, text = shims.FILES["usr/local/bin/containerd-shim-runc-v2"]
        self.script = self.root / "script"
        self.script.write_text(text.replace(shims.DIRECTORY, str(self.root)).replace(shims.SHIM, str(real)))
        self.script.chmod(0o755)

    def answer(self, action: str) -> str:
        command = [str(self.script), "-namespace", "moby", "-id", "x", action]
        return subprocess.run(command, cwd=self.bundle, capture_output=True, text=True, check=True).stdout

    def test_a_shim_that_waits_is_handed_out_once(self) -> None:
        (self.ready / str(os.getpid())).write_text("unix:///run/one")
        self.assertEqual(self.answer("start"), "unix:///run/one")
        self.assertEqual((self.bundle / "address").read_text(), "unix:///run/one")
        self.assertEqual(list(self.ready.iterdir()), [])
        self.assertEqual(self.answer("start"), "really -namespace moby -id x start")

    def test_one_that_has_ended_is_not(self) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        (self.ready / str(ended.pid)).write_text("unix:///run/one")
        self.assertEqual(self.answer("start"), "really -namespace moby -id x start")
        self.assertFalse((self.bundle / "address").exists())

    def test_all_but_start_is_the_shims_own(self) -> None:
        (self.ready / str(os.getpid())).write_text("unix:///run/one")
        self.assertEqual(self.answer("delete"), "really -namespace moby -id x delete")
        self.assertTrue((self.ready / str(os.getpid())).exists())


class SourcesTests(SynchronousTestCase):
    """Which sources are taken from this machine's apt."""

    def test_debians_archives_of_this_release_and_no_others(self) -> None:
        found = sources.of_this_machine()
        self.assertTrue(found.codename)
        self.assertTrue(any(f" {found.codename} main" in line for line in found.lines))
        for line in found.lines:
            self.assertRegex(line, r"^deb (\[signed-by=\S+\] )?https?://\S+ \S+ main$")
        for setting in found.settings:
            self.assertRegex(setting, r'^Acquire::\S+ "[^"]+";$')

    def test_another_release_is_where_this_machines_own_is(self) -> None:
        own = sources.of_this_machine()
        for codename in ("bookworm", "trixie"):
            found = sources.of_release(codename)
            self.assertEqual(found.codename, codename)
            self.assertEqual(
                [line.replace(codename, own.codename) for line in found.lines], list(own.lines), codename
            )

    def test_the_guests_release_is_chosen_whatever_the_nodes_is(self) -> None:
        self.assertEqual(recipe.RELEASE, "bookworm")


@functools.cache
def archives_of(codename: str) -> sources.Sources:
    """Return what this machine's apt says, which takes it a second, once."""
    return sources.of_release(codename)


@needs_root
@needs_programs("mmdebstrap")
class BuildTests(SynchronousTestCase):
    """From packages to an image that is in use."""

    def setUp(self) -> None:
        self.images = Path(self.mktemp())
        self.debs = Path(self.mktemp())
        self.debs.mkdir()
        for name in recipe.OUR_PACKAGES:
            (self.debs / f"{name}_1_all.deb").write_bytes(b"one")
        self.built = 0
        self.fault: Exception | None = None
        self.patch(builder, "of_release", archives_of)
        self.patch(builder, "_mmdebstrap", self.make_tree)
        self.patch(recipe, "DISK_GIB", 1)

    def make_tree(self, work: Path, root: Path, *_: Any) -> None:
        self.built += 1
        boot = root / "boot"
        boot.mkdir(parents=True)
        (boot / "vmlinuz-6.1.0-test").write_bytes(b"kernel")
        (boot / "initrd.img-6.1.0-test").write_bytes(b"initrd")
        self.has_docker = (work / "files/etc/docker/daemon.json").is_file()
        self.assertEqual(os.readlink(work / "files/etc/systemd/system/fstrim.timer"), "/dev/null")
        if self.fault is not None:
            raise self.fault

    def build(self, **options: Any) -> image.GuestImage:
        return builder.build(self.images, self.debs, lambda words: None, **options)

    def names(self) -> set[str]:
        return {path.name for path in self.images.iterdir()} - {"lock"}

    def test_what_is_built_is_whole_and_in_use_and_used_again(self) -> None:
        made = self.build()
        self.assertEqual(image.current(self.images), attrs_resolved(made))
        self.assertEqual(made.kernel.read_bytes(), b"kernel")
        self.assertEqual(made.initrd.read_bytes(), b"initrd")
        self.assertEqual(made.disk.stat().st_size, 1 << 30)
        self.assertEqual(made.kernel_version, "6.1.0-test")
        self.assertEqual(self.names(), {made.key, "current"})
        self.assertEqual(self.build().key, made.key)
        self.assertEqual((self.built, self.has_docker), (1, True))

    def test_it_is_shown_as_json_too(self) -> None:
        made = self.build()
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            self.assertEqual(cli.main(["show", "--json", "--image-dir", str(self.images)]), 0)
        shown = json.loads(said.getvalue())
        self.assertEqual((shown["key"], shown["codename"]), (made.key, made.codename))
        self.assertEqual(shown["packages"], list(made.packages))

    def test_what_runs_containers_makes_another_image(self) -> None:
        docker = self.build(containers=recipe.DOCKER)
        oci = self.build(containers=recipe.OCI)
        self.assertEqual((docker.providers, oci.providers), (("docker",), ("oci", "systemd")))
        self.assertNotEqual(oci.key, docker.key)
        self.assertEqual((image.current(self.images).key, self.has_docker), (oci.key, False))
        self.assertEqual(self.build(containers=recipe.DOCKER).key, docker.key)
        self.assertEqual(image.current(self.images).key, docker.key)
        self.assertEqual(self.built, 2)

    def test_an_image_that_has_more_will_do_where_one_says_so(self) -> None:
        docker = self.build(containers=recipe.DOCKER)
        oci = self.build(containers=recipe.OCI, or_more=True)
        self.assertNotEqual(oci.key, docker.key)
        both = self.build(containers=recipe.BOTH)
        self.assertEqual(self.build(containers=recipe.OCI, or_more=True).key, both.key)
        self.assertEqual(self.built, 3)
        (self.debs / "vmserver_1_all.deb").write_bytes(b"newer")
        newer = self.build(containers=recipe.OCI, or_more=True)
        self.assertEqual((newer.providers, self.built), (("oci", "systemd"), 4))
        self.assertEqual(self.build(containers=recipe.BOTH, or_more=True).providers, both.providers)

    def test_an_image_of_an_earlier_release_is_read(self) -> None:
        made = self.build()
        manifest = made.directory / image.MANIFEST
        fields = json.loads(manifest.read_bytes())
        del fields["providers"]
        manifest.write_text(json.dumps(fields))
        read = image.current(self.images)
        self.assertEqual((read.providers, read.packages), ((), made.packages))

    def test_other_packages_or_force_make_another_and_the_last_two_are_kept(self) -> None:
        first = self.build()
        forced = self.build(force=True)
        self.assertEqual((self.built, forced.key), (2, first.key))
        self.assertNotEqual(forced.directory, first.directory)
        for count in range(2):
            (self.debs / "vmserver_1_all.deb").write_bytes(b"%d" % count)
            made = self.build()
        self.assertEqual(self.built, 4)
        self.assertEqual(image.current(self.images).key, made.key)
        self.assertEqual(len(self.names()), 3)

    def test_a_build_that_fails_leaves_the_image_in_use_and_nothing_else(self) -> None:
        made = self.build()
        (self.debs / "vmserver_1_all.deb").write_bytes(b"two")
        for fault in (InfranetesError("no network"), KeyboardInterrupt()):
            self.fault = fault  # type: ignore[assignment]
            self.assertRaises(type(fault), self.build)
            self.assertEqual(self.names(), {made.key, "current"})
            self.assertEqual(image.current(self.images).key, made.key)

    def test_what_a_killed_build_left_is_cleared_away(self) -> None:
        leftover = self.images / ".build-dead" / "root"
        leftover.mkdir(parents=True)
        self.build()
        self.assertFalse(leftover.exists())

    def test_what_is_missing_is_named(self) -> None:
        (self.debs / "vmserver_1_all.deb").unlink()
        with self.assertRaises(FailedPrecondition) as caught:
            self.build()
        self.assertIn("make deb", str(caught.exception))
        self.assertIn("vmserver", str(caught.exception))

    def test_a_full_disk_is_told_before_anything_is_made(self) -> None:
        self.patch(builder, "NEEDED_BYTES", 1 << 60)
        with self.assertRaises(ResourceExhausted) as caught:
            self.build()
        self.assertIn("make room", str(caught.exception))
        self.assertEqual((self.names(), self.built), (set(), 0))

    def test_an_image_that_is_not_whole_is_not_used(self) -> None:
        made = self.build()
        (made.directory / "initrd").unlink()
        with self.assertRaises(FailedPrecondition) as caught:
            image.current(self.images)
        self.assertIn("make image", str(caught.exception))
        shutil.rmtree(made.directory)
        self.assertRaises(FailedPrecondition, image.current, self.images)
        self.assertEqual(self.build().key, made.key)


class CommandTests(SynchronousTestCase):
    """`infranetes-guest`."""

    def test_without_an_image_it_says_how_to_make_one(self) -> None:
        said: list[str] = []
        cli.print = lambda *words, **_: said.append(" ".join(words))  # type: ignore[attr-defined]
        self.addCleanup(delattr, cli, "print")
        self.assertEqual(cli.main(["show", "--image-dir", self.mktemp()]), 1)
        self.assertIn("infranetes-guest build", said[0])
        self.assertEqual(cli.main(["build", "--debs", self.mktemp(), "--image-dir", self.mktemp()]), 1)
        self.assertIn("make deb", said[1])


def attrs_resolved(made: image.GuestImage) -> image.GuestImage:
    """Return the same image with the directory's path resolved."""
    return image.read(made.directory.resolve())
