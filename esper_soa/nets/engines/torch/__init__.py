"""The engine in torch, on every device: the meaning of training and validation of any layers."""
