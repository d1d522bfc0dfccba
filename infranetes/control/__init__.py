"""infranetes-ctl and the daemon's side of it."""

SOCKET = "control.sock"  # in run_dir
