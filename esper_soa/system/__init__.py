"""Parts below the networks: cores, threads, files, caches, random streams, signals, console."""
