# SPDX-License-Identifier: Apache-2.0
"""What the node daemon and the agent share: messages, errors, identity, configuration, logging."""

__version__ = "0.1.0"  # of everything here; debian/changelog says the same
