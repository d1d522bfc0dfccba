# SPDX-License-Identifier: Apache-2.0
"""A release of this tree, in a clone of it, with packages that take no minutes to build."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from infranetes_common import __version__
from tests.harness.durations import slow

TREE = Path(__file__).resolve().parents[2]
VERSION = __version__.partition(".dev")[0]
BUILD = "sh -c 'mkdir -p dist && cp debian/changelog dist/infranetes_all.deb'"


@slow(8, "the repository is cloned twice")
class ReleaseTests(SynchronousTestCase):
    def setUp(self) -> None:
        if not (TREE / ".git").exists() or ".dev" not in __version__:
            raise SkipTest("a release is made of a clone of a development version")
        self.place = Path(self.mktemp()).absolute()
        self.place.mkdir()
        self.tree, self.output = self.place / "tree", self.place / "output"
        self.git("clone", "--quiet", "--depth=1", f"file://{TREE}", str(self.tree), directory=TREE)
        self.git("checkout", "--quiet", "-B", "main")
        self.head = self.git("rev-parse", "HEAD")

    def git(self, *arguments: str, directory: Path | None = None) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *who, *arguments], cwd=directory or self.tree, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def release(self, *arguments: str, version: str = VERSION, build: str = BUILD) -> tuple[int, str]:
        command = [sys.executable, "-m", "releasing", version, "--tree", str(self.tree), "--build", build]
        command += ["--output", str(self.output), *arguments]
        done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def at(self, revision: str, name: str) -> str:
        return self.git("show", f"{revision}:{name}")

    def test_a_dry_run_leaves_the_artifacts_and_nothing_else(self) -> None:
        code, said = self.release("--dry-run")
        self.assertEqual(code, 0, said)
        self.assertEqual(self.git("rev-parse", "HEAD"), self.head)
        self.assertEqual((self.git("status", "--porcelain"), self.git("tag")), ("", ""))
        names = {each.name for each in self.output.iterdir()}
        self.assertLessEqual(
            {f"infranetes-{VERSION}.tar.gz", "infranetes_all.deb", "vmserver.sbom.cdx.json"}, names
        )
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=self.output, check=True)
        summed = {line.split()[1] for line in (self.output / "SHA256SUMS").read_text().splitlines()}
        self.assertEqual(summed, names - {"SHA256SUMS"})
        with tarfile.open(self.output / f"infranetes-{VERSION}.tar.gz") as archive:
            module = (
                archive.extractfile(f"infranetes-{VERSION}/infranetes_common/__init__.py").read().decode()
            )
        self.assertIn(f'__version__ = "{VERSION}"', module)
        self.assertIn(f"({VERSION})", (self.output / "infranetes_all.deb").read_text().splitlines()[0])
        sbom = json.loads((self.output / "infranetes.sbom.cdx.json").read_text())
        self.assertEqual(sbom["metadata"]["component"]["version"], VERSION)
        self.provenance_is_of(names - {"SHA256SUMS", "provenance.json"})

    def provenance_is_of(self, names: set[str]) -> None:
        """The statement has each file with its digest."""
        statement = json.loads((self.output / "provenance.json").read_text())
        self.assertEqual(statement["_type"], "https://in-toto.io/Statement/v1")
        told = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        self.assertEqual(told.keys(), names)
        for name, digest in told.items():
            self.assertEqual(hashlib.sha256((self.output / name).read_bytes()).hexdigest(), digest)

    def test_a_release_is_two_commits_and_a_tag(self) -> None:
        code, said = self.release()
        self.assertEqual(code, 0, said)
        self.assertEqual(self.git("rev-parse", "HEAD~2"), self.head)
        self.assertEqual(self.git("rev-parse", f"v{VERSION}^{{commit}}"), self.git("rev-parse", "HEAD~1"))
        tag = f"v{VERSION}"
        self.assertIn(f'"{VERSION}"', self.at(tag, "infranetes_common/__init__.py"))
        self.assertIn(f'\nversion = "{VERSION}"\n', self.at(tag, "txgrpc/pyproject.toml"))
        chart = self.at(tag, "contrib/helm/infranetes/Chart.yaml")
        self.assertIn(f"\nversion: {VERSION}\nappVersion: {VERSION}\n", chart)
        following = self.at("HEAD", "contrib/helm/infranetes/Chart.yaml")
        self.assertRegex(following, r"\nversion: [\d.]+-dev\.0\nappVersion: [\d.]+\.dev0\n")
        manifests = self.at(tag, "contrib/kubernetes/infranetes.yaml")
        self.assertIn(f"image: registry.example/infranetes:{VERSION}\n", manifests)
        self.assertNotIn(__version__, manifests)
        self.assertIn(f"\n## {VERSION} (", self.at(tag, "CHANGELOG.md"))
        self.assertTrue(self.at(tag, "debian/changelog").startswith(f"infranetes ({VERSION}) "))
        self.assertNotIn(f'"{VERSION}"', self.at("HEAD", "infranetes_common/__init__.py"))
        self.assertRegex(self.at("HEAD", "debian/changelog"), r"^infranetes \([\d.]+~dev0\) ")
        statement = json.loads((self.output / "provenance.json").read_text())
        [source] = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        self.assertEqual(source["digest"]["gitCommit"], self.git("rev-parse", "HEAD~1"))
        code, said = self.release()
        self.assertEqual(code, 1)
        self.assertIn(f"there is a tag v{VERSION} already", said)

    def test_a_build_that_fails_leaves_the_tree_as_it_was(self) -> None:
        code, said = self.release(build="sh -c 'echo no compiler >&2; exit 3'")
        self.assertEqual(code, 1)
        self.assertIn("no compiler", said)
        self.assertEqual((self.git("rev-parse", "HEAD"), self.git("tag")), (self.head, ""))

    def test_a_tree_with_changes_or_of_another_version_is_refused(self) -> None:
        code, said = self.release(version="9.0.0")
        self.assertEqual(code, 1)
        self.assertIn(f"the tree is {__version__}, which does not become 9.0.0", said)
        (self.tree / "README.md").write_text("changed")
        code, said = self.release()
        self.assertEqual(code, 1)
        self.assertIn("not committed", said)
