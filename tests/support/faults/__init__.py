"""Campaigns: runs and files are damaged, killed and cut off by the thousand, and what was not survived is told."""
