"""A run: its settings become a world and a player, its rounds are played, logged and saved."""
