"""Parts above the agent: device, memory, compilation, graphs, ranks."""
