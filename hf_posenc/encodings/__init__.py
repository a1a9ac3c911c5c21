"""The positional encodings a model can be trained with: sinusoids to RoPE, put on any model of the attention door."""
