"""What networks are, as data: blueprints as tuples of parts, tables of parameters, what follows."""
