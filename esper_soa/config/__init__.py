"""Settings: dataclasses, their ranges, composition, parts that users register, errors, paths."""
