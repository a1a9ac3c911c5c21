"""The effect of a method on a model, and an encoding's way of working, in words, numbers and pictures."""
