"""Two blueprints, two hosts, a reward and an agent of a user's own for esper_soa. See README.md
beside this package.
"""
