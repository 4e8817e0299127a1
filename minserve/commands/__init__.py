"""The commands of `minserve`, one module for each kind of work."""
