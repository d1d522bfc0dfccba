# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl and the daemon's side of it."""
