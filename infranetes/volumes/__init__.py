"""Files and directories of the node, carried into VMs and back."""
