"""What a run stands on: the device and its memory, compilation, ranks, signals, files, the
console."""
