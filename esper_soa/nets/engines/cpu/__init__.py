"""Native CPU kernels of the networks: C sources, the compiler that builds them, and the switch that picks them."""
