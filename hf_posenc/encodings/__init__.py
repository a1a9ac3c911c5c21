"""Putting an encoding into a model in the place of its RoPE, and taking it out again."""
