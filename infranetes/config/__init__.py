# SPDX-License-Identifier: Apache-2.0
"""The configuration of the node daemon: its keys, how it is read and checked, and what of it is in force.

Each room has the keys of its own table in a module of its own, such as `infranetes.csi.config`.
"""

from infranetes.config.reading import Reading, load, read
from infranetes.config.schema import Config

__all__ = ["Config", "Reading", "load", "read"]
