# SPDX-License-Identifier: Apache-2.0
"""Builds the `infranetes` distribution: node daemon, agent and what they share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent

# Lower bounds are what Debian 12 packages; the same code runs on the newest releases.
REQUIRES = [
    "Twisted[conch,tls]>=22.4",
    "zope.interface>=5.5",
    "h2>=4.1",
    "hpack>=4.0",
    "hyperframe>=6.0",
    "protobuf>=3.21",
    "attrs>=22.2",
    "cattrs>=22.2",
    "cryptography>=38.0",
    "pyOpenSSL>=23.0",
    "service-identity>=18.1",
    "treq>=22.2",
    "zstandard>=0.20",
    "h11>=0.14",
    "wsproto>=1.2",
    "jeepney>=0.8",
    "PyYAML>=6.0",
    "prometheus-client>=0.16",
    "pycdlib>=1.12",
]

# Imported by the providers of clouds alone: registry.py, libraries.py.
LIBCLOUD = ["apache-libcloud>=3.4.1", "requests>=2.28"]
TRACING = ["opentelemetry-sdk>=1.20", "opentelemetry-exporter-otlp-proto-http>=1.20"]

DOCS = ["sphinx>=5.3", "furo>=2022.12.7", "myst-parser>=0.18"]

EXTRAS = {
    "test": [
        "hypothesis>=6.67",
        "coverage>=6.5",
        "setuptools>=65",
        "grpcio>=1.51",
        # Of moto's own extra "server", what its server needs for EC2.
        "moto>=5.2",
        "flask>=2.2.2",
        "flask-cors>=3.0",
        "boto3>=1.26",
        "jsonschema>=4.10",
        "PyYAML>=6.0",
        "pyte>=0.8",
        *DOCS,
        "pyvmomi>=6.7.1",
        *LIBCLOUD,
        *TRACING,
        "opentelemetry-proto>=1.20",
    ],
    "aws": [*LIBCLOUD, "botocore>=1.29"],
    "azure": LIBCLOUD,
    "gcp": LIBCLOUD,
    "libcloud": LIBCLOUD,
    "openstack": LIBCLOUD,
    "docs": DOCS,
    "tracing": TRACING,
    "vsphere": [*LIBCLOUD, "pyvmomi>=6.7.1"],
    # The last three are only measured: see docs/dependencies-measured.md.
    "bench": ["grpcio>=1.51", "matplotlib>=3.6", "docker>=5.0", "grpclib>=0.4.7", "pyroute2>=0.7.2"],
    # Exact: another release of these finds other faults.
    "lint": ["ruff==0.17.5", "mypy==2.4.1", "mypy-zope==1.0.17", "types-protobuf", "types-PyYAML"],
}

# One ServiceMaker each. They go into Twisted's own plugin package, which has no __init__.py here.
PLUGINS = sorted(f"twisted.plugins.{file.stem}" for file in (HERE / "twisted" / "plugins").glob("*.py"))


def version() -> str:
    """The version that infranetes_common says; importing it would need what is yet to be installed."""
    text = (HERE / "infranetes_common" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', text, flags=re.M)
    assert found is not None
    return found[1]


def compile_proto() -> None:
    """Compile proto/ to the descriptor set which the packages load; an sdist has brought it."""
    if not (HERE / "PKG-INFO").exists():
        compiler = [sys.executable, str(HERE / "proto" / "compile.py"), "--if-needed"]
        subprocess.run(compiler, check=True)  # noqa: S603


class BuildWithProtobuf(build_py):
    """build_py that has the descriptors."""

    def run(self) -> None:
        compile_proto()
        super().run()


class SourceWithProtobuf(sdist):
    """sdist that has the descriptors, so that nobody who installs it needs protoc."""

    def run(self) -> None:
        compile_proto()
        super().run()


def links() -> dict[str, str]:
    """Return the project's links, below the address of its repository, if INFRANETES_URL names one."""
    url = os.environ.get("INFRANETES_URL", "").rstrip("/")
    if not url:
        return {}
    pages = f"{url}/blob/v{version()}"
    return {"Source": url, "Documentation": f"{pages}/docs/install.md", "Changelog": f"{pages}/CHANGELOG.md"}


def long_description() -> str:
    """Return README for readers elsewhere: its links and pictures lead to the repository, or are left out."""
    text = (HERE / "README.md").read_text()
    pages = links().get("Documentation", "").removesuffix("/docs/install.md")
    absolute = rf"[\1]({pages}/\2)" if pages else r"\1"
    picture = rf"![\1]({pages.replace('/blob/', '/raw/')}/\2)" if pages else ""
    text = re.sub(r"!\[([^\]]*)\]\((?!\w+://)([^)]+)\)", picture, text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+://|#)([^)]+)\)", absolute, text)


setup(
    name="infranetes",
    version=version(),
    description="A Kubernetes container runtime whose pods are virtual machines",
    license="Apache-2.0",
    license_files=["LICENSE"],
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=links(),
    keywords=["kubernetes", "cri", "virtual machines", "qemu", "container runtime", "twisted"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: No Input/Output (Daemon)",
        "Framework :: Twisted",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.13",
        "Topic :: System :: Clustering",
        "Topic :: System :: Emulators",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    package_dir={"": "."},
    packages=find_packages(
        include=[
            "infranetes",
            "infranetes.*",
            "infranetes_common*",
            "infranetes_simulation*",
            "vmserver*",
        ]
    ),
    py_modules=PLUGINS,
    package_data={
        "infranetes_common": ["py.typed"],
        "infranetes_common.wire": ["descriptors.binpb"],
        "infranetes": [
            "**/*.json",
            "**/*.sql",
            "**/*.toml",
            "**/*.sh",
            "**/*.in",
            "**/*.css",
            "**/*.js",
            "config/reference/*.md",
            "ctl/annotations.md",
            "py.typed",
        ],
        "vmserver": ["**/*.json", "**/*.toml", "**/*.in", "py.typed"],
    },
    include_package_data=False,
    install_requires=[*REQUIRES, f"txgrpc=={version()}"],  # a distribution of its own, of the same release
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "infranetes-ctl=infranetes.ctl.__main__:main",
            "kubectl-infranetes=infranetes.ctl.kubectl:main",
            "infranetes-guest=infranetes.publish.command:main",
            "infranetes-flexvolume=infranetes.flexvolume.cli:main",
        ],
        # Found like any plug-in's, which shows that these doors are open.
        "infranetes.providers": ["simulated=infranetes_simulation:create"],
        "infranetes.provider_settings": ["simulated=infranetes_simulation.provider.settings:Settings"],
        "vmserver.containers": ["fake=infranetes_simulation.containers:create"],
    },
    cmdclass={"build_py": BuildWithProtobuf, "sdist": SourceWithProtobuf},
    zip_safe=False,
)
