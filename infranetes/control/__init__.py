# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of infranetes-ctl: the calls on its control socket."""
