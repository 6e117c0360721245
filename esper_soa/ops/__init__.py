"""Around the kernels: run folder, telemetry, progress, report, checkpoint, device."""
