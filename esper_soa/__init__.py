"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy."""

from esper_soa.registry import agent, blueprint, reward

__all__ = ["agent", "blueprint", "reward"]
