# SPDX-License-Identifier: Apache-2.0
"""What the daemon answers to infranetes-ctl."""
