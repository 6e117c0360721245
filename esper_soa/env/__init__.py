"""The simulator: pure kernels over the env state of N envs; knows nothing of the policy."""
