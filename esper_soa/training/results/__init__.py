"""What a run has come to: metrics, tables, verdict, anomalies, progress, the final test."""
