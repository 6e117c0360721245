"""How networks run: choose.py takes one engine for a run; torch is the meaning of all of them."""
