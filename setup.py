# SPDX-License-Identifier: Apache-2.0
"""Builds the `infranetes` distribution: node daemon, agent and what they share."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

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
    "requests>=2.28",
    "apache-libcloud>=3.4.1",
    "prometheus-client>=0.16",
    "pycdlib>=1.12",
]

TRACING = ["opentelemetry-sdk>=1.20", "opentelemetry-exporter-otlp-proto-http>=1.20"]

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
        "pyvmomi>=6.7.1",
        *TRACING,
        "opentelemetry-proto>=1.20",
    ],
    "aws": ["botocore>=1.29"],
    "tracing": TRACING,
    "vsphere": ["pyvmomi>=6.7.1"],
    # The last three are only measured: see docs/dependencies.md.
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


class BuildWithProtobuf(build_py):
    """build_py that first compiles proto/ to the descriptor set which the packages load."""

    def run(self) -> None:
        compiler = [sys.executable, str(HERE / "proto" / "compile.py"), "--if-needed"]
        subprocess.run(compiler, check=True)  # noqa: S603
        super().run()


setup(
    name="infranetes",
    version=version(),
    description="A Kubernetes container runtime whose pods are virtual machines",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"": "."},
    packages=find_packages(
        include=[
            "txgrpc*",
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
            "config/configuration.md",
            "py.typed",
        ],
        "vmserver": ["**/*.json", "**/*.toml", "**/*.in", "py.typed"],
        "txgrpc": ["py.typed"],
    },
    include_package_data=False,
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "infranetes-ctl=infranetes.ctl.__main__:main",
            "infranetes-guest=infranetes.publish.command:main",
            "infranetes-flexvolume=infranetes.flexvolume.cli:main",
        ],
        # Found like any plug-in's, which shows that these doors are open.
        "infranetes.providers": ["simulated=infranetes_simulation:create"],
        "infranetes.provider_settings": ["simulated=infranetes_simulation.provider.settings:Settings"],
        "vmserver.containers": ["fake=infranetes_simulation.containers:create"],
    },
    cmdclass={"build_py": BuildWithProtobuf},
    zip_safe=False,
)
