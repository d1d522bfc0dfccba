# SPDX-License-Identifier: Apache-2.0
"""Sphinx' configuration for the site. `python -m manual` calls it with what it depends on."""

from __future__ import annotations

from pathlib import Path

from infranetes_common import __version__

HERE = Path(__file__).resolve().parent

project = "Infranetes"
author = "Infranetes maintainers"
project_copyright = "Infranetes maintainers, Apache-2.0"
release = version = __version__
root_doc = "index"
extensions = ["myst_parser"]
myst_heading_anchors = 4
nitpicky = True
suppress_warnings = ["myst.header"]
html_theme = "furo"
html_title = f"Infranetes {__version__}"
html_static_path = [str(HERE / "static")]
templates_path = [str(HERE / "templates")]
html_css_files = ["site.css"]
html_js_files = [("versions.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
