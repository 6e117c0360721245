"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy."""
