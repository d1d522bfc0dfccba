"""infranetes-ctl and what it asks."""
