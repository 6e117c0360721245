"""Parts of a user's own for esper_soa: two blueprints, a reward and an agent. See README.md beside this package."""
