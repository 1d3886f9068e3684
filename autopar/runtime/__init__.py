"""Everything that needs a process group: runs what the passes made, decides nothing."""
