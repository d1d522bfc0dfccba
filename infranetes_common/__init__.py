# SPDX-License-Identifier: Apache-2.0
"""What the node daemon and the agent share: messages, errors, identity, configuration, logging."""

__version__ = "0.2.0"  # of everything here; debian/changelog and CHANGELOG.md say the same
