"""Networks as data: blueprints as tuples of parts, tables of parameters, what follows."""
