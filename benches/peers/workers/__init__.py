"""One module for each Python peer, run as a process of its own: `python -m workers.NAME`."""
