# SPDX-License-Identifier: Apache-2.0
"""Code shared by the node daemon and the agent: messages, errors, identity, configuration, logging."""

__version__ = "0.2.0"  # of every package here; the same as in debian/changelog and CHANGELOG.md
