"""Networks taken out of a run: plain modules, their files, other formats."""
