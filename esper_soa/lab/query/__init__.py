"""SQL over runs: a DuckDB database of their tables and lines, and the command esper-query."""
