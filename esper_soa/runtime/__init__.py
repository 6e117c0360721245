"""What a run stands on: device, memory, compilation, ranks, signals, files, the console."""
