"""The tests, as a package: what they share is in builders."""
