"""Analysis and organisation of runs; the core does not need it."""
