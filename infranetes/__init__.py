"""The node daemon: a Kubernetes container runtime whose pods are virtual machines."""
