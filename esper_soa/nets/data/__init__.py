"""Images, and the batches that an env-step draws from them."""
