"""Clouds to test against: simulators over HTTP whose VMs have real agents."""
