"""The node's files and directories that are carried into this VM."""
