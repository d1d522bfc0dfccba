# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl, and what the daemon answers to it."""
