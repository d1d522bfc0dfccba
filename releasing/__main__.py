# SPDX-License-Identifier: Apache-2.0
"""`python -m releasing VERSION`: make a release. CONTRIBUTING.md says what comes before it.

All of it happens in a clone: only when every step has succeeded does this repository get the two commits
(the release, and the development version after it) and the tag. With --dry-run it gets nothing, and the
artifacts can be looked at.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs

from releasing import artifacts, texts
from releasing.texts import NotReleasable

TREE = Path(__file__).resolve().parents[1]
BRANCH = "main"
_MODULE = "infranetes_common/__init__.py"
_TXGRPC = "txgrpc/pyproject.toml"  # a distribution of its own, of the same version
_CHART = "contrib/helm/infranetes/Chart.yaml"
_MANIFESTS = "contrib/kubernetes/infranetes.yaml"  # made of the chart
_PACKAGES = ("infranetes", "infranetes-common", "infranetes-simulation", "vmserver")


@attrs.frozen
class Release:
    """A release that is made.

    :ivar tree: the repository. :ivar build: the command that builds the packages into dist/.
    :ivar key: of gpg's, by which the tag is signed; "": it is not.
    """

    tree: Path
    version: str
    output: Path
    build: Sequence[str]
    key: str
    when: datetime

    def make(self, dry: bool) -> None:
        """Make it. :param dry: keep nothing but the artifacts.

        :raise NotReleasable: something is not as a release needs it, or a step failed."""
        texts.numbers(self.version)
        self._check()
        with tempfile.TemporaryDirectory(prefix="release-", dir="/var/tmp") as place:
            clone = Path(place) / "infranetes"
            _run(self.tree, "git", "clone", "--quiet", "--branch", BRANCH, str(self.tree), str(clone))
            self._release(clone)
            commit = _run(clone, "git", "rev-parse", "HEAD").strip()
            self._build(clone, commit)
            sign = ("--sign", f"--local-user={self.key}") if self.key else ("--annotate",)
            _run(
                clone,
                "git",
                *_who(clone),
                "tag",
                *sign,
                f"v{self.version}",
                "-m",
                f"Infranetes {self.version}",
            )
            self._begin_the_next(clone)
            if not dry:
                _run(self.tree, "git", "pull", "--quiet", "--ff-only", "--tags", str(clone), BRANCH)

    def _check(self) -> None:
        if _run(self.tree, "git", "status", "--porcelain", "--untracked-files=no"):
            raise NotReleasable("the tree has changes that are not committed: commit them, or take them back")
        if (branch := _run(self.tree, "git", "branch", "--show-current").strip()) != BRANCH:
            raise NotReleasable(f"this is the branch {branch or 'of no name'}: a release is made of {BRANCH}")
        if _run(self.tree, "git", "tag", "--list", f"v{self.version}"):
            raise NotReleasable(f"there is a tag v{self.version} already: choose the next version")
        said = texts.version_of((self.tree / _MODULE).read_text())
        if said.partition(".dev")[0] != self.version or ".dev" not in said:
            raise NotReleasable(
                f"the tree is {said}, which does not become {self.version}: change {_MODULE} first"
            )

    def _release(self, clone: Path) -> None:
        self._version(clone, self.version)
        _rewrite(clone / "CHANGELOG.md", lambda text: texts.released(text, self.version, self.when))
        _rewrite(clone / "debian/changelog", lambda text: texts.packaged(text, self.version, self.when))
        _rewrite(clone / "debian/infranetes.NEWS", lambda text: texts.news(text, self.version, self.when))
        _run(clone, "git", *_who(clone), "commit", "--quiet", "--all", "--message", f"Release {self.version}")

    def _version(self, clone: Path, version: str) -> None:
        """Write the version wherever it is said."""
        _rewrite(clone / _MODULE, lambda text: texts.with_version(text, version))
        _rewrite(clone / _TXGRPC, lambda text: texts.with_project_version(text, version))
        _rewrite(clone / _CHART, lambda text: texts.with_chart_version(text, version))
        _rewrite(clone / _MANIFESTS, lambda text: texts.with_manifests_version(text, version))

    def _build(self, clone: Path, commit: str) -> None:
        """Put the artifacts into an empty directory."""
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        name = f"infranetes-{self.version}"
        source = self.output / f"{name}.tar.gz"
        archive = ("git", "archive", f"--prefix={name}/", f"--output={source}", commit)
        _run(clone, *archive)
        _run(clone, *self.build)
        for deb in sorted((clone / "dist").glob("*.deb")):
            shutil.copy(deb, self.output)
        for package in _PACKAGES:
            document = _run(clone, sys.executable, "debian/sbom", package)
            (self.output / f"{package}.sbom.cdx.json").write_text(document)
        if not [*self.output.glob("*.deb")]:
            raise NotReleasable(f"`{shlex.join(self.build)}` made no package in dist/")
        commands = [
            shlex.join(archive[:3]),
            shlex.join(self.build),
            *(f"debian/sbom {each}" for each in _PACKAGES),
        ]
        told = artifacts.provenance(artifacts.digests(self.output), commit, self.version, commands, self.when)
        (self.output / artifacts.PROVENANCE).write_text(told)
        (self.output / artifacts.SUMS).write_text(artifacts.sums(artifacts.digests(self.output)))

    def _begin_the_next(self, clone: Path) -> None:
        coming = texts.following(self.version)
        self._version(clone, coming)
        _rewrite(clone / "debian/changelog", lambda text: texts.begun(text, coming, self.when))
        schema = clone / "docs/operations.md"
        _rewrite(schema, lambda text: texts.schema_said(text, self.version, coming.partition(".dev")[0]))
        _run(
            clone, "git", *_who(clone), "commit", "--quiet", "--all", "--message", f"version: {coming} begins"
        )


def _rewrite(file: Path, change: Callable[[str], str]) -> None:
    file.write_text(change(file.read_text()))


def _who(clone: Path) -> Sequence[str]:
    """Return what names the author where git knows none."""
    command = ["git", "config", "user.email"]
    known = subprocess.run(command, cwd=clone, capture_output=True, check=False)  # noqa: S603
    name, email = "Infranetes maintainers", "maintainers@infranetes.invalid"
    return () if known.returncode == 0 else ("-c", f"user.name={name}", "-c", f"user.email={email}")


def _run(directory: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise NotReleasable(f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Make the release; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m releasing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="of the release, such as 0.3.0")
    parser.add_argument("--dry-run", action="store_true", help="keep nothing but the artifacts")
    parser.add_argument("--output", default="dist/release", help="where the artifacts go (%(default)s)")
    parser.add_argument("--build", default="debian/make-deb", help="what builds the packages (%(default)s)")
    parser.add_argument(
        "--key", default="", help="gpg's key that signs the tag; without one it is not signed"
    )
    parser.add_argument("--tree", default=str(TREE), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    output, tree = Path(options.output).absolute(), Path(options.tree).absolute()
    release = Release(
        tree, options.version, output, shlex.split(options.build), options.key, datetime.now(UTC)
    )
    try:
        release.make(options.dry_run)
    except NotReleasable as error:
        print(f"no release was made: {error}", file=sys.stderr)
        return 1
    ended = (
        "nothing was kept but the artifacts"
        if options.dry_run
        else f"{BRANCH} and the tag v{release.version} are here"
    )
    print(f"{output}: {len([*output.iterdir()])} files; {ended}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
