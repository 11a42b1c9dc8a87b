"""Folders of torch's distributed checkpoint (DCP), read without torch, and nothing pickled in them is run."""

from launcher.checkpoint.foreign.dcp.folder import DcpFolder, read_dcp

__all__ = ["DcpFolder", "read_dcp"]
