"""Settings: dataclasses and their ranges, composition, the parts that users register, errors,
paths."""
