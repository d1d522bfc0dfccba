# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl, which asks a node's daemon and shows what it answers."""
