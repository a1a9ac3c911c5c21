"""The tools that several packages need: files, processes, dtypes, units, output on the console."""
