"""Results of a run: metrics, tables, verdict, anomalies, progress, the final test."""
