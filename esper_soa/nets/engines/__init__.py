"""How networks run: an engine each, of which choose.py takes one for a run; torch is the meaning of
all of them.
"""
