"""What several packages need and no one of them owns: files, processes, dtypes, units, output on the console."""
