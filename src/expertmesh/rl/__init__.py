"""Reinforcement learning in a run: rollouts by the engine, rewards by the user's functions, the policy's loss."""
