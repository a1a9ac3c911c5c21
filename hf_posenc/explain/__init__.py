"""What a method does to a model, and how an encoding works, in words, numbers and pictures."""
