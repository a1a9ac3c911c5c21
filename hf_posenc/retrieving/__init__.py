"""Whether a model finds what is hidden in a long text."""
