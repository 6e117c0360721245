"""Device functions in Triton; see the files beside this folder for who launches them."""
