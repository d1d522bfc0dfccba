"""What the machine and its containers use: read from the kernel's own files, measured when asked."""
