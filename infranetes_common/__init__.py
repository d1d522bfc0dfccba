# SPDX-License-Identifier: Apache-2.0
"""Code shared by the node daemon and the agent: messages, errors, identity, configuration, logging."""

__version__ = "0.3.0.dev0"  # of every package here; debian/changelog says it as Debian does: 0.3.0~dev0
