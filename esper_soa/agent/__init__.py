"""The decision makers: the recurrent PPO policy and the scripted ones."""
