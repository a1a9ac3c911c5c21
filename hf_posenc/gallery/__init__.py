"""Pictures of positional encodings and of the rules that stretch them: numbers in, drawings out."""
