"""Fault campaigns: runs and files are damaged, killed and cut off by the thousand, and failures are counted."""
