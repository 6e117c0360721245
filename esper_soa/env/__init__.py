"""The simulator: pure kernels over the ledger of N envs; knows nothing of the policy."""
