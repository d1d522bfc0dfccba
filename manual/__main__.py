# SPDX-License-Identifier: Apache-2.0
"""`python -m manual`: build the site, check it, and list its versions."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from infranetes_common import __version__
from manual import checks, interfaces
from manual.accessible import repaired
from manual.pages import BadPage, prepare

TREE = Path(__file__).resolve().parents[1]
CONFIGURATION = TREE / "manual"
_ENTRY = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>Infranetes</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<h1>Infranetes</h1>
<ul>{versions}</ul>
</html>
"""


def build(tree: Path, site: Path, work: Path, version: str = __version__) -> list[str]:
    """Build the pages of a version into a directory of its own in the site; return what is wrong with them.

    :param work: where the generator keeps what it needs.
    :raise BadPage: a page leads to no file.
    """
    source, output = work / "source", site / version
    prepare(tree, source)
    for name, text in interfaces.pages().items():
        (source / name).write_text(text)
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-c", str(CONFIGURATION), "-d", str(work / "doctrees"), str(source), str(output)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        return (done.stderr or done.stdout).replace(f"{source}/", "").strip().splitlines()
    shutil.rmtree(output / ".doctrees", ignore_errors=True)
    for page in output.glob("*.html"):
        page.write_text(repaired(page.read_text()))
    list_versions(site)
    return list(checks.faults(output))


def list_versions(site: Path) -> None:
    """Write the site's list of versions and its first page: those that are there, the newest first."""
    found = sorted((each.name for each in site.iterdir() if (each / "index.html").exists()), key=_order)[::-1]
    (site / "versions.json").write_text(json.dumps(found) + "\n")
    items = "".join(f'<li><a href="{name}/index.html">{name}</a></li>' for name in found)
    stable = [name for name in found if ".dev" not in name] or found
    (site / "index.html").write_text(_ENTRY.format(newest=stable[0], versions=items))


def _order(version: str) -> tuple[tuple[int, ...], bool]:
    release, _, developed = version.partition(".dev")
    return tuple(int(each) for each in release.split(".") if each.isdigit()), not developed


def main(arguments: Sequence[str]) -> int:
    """Build the site; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m manual", description=__doc__)
    parser.add_argument("--site", default=str(TREE / "build/site"), help="where it goes (%(default)s)")
    options = parser.parse_args(arguments)
    site = Path(options.site)
    site.mkdir(parents=True, exist_ok=True)
    try:
        found = build(TREE, site, TREE / "build/manual")
    except BadPage as error:
        found = [str(error)]
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{site}/{__version__}/index.html")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
