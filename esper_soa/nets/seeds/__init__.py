"""Seeds of N networks: their rows in pools, plans of passes, subset rows, blends, snapshots."""
