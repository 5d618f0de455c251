"""Objects on their way to other processes: pickling, sharing, names of the script."""
